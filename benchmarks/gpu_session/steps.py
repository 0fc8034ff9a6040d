"""The steps of `benchmarks/gpu.py`. Each runs in a process of its own, which starts here.

python -m benchmarks.gpu_session.steps STEP FILE.json '{"options": "in JSON"}'
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from benchmarks.gpu_session.step import MeasuredRecipe, Step
from benchmarks.harness.isolation import turn_off_cudnn_attention
from benchmarks.harness.materials import image_dataset, long_texts, random_bert, use_own_cache
from benchmarks.harness.options import Options
from benchmarks.harness.rounds import Suite
from common.run_directory.record_files import read_record
from common.run_directory.records import Summary
from common.storage.json_files import read_json
from common.track.names import precision_name

NAN = float("nan")  # stands for a figure that could not be measured; it reaches no goal
RECIPES = ("mnist_mlp", "resnet", "bert")
LAUNCHED_RECIPES = (*RECIPES, "cifar10_fast")
PRECISIONS = ("fp16", "bf16", "tf32", "no")
# Updates of a round; they take a second or more on a GPU.
UPDATES = {"mnist_mlp": 2000, "resnet": 150, "bert": 100}
SEEDS = (0, 1, 2)
# The settings with which ResNet-18 reached 94.5 % on a CPU; see docs/results.md.
RESNET18_FLAGS: tuple[object, ...] = (
    *("--optimizer", "muon", "--batch-size", 500, "--epochs", 14, "--max-grad-norm", 0),
    *("--keep", "last", "--eval-every", 10**6),
)
TINY_FLAGS = ("--image-size", 16, "--max-steps", 2, "--batch-size", 4)
MAX_TEST_PROCESSES = 8
RESNET50_IMAGE_SIZE = 224
RESNET50_BATCH_SIZE = 128


def gpu_tests(step: Step, selection: str, tiny_selection: str | None = None) -> None:
    """Run some tests of `tests/gpu`, and keep the outcome of each.

    Args:
        selection: expression for pytest's `-k`.
        tiny_selection: tests that a tiny step runs, on any device; without it, a tiny step only
            collects the tests.
    """
    report = step.file.with_suffix(".xml")
    report.unlink(missing_ok=True)
    words = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    words += ["tests/gpu", "-v", "-rs", *parallel_test_flags()]
    if step.tiny and tiny_selection is None:
        step.run("tests", [*words, "--collect-only", "-k", selection])
        step.note("collected", {"selection": selection})
        return
    if step.tiny and tiny_selection:
        selection = tiny_selection
    anywhere = {"GPU_TESTS_ANYWHERE": "1"} if step.tiny else {}
    try:
        step.run("tests", [*words, f"--junitxml={report}", "-k", selection], **anywhere)
    finally:
        if report.exists():
            note_tests(step, report, selection)


def parallel_test_flags() -> list[str]:
    """Return the flags of pytest that run several tests at once, if pytest-xdist is installed."""
    processes = min(MAX_TEST_PROCESSES, (os.cpu_count() or 1) // 2)
    if processes < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(processes)]


def note_tests(step: Step, report: Path, selection: str) -> None:
    """Keep the outcome of each test in pytest's report."""
    cases = [*ElementTree.parse(report).iter("testcase")]
    passed = 0
    for case in cases:
        outcomes = {part.tag: part.get("message", "")[:500] for part in case}
        passed += not {"failure", "error", "skipped"} & outcomes.keys()
        name = f"{case.get('classname')}::{case.get('name')}"
        step.note(name, {"seconds": float(case.get("time", 0)), **outcomes})
    step.figure(f"GPU tests that passed ({selection})", passed, len(cases))


def smoke(step: Step) -> None:
    """Launch, kill and resume each recipe in fp16; test that a checkpoint is of its moment."""
    gpu_tests(step, "smoke or moment", "(smoke and mnist) or moment")


def resume(step: Step) -> None:
    """Kill and resume each recipe with `--deterministic`; the bits must not change."""
    gpu_tests(step, "resume and not smoke")


def other_tests(step: Step) -> None:
    """Run the GPU tests that no other step runs."""
    gpu_tests(step, "not resume and not smoke and not moment")


def precisions(step: Step, recipe: str) -> None:
    """Train a recipe in each precision, then compiled in each precision for one round."""
    settings = step.data_settings(recipe)
    if step.tiny:
        settings["batch_size"] = 4
    updates = 2 if step.tiny else UPDATES[recipe]
    recipes = [
        in_precision(precision, recipe, recipe, settings)
        for precision in (("fp16", "no") if step.tiny else PRECISIONS)
    ]
    step.measure(recipes, updates, step.options.rounds)
    if step.tiny:
        return
    step.figure(f"{recipe}: share with a kernel running", kernel_share(recipes[0]), least=0.9)
    for measured in recipes:
        name = f"{measured.name} compiled"
        compiled = MeasuredRecipe(name, recipe, measured.settings, compiled=True)
        step.measure([compiled], updates, rounds=1)


