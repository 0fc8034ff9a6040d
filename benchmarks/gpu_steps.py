"""The steps of `benchmarks/gpu.py`, each in a process of its own that writes what it finds at once.

python -m benchmarks.gpu_steps STEP FILE.json '{"options": "in JSON"}'
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from benchmarks.gpu_step import Step
from benchmarks.materials import image_dataset, long_texts, random_bert, use_own_cache
from benchmarks.options import Options
from benchmarks.rounds import Suite

NAN = float("nan")  # of what could not be measured: no goal is reached with it
RECIPES = ("mnist_mlp", "resnet", "bert")
PRECISIONS = ("fp16", "bf16", "tf32", "no")
# Towards 94 % on CIFAR-10 in a minute, tried in turn until one gets there: the peak learning rate,
# its warm-up and the batch of DAWNBench's winners; of the recipe itself not measured yet.
CIFAR10 = ("--batch-size", 512, "--learning-rate", 0.4, "--eval-every", 10**6, "--epochs")
CIFAR10_TRIES: tuple[tuple[object, ...], ...] = ((16,), (18, "--compile"), (24, "--compile"))


def gpu_tests(step: Step, selection: str = "not resume") -> None:
    """Run `tests/gpu`: on a CPU all are skipped, but one where it is tried whether this works."""
    report = step.file.with_suffix(".xml")
    words = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    words += ["tests/gpu", "-v", "-rs", f"--junitxml={report}", "-k", selection]
    anywhere = {"GPU_TESTS_ANYWHERE": "1"} if "mnist" in selection else {}
    try:
        step.run("tests", words, **anywhere)
    finally:
        cases = [*ElementTree.parse(report).iter("testcase")]
        results = {f"{c.get('classname')}::{c.get('name')}": c for c in cases}
        for name, case in results.items():
            kinds = {part.tag: part.get("message", "")[:500] for part in case}
            step.note(name, {"seconds": float(case.get("time", 0)), **kinds})
        passed = sum(not {"failure", "error", "skipped"} & {part.tag for part in c} for c in cases)
        step.goal(f"GPU tests that passed ({selection})", passed, len(cases), None)


def resume(step: Step) -> None:
    """Kill and resume each recipe: the same bits as a run that was left alone."""
    gpu_tests(step, "resume and mnist" if step.tiny else "resume")


def precisions(step: Step, recipe: str) -> None:
    """Train a recipe in each precision, then the same compiled."""
    steps = 6 if step.tiny else {"mnist_mlp": 2000, "resnet": 300, "bert": 200}[recipe]
    settings = step.data_of(recipe) | ({"batch_size": 4} if step.tiny else {})
    for compiled in (False, True):
        for precision in PRECISIONS:
            # bf16 is emulated where a CPU does not choose it, at a hundredth of the speed.
            if step.tiny and precision == "bf16" != step.options.precision:
                continue
            # Compiling takes half a minute on a CPU, so it is tried with the smallest model.
            if compiled and step.tiny and (recipe, precision) != ("mnist_mlp", "no"):
                continue
            name = f"{recipe} {precision.replace('no', 'fp32')}{' compiled' if compiled else ''}"
            chosen = {**settings, "mixed_precision": precision}
            figures = step.cell(name, recipe, steps, compiled, **chosen)
            if not compiled and precision == "fp16" and "samples_per_second" in figures:
                step.goal(f"{recipe}: GPU busy", figures.get("gpu/utilization", NAN), 0.9, None)


def profile(step: Step) -> None:
    """Profile each recipe at its default settings: what share of an update is the GPU busy?"""
    for recipe in RECIPES[:1] if step.tiny else RECIPES:
        pairs = step.data_of(recipe).items()
        flags = [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", value)]
        directory, _ = step.recipe(
            f"profile-{recipe}", recipe, *flags, "--profile", "--max-steps", 20 if step.tiny else 80
        )
        verdict = json.loads((directory / "profile" / "verdict.json").read_text())
        step.note(recipe, verdict)
        busy = verdict["shares"]["memory"] + verdict["shares"]["compute"]
        step.goal(f"{recipe}: share of an update with a kernel running", busy, 0.9, None)
        for folder in ("model", "checkpoints"):
            shutil.rmtree(directory / folder, ignore_errors=True)


def compare(step: Step, suite: Suite, *kept: str) -> None:
    """Run a suite, of its contestants only those whose names begin so; keep its ratios."""
    from benchmarks.results import summarize

    chosen = {name: one for name, one in suite.contestants.items() if name.startswith(kept)}
    suite.contestants = chosen
    suite.comparisons = [c for c in suite.comparisons if {c.ours, c.theirs} <= {*chosen}]
    goals = [*step.found["goals"]]

    def keep(said: str = "") -> None:
        """Write the rounds that all have had a turn in."""
        print(said, flush=True)
        rounds = min(map(len, suite.measurements.values()), default=0)
        if rounds:
            measured = {name: some[:rounds] for name, some in suite.measurements.items()}
            summary = summarize(replace(suite, measurements=measured))
            rows = [row | {"value": row["ratio"]["median"]} for row in summary["comparisons"]]
            step.found["goals"] = goals + rows
            step.note(suite.name, summary)

    suite.run(step.options.rounds, keep)
    keep()


def resnet50(step: Step) -> None:
    """ResNet-50 at 224: precisions, memory, timm."""
    from benchmarks.resnet_suites import resnet50 as suite_of

    size, batch = (8, 4) if step.tiny else (224, 128)
    settings = {"dataset": "synthetic", "model": "resnet50", "image_size": size}
    peak = {}
    for precision in ("no",) if step.tiny else PRECISIONS:
        name, chosen = f"resnet50 {precision.replace('no', 'fp32')}", {"mixed_precision": precision}
        figures = step.cell(
            name, "resnet", 6 if step.tiny else 30, False, batch_size=batch, **settings, **chosen
        )
        peak[precision] = figures.get("memory/peak_allocated_mib", NAN)
    if not step.tiny:
        less = peak["no"] / peak["fp16"]
        step.goal("ResNet-50, batch 128: memory of fp32 / fp16", less, 1.7, None)
    compare(step, suite_of(step.options, size, batch), "recipe", "timm", "convolutions")


def bert_base(step: Step) -> None:
    """BERT-base on SST-2's lengths against HF Trainer with dynamic padding."""
    from benchmarks.text_suites import bert

    checkpoint = random_bert("tiny" if step.tiny else "base", step.tokenizer)
    step.options.bert_checkpoint = checkpoint
    compare(step, bert(step.options), "recipe", f"HF Trainer dynamic {step.options.precision}")


