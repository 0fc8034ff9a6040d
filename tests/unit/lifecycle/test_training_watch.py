"""A loop that trains nothing ends with an error; one that only begins so is warned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from common.checkpoints.state import Parts
from common.errors import UserError
from common.lifecycle.training_watch import TrainingWatch, has_step_hooks
from common.run import Run
from tests.small_run import FLAGS, run, unfinished_run

pytestmark = pytest.mark.usefixtures("quick_runs", "own_accelerator")

CLIP = (Run, "clip_grad_norm_")
BACKWARD = (Accelerator, "backward")
STEP = (AcceleratedOptimizer, "step")
SCHEDULER_STEP = (AcceleratedScheduler, "step")
NO_TRAINING = "the first update has trained nothing"
NO_SCHEDULE = "the scheduler that run.plan.schedule(...) returned makes no steps"


def leave_out(patch: pytest.MonkeyPatch, call: tuple[Any, str], first_calls: int = 1000) -> None:
    """Have the first calls of a method do nothing."""
    owner, name = call
    original: Callable[..., object] = getattr(owner, name)
    count = 0

    def replacement(*arguments: object, **named: object) -> object:
        nonlocal count
        count += 1
        return None if count <= first_calls else original(*arguments, **named)

    patch.setattr(owner, name, replacement)


@pytest.mark.parametrize(
    ("calls", "problem", "is_warned", "update"),
    [
        ((), None, False, 4),
        ((CLIP,), None, False, 4),
        ((BACKWARD,), "in the first two updates, no parameter of MLP had a gradient", True, 2),
        ((BACKWARD, CLIP), "the run has trained nothing", True, 4),
        ((STEP,), "the run has trained nothing", True, 4),
        ((STEP, CLIP), "the run has trained nothing", True, 4),
    ],
    ids=["whole", "no clip", "no backward", "neither", "no step", "no step, no clip"],
)
def test_a_loop_without_training_ends_with_an_error(
    calls: tuple[tuple[Any, str], ...],
    problem: str | None,
    is_warned: bool,
    update: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call in calls:
        leave_out(monkeypatch, call)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert (NO_TRAINING in output) == is_warned
    assert NO_SCHEDULE not in output
    status = (tmp_path / "run" / "status.json").read_text()
    assert f'"global_step": {update}' in status
    if problem is None:
        assert error is None, error
        return
    assert isinstance(error, UserError)
    assert error.problem.startswith(problem)
    advised_order = ["accelerator.backward(loss), then", "optimizer.step(), and only then"]
    assert all(words in error.advice for words in advised_order)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("call", [STEP, BACKWARD])
def test_a_loop_that_trains_later_is_only_warned(
    call: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reinforcement learning, the first updates may only fill a buffer."""
    leave_out(monkeypatch, call, first_calls=2)
    leave_out(monkeypatch, SCHEDULER_STEP, first_calls=2)
    leave_out(monkeypatch, CLIP, first_calls=2)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert NO_TRAINING in output
    assert NO_SCHEDULE not in output