def in_precision(
    precision: str, title: str, recipe: str, settings: Mapping[str, object]
) -> MeasuredRecipe:
    """Return a recipe that is to be measured in a precision; the name is for tables."""
    name = f"{title} {precision_name(precision)}"
    return MeasuredRecipe(name, recipe, {**settings, "mixed_precision": precision})


def kernel_share(measured: MeasuredRecipe) -> float:
    """Return the share of an update in which a kernel runs; NaN if it is unknown."""
    return measured.figures.get("kernel_share", NAN)


def profile(step: Step) -> None:
    """Profile each recipe at its default settings."""
    for recipe in RECIPES[:1] if step.tiny else RECIPES:
        flags: list[object] = []
        for name, value in step.data_settings(recipe).items():
            flags += [f"--{name.replace('_', '-')}", value]
        if step.tiny:
            flags += ["--image-size", 8, "--batch-size", 4]
        updates = 12 if step.tiny else 80
        directory, _ = step.launch(
            f"profile-{recipe}", recipe, *flags, "--profile", "--max-steps", updates
        )
        verdict = read_json(directory / "profile" / "verdict.json")
        step.note(recipe, verdict)
        busy = verdict["shares"]["memory"] + verdict["shares"]["compute"]
        step.figure(f"{recipe}: share of an update with a kernel running", busy, least=0.9)
        remove_models(directory)


def remove_models(directory: Path) -> None:
    """Remove a run's weights; its figures stay."""
    for folder in ("model", "checkpoints"):
        shutil.rmtree(directory / folder, ignore_errors=True)


def compare(step: Step, suite: Suite, *names: str) -> None:
    """Run some contestants of a suite, and keep their ratios.

    The record is written after each turn, so that a kill loses at most one round.
    """
    from benchmarks.harness.results import summarize

    suite.contestants = {
        name: contestant for name, contestant in suite.contestants.items() if name in names
    }
    suite.comparisons = [
        comparison
        for comparison in suite.comparisons
        if {comparison.ours, comparison.theirs} <= {*suite.contestants}
    ]
    earlier_goals = [*step.record["goals"]]

    def keep(message: str = "") -> None:
        """Write the rounds in which each contestant has had its turn."""
        print(message, flush=True)
        rounds = min((len(turns) for turns in suite.measurements.values()), default=0)
        if rounds == 0:
            return
        measurements = {name: turns[:rounds] for name, turns in suite.measurements.items()}
        summary = summarize(replace(suite, measurements=measurements))
        rows = [row | {"value": row["ratio"]["median"]} for row in summary["comparisons"]]
        step.record["goals"] = earlier_goals + rows
        step.note(suite.name, summary)

    if step.tiny:
        suite.warmup_updates = 0
        suite.untimed_updates = 1
    suite.run(step.options.rounds, keep)
    keep()


def resnet50(step: Step) -> None:
    """ResNet-50 at 224 pixels against timm."""
    compare(step, small_or_large_resnet50(step), "recipe", "timm AMP channels-last")


def resnet50_precisions(step: Step) -> None:
    """ResNet-50 at 224 pixels in fp16 against TF32 and fp32; then the memory."""
    compare(step, small_or_large_resnet50(step), "recipe", "recipe fp32", "recipe tf32")
    if step.tiny:
        return
    settings = {
        "dataset": "synthetic",
        "model": "resnet50",
        "image_size": RESNET50_IMAGE_SIZE,
        "batch_size": RESNET50_BATCH_SIZE,
    }
    recipes = [
        in_precision(precision, "resnet50", "resnet", settings) for precision in ("fp16", "no")
    ]
    step.measure(recipes, 20, rounds=1)
    fp16_mib, fp32_mib = (
        measured.figures.get("memory/peak_allocated_mib", NAN) for measured in recipes
    )
    step.figure("ResNet-50, batch 128: memory of fp32 / fp16", fp32_mib / fp16_mib, least=1.7)
    step.figure("ResNet-50: share with a kernel running", kernel_share(recipes[0]), least=0.9)


