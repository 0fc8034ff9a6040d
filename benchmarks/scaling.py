"""Measure what more processes bring, fit a model of an update's time, and ask it about clusters.

python benchmarks/scaling.py --output scaling                  # here, on a CPU: as root
python benchmarks/scaling.py --output scaling --processes 1 2 4 8 --recipe resnet   # on 8 GPUs

Weak scaling keeps the batch of each process, strong scaling that of all. Processes on a CPU have
a core each. Two of them also train in network namespaces of their own, over a link that is slowed
(`link.py`): some of those runs are what the model is fitted to, the others what it is held against;
without the right to make namespaces they are left out, and it is said why. All take turns, in
processes that stay from round to round; medians are shown. The model and its assumptions are in
`step_time.py`; clusters are told from it by the links of data sheets (`--links`), without a
measurement. Has not run on a GPU yet.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.materials import use_own_cache
from benchmarks.scaling_study.options import Options
from benchmarks.scaling_study.report import draw, report
from benchmarks.scaling_study.runs import Run, measure
from benchmarks.scaling_study.step_time import (
    ASSUMPTIONS,
    BUCKET,
    STRATEGIES,
    Job,
    StepTime,
    buckets_of,
    error,
    fit,
)

# Published samples/s of one device, samples of its batch, parameters: NVIDIA DeepLearningExamples.
PUBLISHED = {
    "ResNet-50, A100, AMP": (2470, 256, 25_557_032),
    "BERT-large, A100, fp16, length 128": (580, 64, 335_000_000),
}


def job_of(run: Run, parameters: list[int]) -> Job:
    """Return what the model is asked about a run."""
    rate, _, delay = (run.link or "inf:0").partition(":")
    buckets, last = buckets_of(parameters)
    job = Job(run.processes, run.batch, sum(parameters), buckets, last, strategy=run.strategy)
    return replace(job, rate=float(rate) * 1e6 / 8, delay=float(delay) / 1e3)


def clusters(model: StepTime, job: Job, options: Options) -> dict[str, dict[str, float]]:
    """Return the efficiency of each strategy, by link and number of devices."""
    found = {}
    for asked in options.links:
        name, rate, microseconds = asked.rsplit(":", 2)
        for devices in options.devices:
            there = replace(job, processes=devices, rate=float(rate) * 1e9)
            there = replace(there, delay=float(microseconds) * 1e-6)
            each = {s: model.efficiency_of(replace(there, strategy=s)) for s in STRATEGIES}
            found[f"{name}, {devices:,} devices"] = each
    return found


def predict(model: StepTime, job: Job, options: Options) -> dict[str, dict[str, Any]]:
    """Return the efficiency that clusters would have, for this training and published ones."""
    ideal = {"software": math.inf, "latency": 0.0, "window": math.inf, "crowding": 1.0}
    device = replace(model, efficiency=options.link_efficiency, **ideal)
    told = {f"{options.recipe}, computing as fast as here": clusters(device, job, options)}
    for name, (speed, batch, parameters) in PUBLISHED.items():
        published = replace(device, per_update=0.0, per_sample=1 / speed, overlap=options.overlap)
        buckets = math.ceil(4 * parameters / BUCKET)
        there = Job(1, batch, parameters, buckets, 1 / buckets)
        told[f"{name} ({speed:,} samples/s, batch {batch})"] = clusters(published, there, options)
    return told


def main(options: Options) -> None:
    """Measure, fit, predict, and write what was found."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # namespaces are removed then, too
    use_own_cache()
    from benchmarks.harness.results import describe_machine

    machine = describe_machine({})
    facts, found = measure(options, lambda line: print(line, file=sys.stderr))
    jobs = {run: job_of(run, facts["parameters"]) for run in found}
    for run, one in found.items():
        one["seconds"] = run.processes * run.batch / one["samples_per_second"]
    model = fit([(jobs[run], one["seconds"]) for run, one in found.items() if run.is_fitted])
    for run, one in found.items():
        one["predicted"] = run.processes * run.batch / model.update(jobs[run])
        one["error"] = error(model, jobs[run], one["seconds"])
    unseen = [abs(one["error"]) for run, one in found.items() if not run.is_fitted]
    kind = f"{options.recipe}, {sum(facts['parameters']):,} parameters"
    content = {
        "workload": f"{kind}, {options.updates} updates, {options.rounds} rounds; medians",
        "machine": machine,
        "link": facts["link"],
        "links": options.links,
        "model": asdict(model),
        "assumptions": ASSUMPTIONS,
        "mean_unseen_error": sum(unseen) / len(unseen) if unseen else None,
        "largest_unseen_error": max(unseen, default=None),
        "runs": [{"name": run.name, **run._asdict(), **one} for run, one in found.items()],
        "clusters": predict(model, next(iter(jobs.values())), options),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    written = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    options.output.joinpath("scaling.json").write_text(written, encoding="utf-8")
    text = report(content, found)
    options.output.joinpath("scaling.md").write_text(text, encoding="utf-8")
    draw(options.output / "scaling.png", found, content["clusters"])
    print(text)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
