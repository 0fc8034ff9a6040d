"""What a checkpoint keeps besides weights: parts of each process, and gradients left for later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import first
from tests.edited_copies import edited
from tests.launch import Finished, Launcher, Runner

FLAGS = (
    *("--dataset", "digits", "--tracker", "none", "--hidden-sizes", 16, "--log-every", 1),
    *("--batch-size", 64, "--mixed-precision", "no", "--keep", "last", "--num-threads", 1),
    *("--max-steps", 12, "--checkpoint-every", 5, "--keep-checkpoints", 9),
)
CLASS = '''class Labels:
    """The last labels that this process has seen, and their sum over all updates."""

    def __init__(self):
        self.last = []
        self.total = 0.0

    def add(self, labels):
        self.last = labels.tolist()[: 1 + len(self.last)]
        self.total += float(labels.sum())

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def compute_loss('''
KEEP = "        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)"
RECORD = "            run.record(loss, metrics(logits, batch))"
OF_PROCESS = (
    ("def compute_loss(", CLASS),
    (KEEP, f"        labels = Labels()\n{KEEP[:-1]}, labels=labels)"),
    (
        RECORD,
        '            labels.add(batch["labels"])\n'
        '            figures = {"total": labels.total, "last": sum(labels.last)}\n'
        "            run.record(loss, metrics(logits, batch) | figures)",
    ),
)
# The same object also holds an average of the weights, which FSDP2 shards.
WITH_AVERAGE = (
    (
        OF_PROCESS[0][0],
        CLASS.replace(
            "        self.total = 0.0\n",
            "        self.total = 0.0\n        self.average = {}\n",
        ).replace(
            "def state_dict",
            "def average_weights(self, model):\n"
            "        for name, weight in model.named_parameters():\n"
            "            weight = weight.detach()\n"
            "            average = self.average.setdefault(name, weight.clone())\n"
            "            average.lerp_(weight, 0.1)\n"
            "            weight.lerp_(average, 0.1)\n\n"
            "    def state_dict",
        ),
    ),
    OF_PROCESS[1],
    (RECORD, f"            labels.average_weights(model)\n{OF_PROCESS[2][1]}"),
)
# An average whose weights are buffers of a module, beside a buffer of this process.
BUFFERS = """class Average(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.register_buffer("weight", model.head.weight.detach().clone())
        self.register_buffer("total", torch.zeros(()))

    def add(self, model, labels):
        self.total += labels.sum()
        self.weight.lerp_(model.head.weight.detach(), 0.1)
        model.head.weight.detach().lerp_(self.weight, 0.1)


def compute_loss("""
WITH_BUFFERS = (
    ("def compute_loss(", BUFFERS),
    (
        KEEP,
        f"        labels = Average(accelerator.unwrap_model(model))\n{KEEP[:-1]}, labels=labels)",
    ),
    (
        RECORD,
        '            labels.add(accelerator.unwrap_model(model), batch["labels"])\n'
        "            run.record(loss, metrics(logits, batch) | {'total': labels.total.clone()})",
    ),
)
STEP = """                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
"""
# An update without a step leaves its gradients, and the next update adds to them.
LEFT_GRADIENTS = (
    (
        STEP,
        f"                if run.progress.global_step % 2:\n{STEP.replace('    ' * 4, '    ' * 5)}",
    ),
)
# The update of each checkpoint, and whether gradients are left after it.
CHECKPOINTS = {5: True, 10: False}


def resumed_from(step: int, run: Finished, copy: Path, runner: Runner, **options: Any) -> Finished:
    """Resume a copy of a finished run from an earlier checkpoint; return the resumed run."""
    again = copy.parent / f"from-{step}-{len(options)}"
    shutil.copytree(run.directory, again)
    for path in (again / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(again / "model", ignore_errors=True)  # a run that failed has none
    status = {"status": "preempted", "resumable": True, "reason": None, "global_step": step}
    (again / "status.json").write_text(json.dumps(status))
    resumed = runner.run(copy, "--resume", again, output_directory=False, **options)
    return replace(resumed, directory=again)


@pytest.mark.parametrize("launcher", first(1, ["two forks", "fork", "two shards"]))
def test_resumed_run_has_the_gradients_and_parts_of_each_process(
    runner: Runner, tmp_path: Path, launcher: Launcher
) -> None:
    copy = edited("mnist_mlp", tmp_path, *OF_PROCESS, *LEFT_GRADIENTS)
    whole = runner.run(copy, *FLAGS, launcher=launcher)
    for step, has_left in CHECKPOINTS.items():
        folder = whole.directory / "checkpoints" / f"step-{step:08d}"
        assert bool([*folder.glob("left-gradients*")]) == has_left
        resumed = resumed_from(step, whole, copy, runner, launcher=launcher)
        for name, value in whole.weights().items():
            assert torch.equal(resumed.weights()[name], value)
        for name in ("train/loss", "train/total", "train/last"):
            assert resumed.series(name) == whole.series(name)


@pytest.mark.parametrize(
    "edits", first(0, [WITH_AVERAGE, WITH_BUFFERS]), ids=["an object", "a module"]
)
def test_part_with_shards_keeps_the_state_of_each_process(
    runner: Runner, tmp_path: Path, edits: tuple[tuple[str, str], ...]
) -> None:
    """A part may hold rows of a sharded average, and beside them what only its process has seen."""
    copy = edited("mnist_mlp", tmp_path, *edits)
    whole = runner.run(copy, *FLAGS, launcher="two shards")
    resumed = resumed_from(5, whole, copy, runner, launcher="two shards")
    for name, value in whole.weights().items():
        assert torch.equal(resumed.weights()[name], value)
    for name in ("train/loss", "train/total"):
        assert resumed.series(name) == whole.series(name)


@pytest.mark.slow
@pytest.mark.parametrize("own_method", [False, True], ids=["without a method", "with its method"])
def test_parts_of_each_process_on_another_number_of_processes(
    runner: Runner, tmp_path: Path, own_method: bool
) -> None:
    """Such a part needs `load_from_ranks`; without it, the run ends, and nothing saved is lost."""
    method = """
    def load_from_ranks(self, states):
        self.total = sum(state["total"] for state in states)


def compute_loss("""
    definition, *others = OF_PROCESS
    if own_method:
        definition = (definition[0], CLASS.replace("\n\ndef compute_loss(", method))
    copy = edited("mnist_mlp", tmp_path, definition, *others)
    two = runner.run(copy, *FLAGS, launcher="two forks")
    resumed = resumed_from(10, two, copy, runner, launcher="fork", succeeds=own_method)
    if own_method:
        totals = resumed.series("train/total")
        # The first row after the resume has the labels of both processes.
        assert totals[11] > 1.9 * two.series("train/total")[10]
        return
    assert "the part 'labels' of run.keep(...) has a state of its own" in resumed.errors
    assert "resume with 2 processes" in resumed.errors
    assert "Traceback" not in resumed.errors
    again = resumed_from(5, resumed, copy, runner, launcher="two forks")
    assert again.series("train/total") == two.series("train/total")
