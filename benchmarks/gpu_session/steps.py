"""The steps of `benchmarks/gpu.py`, each in a process of its own that writes results at once.

python -m benchmarks.gpu_session.steps STEP FILE.json '{"options": "in JSON"}'
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks.gpu_session.step import Cell, Step
from benchmarks.harness.isolation import turn_off_cudnn_attention
from benchmarks.harness.materials import image_dataset, long_texts, random_bert, use_own_cache
from benchmarks.harness.options import Options
from benchmarks.harness.rounds import Comparison, Suite

NAN = float("nan")  # of what could not be measured: no goal is reached with it
RECIPES = ("mnist_mlp", "resnet", "bert")
PRECISIONS = ("fp16", "bf16", "tf32", "no")
# Updates of a round, which take a second or more on a GPU.
UPDATES = {"mnist_mlp": 2000, "resnet": 150, "bert": 100}
# Towards 94 % on CIFAR-10 in a minute, tried in turn until one gets there. The peak learning rate
# and the batch are those of DAWNBench's winners; the recipe has not been measured with them yet.
CIFAR10 = ("--batch-size", 512, "--learning-rate", 0.4, "--eval-every", 10**6, "--epochs")
CIFAR10_TRIES: tuple[tuple[object, ...], ...] = ((16,), (18, "--compile"), (24, "--compile"))


def gpu_tests(step: Step, selection: str, tiny_selection: str | None = None) -> None:
    """Run tests of `tests/gpu`, and keep the result of each.

    A tiny step runs `tiny_selection` on any device; without one, it only collects the tests.
    """
    report = step.file.with_suffix(".xml")
    report.unlink(missing_ok=True)
    words = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    words += ["tests/gpu", "-v", "-rs"]
    if step.tiny and tiny_selection is None:
        step.run("tests", [*words, "--collect-only", "-k", selection])
        step.note("collected", {"selection": selection})
        return
    chosen = tiny_selection if step.tiny and tiny_selection else selection
    anywhere = {"GPU_TESTS_ANYWHERE": "1"} if step.tiny else {}
    try:
        step.run("tests", [*words, f"--junitxml={report}", "-k", chosen], **anywhere)
    finally:
        if report.exists():
            note_tests(step, report, chosen)


def note_tests(step: Step, report: Path, selection: str) -> None:
    """Keep the outcome of each test in pytest's report."""
    cases = [*ElementTree.parse(report).iter("testcase")]
    passed = 0
    for case in cases:
        outcomes = {part.tag: part.get("message", "")[:500] for part in case}
        passed += not {"failure", "error", "skipped"} & outcomes.keys()
        name = f"{case.get('classname')}::{case.get('name')}"
        step.note(name, {"seconds": float(case.get("time", 0)), **outcomes})
    step.goal(f"GPU tests that passed ({selection})", passed, len(cases))


def smoke(step: Step) -> None:
    """Launch each recipe once in fp16, kill it after a checkpoint, and resume it."""
    gpu_tests(step, "smoke or moment", "(smoke and mnist) or moment")


def resume(step: Step) -> None:
    """Kill and resume each recipe with `--deterministic`: the bits of an uninterrupted run."""
    gpu_tests(step, "resume and not smoke")


def other_tests(step: Step) -> None:
    """Run the GPU tests that no other step runs."""
    gpu_tests(step, "not resume and not smoke and not moment")


def precisions(step: Step, recipe: str) -> None:
    """Train a recipe in each precision; then the same compiled, with one round each."""
    settings = step.data_of(recipe) | ({"batch_size": 4} if step.tiny else {})
    steps = 2 if step.tiny else UPDATES[recipe]
    cells = [
        Cell(f"{recipe} {title_of(precision)}", recipe, settings | {"mixed_precision": precision})
        for precision in (("fp16", "no") if step.tiny else PRECISIONS)
    ]
    step.measure(cells, steps, step.options.rounds)
    if step.tiny:
        return
    step.goal(f"{recipe}: share with a kernel running", share_of(cells[0]), least=0.9)
    for cell in cells:
        compiled = Cell(f"{cell.name} compiled", recipe, cell.settings, compiled=True)
        step.measure([compiled], steps, rounds=1)


def title_of(precision: str) -> str:
    """Return a precision's name for people: "fp32" for "no"."""
    return "fp32" if precision == "no" else precision


def share_of(cell: Cell) -> float:
    """Return the share of an update in which a kernel runs; NaN if it is not known."""
    return cell.figures.get("kernel_share", NAN)


