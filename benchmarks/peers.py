"""Measure the recipes against their peers and against this machine's limits.

python benchmarks/peers.py --data FOLDER --bert-checkpoint FOLDER
python benchmarks/peers.py --suites mnist loop --rounds 9
python benchmarks/peers.py --steps 0.05 --rounds 1      # does it run?

What is compared: the recipe's own `main`, called as it is, against loops that a competent user
would write after the documentation of PyTorch, Accelerate, Lightning Fabric and Hugging Face's
Trainer. Same model, data, batch, precision (or the one named), learning rate, schedule and number
of samples; on the CPU the same threads. The clock runs from asking for the first batch to the end
of the last update, with data, logging and tracking, without evaluating and saving. On a GPU, each
training begins with updates that are not timed. Contestants
take turns, A B C, B C A; each ratio is that of one round, and the median over rounds is shown with
the least and the greatest. The mean training loss and, where training is long enough to mean
anything, the accuracy on held-out samples are those of each side, judged by the same code.

mnist    an epoch of MNIST, at the default settings and in batches of 128; also against the
         model's own matrix products
resnet   ResNet-18, CIFAR-10; also against its own convolutions. With CUDA also ResNet-50 at 224
         pixels on random images: its precisions, and timm where that is installed
bert     a checkpoint fine-tuned on an extract of SST-2, against HF Trainer
loop     the recipe's loop, logging on, against bare loops of about 1 ms a step
start    a process's start to the end of its first update, on cached data
ddp      two gloo processes, accumulation 4, against DDP by hand
memory   peak resident memory of fresh processes
flags    --compile and --padding-free against the recipes' default settings (not by default)
quality  ResNet-18 on digits and BERT for longer, for the accuracies' sake (not by default)

The goals shown are for two CPU cores with bf16 arithmetic, and others for CUDA. The CUDA part
has been written without a GPU at hand: nothing of it has been tried.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.materials import use_own_cache
from benchmarks.harness.options import Options


def main(options: Options) -> None:
    """Measure the suites asked for, one after the other, writing the results after each."""
    use_own_cache()
    import torch

    from benchmarks.harness import results, roofs
    from benchmarks.suites import bert, flags, mnist, processes, resnet
    from common.system.machine import cpu_threads

    logging.getLogger("lightning").setLevel(logging.ERROR)
    builders = {
        "mnist": [mnist.mnist, mnist.mnist_128],
        "resnet": [resnet.resnet],
        "bert": [bert.bert],
        "loop": [mnist.loop],
        "start": [processes.start],
        "ddp": [processes.ddp],
        "memory": [processes.memory],
        "flags": [flags.mnist_flags, flags.resnet_flags, flags.bert_flags],
        "quality": [resnet.resnet_quality, bert.bert_quality],
    }
    if torch.cuda.is_available():
        builders["resnet"].append(resnet.resnet50)
    torch.set_num_threads(cpu_threads())
    machine = results.describe_machine(roofs.measure_machine())
    for name, rate in machine["rates"].items():
        results.CONSOLE.print(f"{name}: {rate:,}")
    file, measured = options.output or results.default_file(), []
    for name in options.suites:
        for build in builders[name]:
            suite = build(options)
            if options.data is None and suite.name in ("mnist", "mnist_128", "resnet", "bert"):
                suite.notes.append("the goals are for the public data set, and this is another")
            with results.CONSOLE.status("") as status:
                suite.run(options.rounds, status.update)
            measured.append(suite)
            results.show(suite)
            results.write(file, machine, options, measured)
    results.CONSOLE.print(f"written: {file.name}, {sum(s.seconds for s in measured):.0f} s")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