def small_or_large_resnet50(step: Step) -> Suite:
    """Return the suite on ResNet-50, with tiny images and batches for a tiny step."""
    from benchmarks.suites.resnet import resnet50_suite

    if step.tiny:
        return resnet50_suite(step.options, image_size=8, batch_size=2)
    return resnet50_suite(step.options, RESNET50_IMAGE_SIZE, RESNET50_BATCH_SIZE)


def bert_base(step: Step) -> None:
    """BERT-base on SST-2's lengths: HF Trainer with dynamic padding, and the MFU."""
    from benchmarks.suites.bert import bert_suite

    turn_off_cudnn_attention()
    checkpoint = random_bert("tiny" if step.tiny else "base", step.tokenizer)
    step.options.bert_checkpoint = checkpoint
    suite = bert_suite(step.options)
    compare(step, suite, "recipe", f"HF Trainer dynamic {step.options.precision}")
    mfu = suite.median("recipe", "mfu")
    step.figure("BERT-base: MFU", NAN if mfu is None else mfu)


def bert_large(step: Step) -> None:
    """BERT-large at length 128: MFU, and fp16 against TF32."""
    turn_off_cudnn_attention()
    updates = 2 if step.tiny else 30
    settings = {
        "max_length": 128,
        "batch_size": 2 if step.tiny else 128,
        "dataset": str(long_texts(64 if step.tiny else 8192)),
        "model": str(random_bert("tiny" if step.tiny else "large", step.tokenizer)),
    }
    recipes = [
        in_precision(precision, "BERT-large", "bert", settings)
        for precision in (("no",) if step.tiny else ("fp16", "tf32"))
    ]
    step.measure(recipes, updates, step.options.rounds)
    if step.tiny:
        return
    fp16 = recipes[0]
    mfu = fp16.figures.get("perf/mfu", NAN)
    step.figure(f"{fp16.name}, length 128: MFU", mfu, least=0.4)
    fp16_rate, tf32_rate = (measured.figures.get("samples_per_second", NAN) for measured in recipes)
    step.figure("BERT-large, length 128: fp16 / tf32", fp16_rate / tf32_rate, least=1.8)
    compiled = MeasuredRecipe(f"{fp16.name} compiled", "bert", fp16.settings, compiled=True)
    step.measure([compiled], updates, rounds=1)


def mnist(step: Step) -> None:
    """MNIST against the textbook loops."""
    from benchmarks.suites.mnist import mnist_suite

    precision = step.options.precision
    peers = (f"Accelerate {precision}", f"PyTorch {precision}")
    compare(step, mnist_suite(step.options), "recipe", *peers)


def cifar10_folder(step: Step) -> str:
    """Return the path of CIFAR-10 in `--data`; a tiny step takes scikit-learn's digits instead.

    Raises:
        RuntimeError: when it is not there.
    """
    if step.tiny:
        return "digits"
    dataset = image_dataset(step.options.data, "cifar10")
    if dataset == "digits":
        raise RuntimeError("there is no cifar10/ in --data: add it as the Hub lays it out")
    return dataset


def speedrun(step: Step) -> None:
    """Train `cifar10_fast.py` with several seeds, each a whole command with an empty cache."""
    output = step.file.with_name("speedrun-runs.json")
    output.unlink(missing_ok=True)
    seeds = SEEDS[:1] if step.tiny else SEEDS
    words = ["benchmarks/speedrun.py", "--dataset", cifar10_folder(step), "--seeds", *seeds]
    words += ["--output", output, "--keep-runs", step.file.with_name("speedrun")]
    words += ["--", "--eval-every", 10**6, *(TINY_FLAGS if step.tiny else ())]
    try:
        step.run("speedrun", words)
    except subprocess.CalledProcessError:  # also if the mean accuracy misses the target
        if not output.exists() or len(read_json(output)["runs"]) < len(seeds):
            raise
    results = read_json(output)
    step.note("speedrun", results)
    for key, most in (("seconds", 60), ("training_seconds", None)):
        values = [entry[key] for entry in results["runs"]]
        step.figure(f"CIFAR-10 speedrun: mean {key}", statistics.mean(values), most=most)
    accuracies = [entry["accuracy_tta"] for entry in results["runs"]]
    step.figure("CIFAR-10 speedrun: mean accuracy", statistics.mean(accuracies), least=0.94)