def test_a_loop_may_begin_with_the_step_of_the_update_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first update clips and steps without gradients."""
    leave_out(monkeypatch, BACKWARD, first_calls=1)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert NO_TRAINING in output


def test_clipping_before_the_backward_pass_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop trains, but its gradients are never clipped."""
    clip = Run.clip_grad_norm_

    def clip_too_early(self: Run, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        gradients = {parameter: parameter.grad for parameter in model.parameters()}
        for parameter in gradients:
            parameter.grad = None
        clip(self, model, optimizer)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    monkeypatch.setattr(Run, "clip_grad_norm_", clip_too_early)
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert isinstance(error, UserError), error
    assert error.problem.startswith("in the first two updates")
    assert "then run.clip_grad_norm_(model, optimizer)" in error.advice


def test_weights_may_change_without_the_step_of_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may have an update rule of its own."""

    def change_weights(self: AcceleratedOptimizer, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.01 * parameter.grad)

    monkeypatch.setattr(*STEP, change_weights)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert NO_TRAINING not in output


def test_a_resumed_run_is_not_accused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier process has trained."""
    directory = unfinished_run(tmp_path / "run")
    leave_out(monkeypatch, STEP)
    error, output = run("--resume", directory)
    assert error is None, error
    assert NO_TRAINING in output
    error, output = run("--evaluate-only", "--init-from", directory, "--output-dir", tmp_path / "2")
    assert error is None, error
    assert NO_TRAINING not in output


@pytest.mark.parametrize("when", ["never", "after run.record"])
def test_a_schedule_that_does_not_move_is_noticed(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_schedule = AcceleratedScheduler.step
    leave_out(monkeypatch, SCHEDULER_STEP)
    if when != "never":
        record = Run.record

        def record_and_step(self: Run, *arguments: Any, **named: Any) -> None:
            record(self, *arguments, **named)
            for scheduler in self.accelerator._schedulers:
                step_schedule(scheduler)

        monkeypatch.setattr(Run, "record", record_and_step)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert (NO_SCHEDULE in output) == (when == "never")


class OwnOptimizer:
    """An optimizer that is not torch's, so its steps go unnoticed."""

    def step(self) -> None:
        """Do nothing."""


class OverriddenStep(torch.optim.SGD):
    """An optimizer of torch with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def test_steps_that_can_be_noticed() -> None:
    """Torch's hooks belong to the method `step` of each class that torch has initialised."""
    parameters = [nn.Parameter(torch.ones(1))]
    assert has_step_hooks(torch.optim.AdamW(parameters))
    assert has_step_hooks(OverriddenStep(parameters))
    own: Any = OwnOptimizer()
    assert not has_step_hooks(own)
    assert not has_step_hooks(SimpleNamespace(optimizer=own))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "is_known"),
    [
        (OwnOptimizer(), False),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]), True),
        (
            SimpleNamespace(
                optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))]), step_was_skipped=True
            ),
            False,
        ),
    ],
    ids=["own class", "torch's", "skipped by the loss scale"],
)
def test_only_what_is_known_counts(optimizer: Any, is_known: bool) -> None:
    guard: Any = SimpleNamespace(has_seen_gradients=False)
    started: Any = SimpleNamespace(
        kept=SimpleNamespace(optimizers={"optimizer": optimizer}),
        context=SimpleNamespace(parts=Parts(0, None)),
    )
    assert TrainingWatch(guard).may_have_trained(started) is not is_known


ADDED_GRADIENTS = "the second update has added its gradients to those of the first one, in 4"


@pytest.mark.parametrize("left_out", [0, 2, 1000])
def test_gradients_that_are_left_are_noticed(
    left_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, because a loop may add up gradients on purpose."""
    leave_out(monkeypatch, (AcceleratedOptimizer, "zero_grad"), first_calls=left_out)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert (ADDED_GRADIENTS in output) == bool(left_out)


def test_a_loop_may_remove_gradients_before_its_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients outlive each update, but no backward pass adds to them."""
    zero_grad = AcceleratedOptimizer.zero_grad
    backward = Accelerator.backward

    def remove_and_go_back(self: Accelerator, *arguments: Any, **named: Any) -> None:
        for optimizer in self._optimizers:
            zero_grad(optimizer)
        backward(self, *arguments, **named)

    monkeypatch.setattr(AcceleratedOptimizer, "zero_grad", lambda *unused, **named: None)
    monkeypatch.setattr(Accelerator, "backward", remove_and_go_back)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert "has added its gradients" not in output


def test_gradients_that_are_set_to_zero_are_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in memory, but a backward pass adds to 0."""

    def set_to_zero(self: AcceleratedOptimizer, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    monkeypatch.setattr(AcceleratedOptimizer, "zero_grad", set_to_zero)
    error, output = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert error is None, error
    assert "has added its gradients" not in output
