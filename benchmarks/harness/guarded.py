"""Runs a recipe's loop so that an unwanted wait for the GPU is an error.

Logging, saving and the check for skipped updates may wait for the device. Forward, backward,
clipping, the update and the next batch must not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from common.lifecycle import saving, training_figures
from common.measure.stopwatch import Stopwatch
from common.run import Run
from common.training.gradients.guard import GradientGuard
from common.training.rank_decisions import RankDecisions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Batch = dict[str, torch.Tensor]
# Functions that may wait: they do so at a log line, or for a checkpoint or an evaluation.
MAY_WAIT: list[tuple[type | ModuleType, Callable[..., object]]] = [
    (training_figures, training_figures.log_interval),
    (saving, saving.save),
    (saving, saving.save_and_leave),
    (Run, Run.log),
    (Stopwatch, Stopwatch.start),
    (Stopwatch, Stopwatch.stop),
    (Stopwatch, Stopwatch.lap),
    (GradientGuard, GradientGuard.check),
    (RankDecisions, RankDecisions.check),
]


def set_mode(mode: str) -> None:
    """Set torch's reaction to a wait for the GPU: "default" (none) or "error"."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


class SyncMode:
    """The mode of the loop, which `allowed` restores."""

    def __init__(self) -> None:
        self.mode = "default"

    def change(self, mode: str) -> None:
        """Set the mode, for torch too."""
        self.mode = mode
        set_mode(mode)


def allowed(
    function: Callable[Arguments, Result], sync_mode: SyncMode
) -> Callable[Arguments, Result]:
    """Return `function` with waits allowed inside it."""

    @functools.wraps(function)
    def may_wait(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        set_mode("default")
        try:
            return function(*arguments, **keywords)
        finally:
            set_mode(sync_mode.mode)

    return may_wait


@contextmanager
def without_waiting(recipe: ModuleType, settled: int) -> Iterator[None]:
    """Make a wait in the loop of `recipe` a RuntimeError.

    Args:
        settled: the first updates, in which waits are allowed: memory is measured, and kernels are
            compiled and chosen.
    """
    sync_mode = SyncMode()

    class GuardedRun(recipe.Run):  # type: ignore[misc, name-defined]
        def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
            try:
                for batch in super().batches(loader):
                    if self.progress.global_step >= settled:
                        sync_mode.change("error")
                    yield batch
            finally:
                sync_mode.change("default")

    with ExitStack() as stack:
        for owner, function in MAY_WAIT:
            name = function.__name__
            may_wait = allowed(getattr(owner, name), sync_mode)
            stack.enter_context(patch.object(owner, name, may_wait))
        stack.enter_context(patch.object(recipe, "Run", GuardedRun))
        stack.callback(sync_mode.change, "default")
        yield
