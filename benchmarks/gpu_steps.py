"""The steps of `benchmarks/gpu.py`, each in a process of its own that writes what it finds at once.

python -m benchmarks.gpu_steps STEP FILE.json '{"options": "in JSON"}'
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks.materials import image_dataset, long_texts, random_bert, text_extract, use_own_cache
from benchmarks.options import Options
from benchmarks.recipe_side import REPOSITORY, load_recipe, train_recipe
from benchmarks.rounds import Comparison, Suite

RECIPES = ("mnist_mlp", "resnet", "bert")
PRECISIONS = ("fp16", "bf16", "tf32", "no")
# Towards 94 % on CIFAR-10, tried in turn until one gets there: chosen after what others report of
# ResNet-18, and not measured here yet.
CIFAR10 = ("--batch-size", 512, "--learning-rate", 0.4, "--eval-every", 10**6)
CIFAR10_EPOCHS = (16, 24, 30)


@dataclass
class Step:
    """What one step is asked for, and what it found so far."""

    file: Path
    tiny: bool  # as small as can be: does it run?
    options: Options  # of the suites
    tokenizer: Path | None
    found: dict[str, Any] = field(default_factory=lambda: {"figures": {}, "goals": []})

    def write(self) -> None:
        """Write all of it anew, so that a kill loses nothing."""
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        os.replace(part, self.file)

    def note(self, name: str, figures: Any) -> None:
        """Keep figures under a name."""
        self.found["figures"][name] = figures
        self.write()

    def goal(self, title: str, value: float, least: float | None, most: float | None) -> None:
        """Keep a figure that there is a goal for."""
        aim = Comparison(title, "", "", least, most)
        reached = aim.is_reached(value)
        row = {"title": title, "value": value, "goal": aim.goal, "reached": reached}
        self.found["goals"].append(row)
        self.write()

    def run(self, name: str, command: Sequence[object], **environment: str) -> float:
        """Run a command in a process, its output into the log, and return its seconds."""
        print(f"--- {name}: {' '.join(map(str, command))}", flush=True)
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *map(str, command)], env=os.environ | environment, check=True
        )
        return time.perf_counter() - began

    def recipe(self, name: str, recipe: str, *flags: object) -> tuple[Path, float]:
        """Run a recipe as a user does; return its directory, and its seconds from the shell."""
        directory = self.file.parent / name
        shutil.rmtree(directory, ignore_errors=True)
        script = REPOSITORY / "recipes" / f"{recipe}.py"
        words = [script, *flags, "--output-dir", directory, "--tracker", "none"]
        return directory, self.run(name, words)

    def data_of(self, recipe: str) -> dict[str, Any]:
        """Return what a recipe trains on: its public data where they are at hand."""
        if recipe == "bert":
            rows = 2000 if self.tiny else 20_000
            checkpoint = random_bert("small" if self.tiny else "base", self.tokenizer)
            return {"dataset": str(text_extract(self.options.data, rows)), "model": str(checkpoint)}
        size = {} if recipe == "mnist_mlp" else {"image_size": 32}
        found = image_dataset(
            self.options.data, {"mnist_mlp": "mnist", "resnet": "cifar10"}[recipe]
        )
        return {"dataset": found} if found != "digits" else {"dataset": "synthetic", **size}

    def cell(
        self, name: str, recipe: str, steps: int, compiled: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Train a recipe, first with waits in its loop as errors; keep and return its figures."""
        import torch

        from benchmarks.contestants import threads
        from benchmarks.guarded import without_waiting
        from benchmarks.isolation import isolated
        from common.errors import UserError
        from common.measure import memory

        module, figures = load_recipe(recipe), dict[str, Any]()
        settings |= {"compile": compiled, "log_every": max(2, steps // 3)}
        for guarded in (True, False):
            memory.EARLIER.clear()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            # Shapes that come for the first time are compiled then, and that may wait.
            settled = steps // 2 if compiled else 5
            guard = without_waiting(module, settled) if guarded else nullcontext()
            try:
                with isolated(threads()), guard:
                    training = train_recipe(module, steps, **settings)
            except UserError as refusal:
                figures["refused"] = refusal.message
            except Exception as problem:
                figures["waits" if "synchroniz" in str(problem) else "failed"] = last_lines(problem)
                if guarded and "waits" in figures:
                    continue
            else:
                figures |= {"samples_per_second": training.samples / training.seconds}
                figures |= {k: v for k, v in training.summary.items() if not k.startswith("val")}
            break
        self.note(name, figures)
        return figures


def last_lines(problem: Exception) -> str:
    """Return where an error came from, and what it said."""
    return "".join(traceback.format_exception(problem))[-1500:]


def gpu_tests(step: Step, selection: str = "not resume") -> None:
    """Run `tests/gpu`: on a CPU all are skipped, but one where it is tried whether this works."""
    report = step.file.with_suffix(".xml")
    words = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/gpu"]
    words += ["tests/gpu", "-rs", f"--junitxml={report}", "-k", selection]
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
    steps = 6 if step.tiny else 300 if recipe == "mnist_mlp" else 120
    settings = step.data_of(recipe) | ({"batch_size": 4} if step.tiny else {})
    for compiled in (False, True):
        for precision in PRECISIONS:
            # Compiling takes half a minute on a CPU, so it is tried with the smallest model.
            if compiled and step.tiny and (recipe, precision) != ("mnist_mlp", "no"):
                continue
            name = f"{recipe} {precision.replace('no', 'fp32')}{' compiled' if compiled else ''}"
            chosen = {**settings, "mixed_precision": precision}
            figures = step.cell(name, recipe, steps, compiled, **chosen)
            if not step.tiny and not compiled and precision == "fp16" and "waits" not in figures:
                step.goal(f"{recipe}: GPU busy", figures["gpu/utilization"], 0.9, None)


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
    suite.run(step.options.rounds, partial(print, flush=True))
    summary = summarize(suite)
    step.note(suite.name, summary)
    for row in summary["comparisons"]:
        step.found["goals"].append({**row, "value": row["ratio"]["median"]})
    step.write()


def resnet50(step: Step) -> None:
    """ResNet-50 at 224: precisions, memory, timm."""
    from benchmarks.resnet_suites import resnet50 as suite_of

    size, batch = (32, 4) if step.tiny else (224, 128)
    settings = {"dataset": "synthetic", "model": "resnet50", "image_size": size}
    peak = {}
    for precision in ("bf16", "no") if step.tiny else PRECISIONS:
        name, chosen = f"resnet50 {precision.replace('no', 'fp32')}", {"mixed_precision": precision}
        figures = step.cell(
            name, "resnet", 6 if step.tiny else 30, False, batch_size=batch, **settings, **chosen
        )
        peak[precision] = figures.get("memory/peak_allocated_mib", float("nan"))
    if not step.tiny:
        less = peak["no"] / peak["fp16"]
        step.goal("ResNet-50, batch 128: memory of fp32 / fp16", less, 1.7, None)
    compare(step, suite_of(step.options, size, batch), "recipe", "timm", "convolutions")


def bert_base(step: Step) -> None:
    """BERT-base on SST-2's lengths against HF Trainer with dynamic padding."""
    from benchmarks.text_suites import bert

    checkpoint = random_bert("small" if step.tiny else "base", step.tokenizer)
    step.options.bert_checkpoint = checkpoint
    compare(step, bert(step.options), "recipe", f"HF Trainer dynamic {step.options.half}")


def bert_large(step: Step) -> None:
    """BERT-large at length 128: its share of the peak."""
    size, batch, steps = ("small", 4, 6) if step.tiny else ("large", 128, 40)
    settings = {"dataset": str(long_texts(64 if step.tiny else 8192)), "max_length": 128}
    settings["model"] = str(random_bert(size, step.tokenizer))
    cells = [("fp16", False), ("tf32", False), ("fp16", True)]
    for precision, compiled in [("bf16", False)] if step.tiny else cells:
        name = f"BERT-large {precision}{' compiled' if compiled else ''}"
        chosen = {**settings, "batch_size": batch, "mixed_precision": precision}
        figures = step.cell(name, "bert", steps, compiled, **chosen)
        if not step.tiny and precision == "fp16":
            step.goal(f"{name}, length 128: MFU", figures["perf/mfu"], 0.4, None)
    tables = step.found["figures"]
    rates = [
        tables.get(f"BERT-large {one}", {}).get("samples_per_second") for one in ("fp16", "tf32")
    ]
    if None not in rates:
        step.goal("BERT-large, length 128: fp16 / tf32", rates[0] / rates[1], 1.8, None)


def mnist(step: Step) -> None:
    """MNIST against the textbook loops."""
    from benchmarks.mlp_suites import mnist as suite_of

    half = step.options.half
    compare(step, suite_of(step.options), "recipe", f"Accelerate {half}", f"PyTorch {half}")


def cifar10(step: Step) -> None:
    """CIFAR-10 to 94 %."""
    dataset = image_dataset(step.options.data, "cifar10")
    small = ("--image-size", 32, "--max-steps", 4, "--batch-size", 4)
    tiny = ("--dataset", "synthetic", *small)
    if dataset == "digits" and not step.tiny:
        raise RuntimeError("there is no cifar10/ in --data")
    for epochs in CIFAR10_EPOCHS[:1] if step.tiny else CIFAR10_EPOCHS:
        flags = tiny if step.tiny else ("--dataset", dataset, *CIFAR10, "--epochs", epochs)
        directory, seconds = step.recipe(f"cifar10-{epochs}", "resnet", *flags)
        summary = json.loads((directory / "summary.json").read_text())
        step.note(f"{epochs} epochs", {"flags": flags, "seconds_from_shell": seconds, **summary})
        for folder in ("model", "checkpoints"):
            shutil.rmtree(directory / folder, ignore_errors=True)
        if summary.get("test/accuracy", 0) >= 0.94:
            break
    if not step.tiny:
        title = f"CIFAR-10, {epochs} epochs"
        step.goal(f"{title}: test accuracy", summary["test/accuracy"], 0.94, None)
        step.goal(f"{title}: seconds of training", summary["time/train_seconds"], None, 60)


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
    "resnet50": (resnet50, 180),
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
    step.write()
    STEPS[name][0](step)


if __name__ == "__main__":
    main(*sys.argv[1:])
