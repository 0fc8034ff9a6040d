"""Measure the recipes against their peers and against this machine's limits.

python benchmarks/peers.py --data FOLDER --bert-checkpoint FOLDER
python benchmarks/peers.py --suites mnist loop --rounds 9
python benchmarks/peers.py --scale 0.05 --rounds 1      # does it run?

Each recipe's own `main`, unchanged, is compared with loops that a competent user would write after
reading the documentation of PyTorch, Accelerate, Lightning Fabric and Hugging Face's Trainer. Both
sides have the same model, data, batch size, learning rate, schedule and number of samples, the same
precision unless a name says otherwise, and on a CPU the same number of threads.

The clock runs from the request for the first batch to the end of the last update. It includes data,
logging and tracking; it excludes evaluating and saving. On a GPU, each training begins with updates
that are not timed. Contestants take turns: A B C, then B C A. Each ratio is that of one round; the
tables show the median over rounds with the least and the greatest. The same code measures the
accuracy of both sides on held-out samples, in suites that train long enough for it.

mnist    an epoch of MNIST, at the default settings and in batches of 128; also against the
         model's own matrix products
resnet   ResNet-18 on CIFAR-10; also against the model's own convolutions. With CUDA also ResNet-50
         at 224 pixels on random images: its precisions, and timm if that is installed
bert     fine-tuning a checkpoint on an extract of SST-2, against HF Trainer
loop     the recipe's loop, with logging, against bare loops of about 1 ms a step
start    the time from a process's start to the end of its first update, on cached data
ddp      two gloo processes with accumulation 4, against DDP by hand
memory   peak resident memory of fresh processes
flags    --compile and --padding-free against the recipes' default settings (not by default)
quality  ResNet-18 on digits and BERT, trained longer to compare accuracies (not by default)

One set of goals is for two CPU cores with bf16 arithmetic, another for CUDA. The CUDA part was
written without a GPU at hand. Of its comparisons, only BERT-base has been measured on one, by
gpu.py (see gpu.md).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.materials import use_own_cache
from benchmarks.harness.options import Options

if TYPE_CHECKING:
    from benchmarks.harness.rounds import Suite


# Suites whose goals hold for the public data sets alone.
WITH_GOALS_FOR_PUBLIC_DATA = ("mnist", "mnist_128", "resnet", "bert")


def main(options: Options) -> None:
    """Measure the chosen suites one after the other, and write the results after each."""
    use_own_cache()
    import torch

    from benchmarks.harness import results, roofs
    from common.system.processor import cpu_threads

    logging.getLogger("lightning").setLevel(logging.ERROR)
    builders = suite_builders()
    torch.set_num_threads(cpu_threads())
    machine = results.describe_machine(roofs.measure_machine())
    for name, rate in machine["rates"].items():
        results.CONSOLE.print(f"{name}: {rate:,}")
    file = options.output or results.default_file()
    measured: list[Suite] = []
    for name in options.suites:
        for build in builders[name]:
            suite = build(options)
            if options.data is None and suite.name in WITH_GOALS_FOR_PUBLIC_DATA:
                suite.notes.append("the goals are for the public data set, and this is another")
            with results.CONSOLE.status("") as status:
                suite.run(options.rounds, status.update)
            measured.append(suite)
            results.show(suite)
            results.write(file, machine, options, measured)
    seconds = sum(suite.seconds for suite in measured)
    results.CONSOLE.print(f"written: {file.name}, {seconds:.0f} s")


def suite_builders() -> dict[str, list[Callable[[Options], Suite]]]:
    """Return the functions that build the suites, by the name of the flag `--suites`."""
    import torch

    from benchmarks.suites import bert, flags, mnist, processes, resnet

    builders: dict[str, list[Callable[[Options], Suite]]] = {
        "mnist": [mnist.mnist_suite, mnist.mnist_128_suite],
        "resnet": [resnet.resnet_suite],
        "bert": [bert.bert_suite],
        "loop": [mnist.loop_suite],
        "start": [processes.start_suite],
        "ddp": [processes.ddp_suite],
        "memory": [processes.memory_suite],
        "flags": [flags.mnist_flags_suite, flags.resnet_flags_suite, flags.bert_flags_suite],
        "quality": [resnet.resnet_quality_suite, bert.bert_quality_suite],
    }
    if torch.cuda.is_available():
        builders["resnet"].append(resnet.resnet50_suite)
    return builders


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