def resnet18(step: Step) -> None:
    """Train ResNet-18 on CIFAR-10 to the end with several seeds, each a whole command."""
    flags = TINY_FLAGS if step.tiny else RESNET18_FLAGS
    accuracies: list[float] = []
    for seed in SEEDS[:1] if step.tiny else SEEDS:
        name = f"resnet18-seed-{seed}"
        words = ("--dataset", cifar10_folder(step), "--seed", seed, *flags)
        directory, seconds = step.launch(name, "resnet", *words)
        figures = read_record(directory / "summary.json", Summary).figures
        step.note(name, {"flags": flags, "seconds_from_shell": seconds, **figures})
        accuracies.append(figures["test/accuracy"])
        step.figure(f"ResNet-18 on CIFAR-10, seed {seed}: test accuracy", accuracies[-1])
        step.figure(f"ResNet-18 on CIFAR-10, seed {seed}: seconds", seconds)
        remove_models(directory)
    step.figure("ResNet-18 on CIFAR-10: mean accuracy", statistics.mean(accuracies), least=0.94)


def prove(step: Step) -> None:
    """Prove each recipe with `recipes prove`, all at once; no speed is measured here."""
    commands: dict[str, subprocess.Popen[bytes]] = {}
    for recipe in LAUNCHED_RECIPES[:1] if step.tiny else LAUNCHED_RECIPES:
        receipt = step.file.with_name(f"proof-{recipe}.json")
        receipt.unlink(missing_ok=True)
        words = [sys.executable, "-m", "common.tools", "prove", f"recipes/{recipe}.py"]
        words += ["--output", str(receipt), *(("--checks", "learns") if step.tiny else ())]
        with receipt.with_suffix(".log").open("w") as log:
            commands[recipe] = subprocess.Popen(words, stdout=log, stderr=log)
    statuses = {recipe: process.wait() for recipe, process in commands.items()}
    for recipe in commands:
        receipt = step.file.with_name(f"proof-{recipe}.json")
        printed = receipt.with_suffix(".log").read_text(errors="replace")
        proof = read_json(receipt) if receipt.exists() else None
        step.note(recipe, {"receipt": proof, "log": printed})
    passed = sum(status == 0 for status in statuses.values())
    step.figure("recipes that `recipes prove` proves", passed, least=len(statuses))


def transfer(step: Step) -> None:
    """Measure copies between host and GPU, and matrix products and copies on the GPU."""
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
    """A step's function and its needs."""

    run: Callable[[Step], None]
    seconds: int  # limit of its time
    packages: tuple[str, ...] = ()  # that it imports and a bare machine may lack


# In order of value.
STEPS: dict[str, Plan] = {
    "smoke": Plan(smoke, 240, ("pytest",)),
    "speedrun": Plan(speedrun, 180, ("datasets",)),
    "resnet50": Plan(resnet50, 180),
    "bert_base": Plan(bert_base, 240, ("datasets",)),
    "mnist": Plan(mnist, 150, ("datasets",)),
    "resnet18": Plan(resnet18, 240, ("datasets",)),
    "resume": Plan(resume, 240, ("pytest",)),
    "tests": Plan(other_tests, 240, ("pytest",)),
    "prove": Plan(prove, 300, ("datasets",)),
    "profile": Plan(profile, 150),
    "resnet50_precisions": Plan(resnet50_precisions, 300),
    "mnist_mlp": Plan(partial(precisions, recipe="mnist_mlp"), 150),
    "resnet": Plan(partial(precisions, recipe="resnet"), 240),
    "bert": Plan(partial(precisions, recipe="bert"), 300, ("datasets",)),
    "bert_large": Plan(bert_large, 200, ("datasets",)),
    "transfer": Plan(transfer, 90),
}


def main(name: str, file: str, options_as_json: str) -> None:
    """Run one step.

    Args:
        file: for the step's record.
        options_as_json: `data`, `tokenizer`, `rounds` and `tiny`, from `gpu.py`.
    """
    use_own_cache()
    from benchmarks.harness.results import describe_machine
    from common.config import TrainingConfig

    step_options = json.loads(options_as_json)
    tiny = step_options["tiny"]
    data = step_options["data"]
    tokenizer = step_options["tokenizer"]
    options = Options(
        rounds=step_options["rounds"],
        scale=0.01 if tiny else 1.0,
        data=Path(data) if data else None,
    )
    step = Step(Path(file), tiny, options, Path(tokenizer) if tokenizer else None)
    if not (step.tiny or options.on_gpu):
        raise SystemExit("there is no GPU here: pass --tiny to see whether the steps work")
    offered_precisions = get_args(get_type_hints(TrainingConfig)["mixed_precision"])
    step.record |= {"tiny": step.tiny, "precisions offered": offered_precisions}
    step.record["machine"] = describe_machine()
    if shutil.which("nvidia-smi"):
        completed = subprocess.run(["nvidia-smi"], capture_output=True, encoding="utf-8")
        step.record["nvidia_smi"] = completed.stdout.splitlines()
    step.write()
    STEPS[name].run(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