def bert_large(step: Step) -> None:
    """BERT-large at length 128: its share of the peak."""
    size, batch, steps = ("tiny", 4, 6) if step.tiny else ("large", 128, 40)
    settings = {"dataset": str(long_texts(64 if step.tiny else 8192)), "max_length": 128}
    settings["model"] = str(random_bert(size, step.tokenizer))
    cells = [("fp16", False), ("tf32", False), ("fp16", True)]
    for precision, compiled in [("no", False)] if step.tiny else cells:
        name = f"BERT-large {precision}{' compiled' if compiled else ''}"
        chosen = {**settings, "batch_size": batch, "mixed_precision": precision}
        figures = step.cell(name, "bert", steps, compiled, **chosen)
        if not step.tiny and precision == "fp16":
            step.goal(f"{name}, length 128: MFU", figures.get("perf/mfu", NAN), 0.4, None)
    tables = step.found["figures"]
    rates = [
        tables.get(f"BERT-large {one}", {}).get("samples_per_second") for one in ("fp16", "tf32")
    ]
    if None not in rates:
        step.goal("BERT-large, length 128: fp16 / tf32", rates[0] / rates[1], 1.8, None)


def mnist(step: Step) -> None:
    """MNIST against the textbook loops."""
    from benchmarks.mlp_suites import mnist as suite_of

    chosen = step.options.precision
    compare(step, suite_of(step.options), "recipe", f"Accelerate {chosen}", f"PyTorch {chosen}")


def cifar10(step: Step) -> None:
    """CIFAR-10 to 94 %."""
    dataset = image_dataset(step.options.data, "cifar10")
    small = ("--image-size", 8, "--max-steps", 4, "--batch-size", 4)
    tiny = ("--dataset", "synthetic", *small)
    if dataset == "digits" and not step.tiny:
        raise RuntimeError("there is no cifar10/ in --data")
    for epochs, *compiled in CIFAR10_TRIES:
        flags = tiny if step.tiny else ("--dataset", dataset, *CIFAR10, epochs, *compiled)
        directory, seconds = step.recipe(f"cifar10-{epochs}", "resnet", *flags)
        summary = json.loads((directory / "summary.json").read_text())
        step.note(f"{epochs} epochs", {"flags": flags, "seconds_from_shell": seconds, **summary})
        for folder in ("model", "checkpoints"):
            shutil.rmtree(directory / folder, ignore_errors=True)
        if step.tiny:
            break
        title = f"CIFAR-10, {epochs} epochs{', compiled' if compiled else ''}"
        accuracy, taken = summary["test/accuracy"], summary["time/train_seconds"]
        step.goal(f"{title}: test accuracy", accuracy, 0.94, None)
        step.goal(f"{title}: seconds of training", taken, None, 60)
        if accuracy >= 0.94 and taken <= 60:
            break


def transfer(step: Step) -> None:
    """How fast tensors travel; and what products and copies on the device reach."""
    from benchmarks import roofs

    output, plot = step.file.with_name("transfer-rates.json"), step.file.with_name("transfer.png")
    words = ["benchmarks/transfer.py", "--output", output, "--plot", plot]
    try:
        step.run("transfer", [*words, "--largest", 4 if step.tiny else 1000])
    finally:
        step.note("copies", json.loads(output.read_text()) if output.exists() else None)
    step.note("machine", roofs.measure_machine())


# In order of worth; with the seconds that each may take.
STEPS: dict[str, tuple[Callable[[Step], None], int]] = {
    "tests": (gpu_tests, 180),
    **{recipe: (partial(precisions, recipe=recipe), 180) for recipe in RECIPES},
    "resume": (resume, 200),
    "profile": (profile, 120),
    "resnet50": (resnet50, 240),
    "bert_base": (bert_base, 150),
    "bert_large": (bert_large, 150),
    "mnist": (mnist, 150),
    "cifar10": (cifar10, 200),
    "transfer": (transfer, 90),
}


def main(name: str, file: str, asked: str) -> None:
    """Take one step."""
    use_own_cache()
    from benchmarks.results import describe_machine
    from common.config import TrainingConfig

    given = json.loads(asked)
    data, tokenizer = (given[key] and Path(given[key]) for key in ("data", "tokenizer"))
    options = Options(rounds=given["rounds"], steps=0.01 if given["tiny"] else 1.0, data=data)
    step = Step(Path(file), given["tiny"], options, tokenizer)
    offered = get_args(get_type_hints(TrainingConfig)["mixed_precision"])
    step.found |= {"tiny": step.tiny, "precisions offered": offered}
    step.found["machine"] = describe_machine({})
    if shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        step.found["nvidia_smi"] = said.splitlines()
    step.write()
    STEPS[name][0](step)


if __name__ == "__main__":
    main(*sys.argv[1:])
