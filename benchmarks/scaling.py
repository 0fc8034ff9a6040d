"""Measure the speed of several processes, fit a model of an update's time, and predict clusters.

python benchmarks/scaling.py --output scaling                  # here, on a CPU: as root
python benchmarks/scaling.py --output scaling --processes 1 2 4 8 --recipe resnet   # on 8 GPUs

Weak scaling keeps the batch of each process; strong scaling keeps the batch of all processes
together. On a CPU, each process is bound to a core.

Two processes also train in network namespaces of their own, over a slowed link
(`scaling_study/link.py`). The model is fitted to some of these runs and checked against the others.
Without the right to make namespaces, these runs are left out, and the report says why.

All runs take turns, in processes that live through all rounds; the tables show medians. The model
and its assumptions are in `scaling_study/step_time.py`. The efficiency of clusters is computed from
the model and the links of data sheets (`--links`), and not measured. This has not run on a GPU yet.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.materials import use_own_cache
from benchmarks.harness.result_file import write_results
from benchmarks.scaling_study.options import Options
from benchmarks.scaling_study.report import draw, report
from benchmarks.scaling_study.runs import measure
from benchmarks.scaling_study.study import study


def main(options: Options) -> None:
    """Measure, fit, predict, and write the results."""
    # SIGTERM must remove the namespaces, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    use_own_cache()
    from benchmarks.harness.results import describe_machine

    machine = describe_machine()
    measured = measure(options, lambda line: print(line, file=sys.stderr))
    results = study(measured, options)
    write_results(options.output / "scaling.json", results.as_json(machine))
    text = report(results)
    (options.output / "scaling.md").write_text(text, encoding="utf-8")
    draw(options.output / "scaling.png", results)
    print(text)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