def profile(step: Step) -> None:
    """Profile each recipe at its default settings."""
    for recipe in RECIPES[:1] if step.tiny else RECIPES:
        pairs = step.data_of(recipe).items()
        flags = [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", value)]
        if step.tiny:
            flags += ["--image-size", 8, "--batch-size", 4]
        steps = 12 if step.tiny else 80
        directory, _ = step.launch(
            f"profile-{recipe}", recipe, *flags, "--profile", "--max-steps", steps
        )
        verdict = json.loads((directory / "profile" / "verdict.json").read_text())
        step.note(recipe, verdict)
        busy = verdict["shares"]["memory"] + verdict["shares"]["compute"]
        step.goal(f"{recipe}: share of an update with a kernel running", busy, least=0.9)
        remove_models(directory)


def remove_models(directory: Path) -> None:
    """Remove the weights that a run has left; its figures stay."""
    for folder in ("model", "checkpoints"):
        shutil.rmtree(directory / folder, ignore_errors=True)


def compare(step: Step, suite: Suite, *prefixes: str) -> None:
    """Run those contestants of a suite whose names begin so; keep their ratios round by round."""
    from benchmarks.harness.results import summarize

    suite.contestants = {
        name: contestant
        for name, contestant in suite.contestants.items()
        if name.startswith(prefixes)
    }
    suite.comparisons = [
        comparison
        for comparison in suite.comparisons
        if {comparison.ours, comparison.theirs} <= {*suite.contestants}
    ]
    goals_of_others = [*step.record["goals"]]

    def keep(message: str = "") -> None:
        """Write the rounds in which each contestant has had its turn."""
        print(message, flush=True)
        rounds = min(map(len, suite.measurements.values()), default=0)
        if rounds == 0:
            return
        measurements = {name: turns[:rounds] for name, turns in suite.measurements.items()}
        summary = summarize(replace(suite, measurements=measurements))
        rows = [row | {"value": row["ratio"]["median"]} for row in summary["comparisons"]]
        step.record["goals"] = goals_of_others + rows
        step.note(suite.name, summary)

    if step.tiny:
        suite.warmup_steps = 0
        suite.untimed_steps = 1
    suite.run(step.options.rounds, keep)
    keep()


def resnet50(step: Step) -> None:
    """ResNet-50 at 224: fp16 against TF32, fp32 and timm; then its memory."""
    from benchmarks.suites.resnet import resnet50 as suite_of

    size, batch = (8, 2) if step.tiny else (224, 128)
    compare(step, suite_of(step.options, size, batch), "recipe", "timm")
    if step.tiny:
        return
    settings = {"dataset": "synthetic", "model": "resnet50", "image_size": size}
    settings["batch_size"] = batch
    cells = [
        Cell(f"resnet50 {title_of(p)}", "resnet", settings | {"mixed_precision": p})
        for p in ("fp16", "no")
    ]
    step.measure(cells, 20, rounds=1)
    half, full = (cell.figures.get("memory/peak_allocated_mib", NAN) for cell in cells)
    step.goal("ResNet-50, batch 128: memory of fp32 / fp16", full / half, least=1.7)
    step.goal("ResNet-50: share with a kernel running", share_of(cells[0]), least=0.9)


def bert_base(step: Step) -> None:
    """BERT-base on SST-2's lengths: fp16 against TF32 and HF Trainer with dynamic padding."""
    from benchmarks.suites.bert import bert, recipe_contestant_in

    turn_off_cudnn_attention()
    checkpoint = random_bert("tiny" if step.tiny else "base", step.tokenizer)
    step.options.bert_checkpoint = checkpoint
    suite = bert(step.options)
    if step.options.on_gpu:
        suite.contestants["recipe tf32"] = recipe_contestant_in("tf32", step.options, suite.steps)
        title = "BERT: recipe fp16 / recipe tf32"
        suite.comparisons.append(Comparison(title, "recipe", "recipe tf32"))
    compare(step, suite, "recipe", f"HF Trainer dynamic {step.options.precision}")
    mfu = suite.median("recipe", "mfu")
    step.goal("BERT-base: MFU", NAN if mfu is None else mfu)


def bert_large(step: Step) -> None:
    """BERT-large at length 128: its share of the peak."""
    turn_off_cudnn_attention()
    size, batch, steps = ("tiny", 2, 2) if step.tiny else ("large", 128, 30)
    settings: dict[str, Any] = {"max_length": 128, "batch_size": batch}
    settings["dataset"] = str(long_texts(64 if step.tiny else 8192))
    settings["model"] = str(random_bert(size, step.tokenizer))
    cells = [
        Cell(f"BERT-large {title_of(p)}", "bert", settings | {"mixed_precision": p})
        for p in (("no",) if step.tiny else ("fp16", "tf32"))
    ]
    step.measure(cells, steps, step.options.rounds)
    if step.tiny:
        return
    half = cells[0]
    mfu = half.figures.get("perf/mfu", NAN)
    step.goal(f"{half.name}, length 128: MFU", mfu, least=0.4)
    half_rate, single_rate = (cell.figures.get("samples_per_second", NAN) for cell in cells)
    step.goal("BERT-large, length 128: fp16 / tf32", half_rate / single_rate, least=1.8)
    compiled = Cell(f"{half.name} compiled", "bert", half.settings, compiled=True)
    step.measure([compiled], steps, rounds=1)


def mnist(step: Step) -> None:
    """MNIST against the textbook loops."""
    from benchmarks.suites.mnist import mnist as suite_of

    chosen = step.options.precision
    compare(step, suite_of(step.options), "recipe", f"Accelerate {chosen}", f"PyTorch {chosen}")


def cifar10(step: Step) -> None:
    """CIFAR-10 to 94 %."""
    dataset = image_dataset(step.options.data, "cifar10")
    small = ("--image-size", 8, "--max-steps", 2, "--batch-size", 4)
    tiny = ("--dataset", "synthetic", *small)
    if dataset == "digits" and not step.tiny:
        raise RuntimeError("there is no cifar10/ in --data")
    for epochs, *compiled in CIFAR10_TRIES:
        flags = tiny if step.tiny else ("--dataset", dataset, *CIFAR10, epochs, *compiled)
        directory, seconds = step.launch(f"cifar10-{epochs}", "resnet", *flags)
        summary = json.loads((directory / "summary.json").read_text())
        step.note(f"{epochs} epochs", {"flags": flags, "seconds_from_shell": seconds, **summary})
        remove_models(directory)
        if step.tiny:
            break
        title = f"CIFAR-10, {epochs} epochs{', compiled' if compiled else ''}"
        accuracy = summary["test/accuracy"]
        training_seconds = summary["time/train_seconds"]
        step.goal(f"{title}: test accuracy", accuracy, least=0.94)
        step.goal(f"{title}: seconds of training", training_seconds, most=60)
        if accuracy >= 0.94 and training_seconds <= 60:
            break


def transfer(step: Step) -> None:
    """How fast tensors travel; and what products and copies on the device reach."""
    from benchmarks.harness import roofs

    output = step.file.with_name("transfer-rates.json")
    words = ["benchmarks/transfer.py", "--output", output]
    try:
        step.run("transfer", [*words, "--largest", 4 if step.tiny else 1000])
    finally:
        step.note("copies", json.loads(output.read_text()) if output.exists() else None)
    if not step.tiny:
        step.note("machine", roofs.measure_machine())


@dataclass(frozen=True)
class Plan:
    """How a step is taken."""

    take: Callable[[Step], None]
    seconds: int  # that it may take
    packages: tuple[str, ...] = ()  # that it imports and a bare machine may lack


# In order of value.
STEPS: dict[str, Plan] = {
    "smoke": Plan(smoke, 240, ("pytest",)),
    "resnet50": Plan(resnet50, 300),
    "mnist": Plan(mnist, 150, ("datasets",)),
    "bert_base": Plan(bert_base, 240, ("datasets",)),
    "cifar10": Plan(cifar10, 240, ("datasets",)),
    "profile": Plan(profile, 150),
    "resume": Plan(resume, 240, ("pytest",)),
    "tests": Plan(other_tests, 240, ("pytest",)),
    "mnist_mlp": Plan(partial(precisions, recipe="mnist_mlp"), 150),
    "resnet": Plan(partial(precisions, recipe="resnet"), 240),
    "bert": Plan(partial(precisions, recipe="bert"), 300, ("datasets",)),
    "bert_large": Plan(bert_large, 200, ("datasets",)),
    "transfer": Plan(transfer, 90),
}


def main(name: str, file: str, options_as_json: str) -> None:
    """Take one step."""
    use_own_cache()
    from benchmarks.harness.results import describe_machine
    from common.config import TrainingConfig

    given = json.loads(options_as_json)
    data, tokenizer = (given[key] and Path(given[key]) for key in ("data", "tokenizer"))
    options = Options(rounds=given["rounds"], steps=0.01 if given["tiny"] else 1.0, data=data)
    step = Step(Path(file), given["tiny"], options, tokenizer)
    if not (step.tiny or options.on_gpu):
        raise SystemExit("there is no GPU here: pass --tiny to see whether the programme runs")
    offered = get_args(get_type_hints(TrainingConfig)["mixed_precision"])
    step.record |= {"tiny": step.tiny, "precisions offered": offered}
    step.record["machine"] = describe_machine({})
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True)
        step.record["nvidia_smi"] = answer.stdout.splitlines()
    step.write()
    STEPS[name].take(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
