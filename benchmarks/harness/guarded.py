"""Runs a recipe's loop so that a wait for the GPU in it is an error, wherever it is not meant.

Logging, saving and looking at skipped updates wait for the device; forward, backward, clipping,
the update and the next batch must not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from common.measure.stopwatch import Stopwatch
from common.run import Run
from common.training.guard import GradientGuard
from common.training.stop import StopAgreement

# What may wait: it does so at the log interval, or once a checkpoint or an evaluation is due.
MAY_WAIT: list[tuple[Any, str]] = [
    *((Run, name) for name in ("log_training", "save", "leave", "log")),
    *((Stopwatch, name) for name in ("start", "stop", "lap")),
    *((GradientGuard, "check"), (StopAgreement, "check")),
]


def set_mode(mode: str) -> None:
    """Say what a wait is to torch: "default" (nothing) or "error"; without a GPU there is none."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def allowed(function: Callable[..., Any], state: dict[str, str]) -> Callable[..., Any]:
    """Return `function` with waiting allowed in it."""

    @functools.wraps(function)
    def waiting(*arguments: Any, **named: Any) -> Any:
        set_mode("default")
        try:
            return function(*arguments, **named)
        finally:
            set_mode(state["mode"])

    return waiting


@contextmanager
def without_waiting(recipe: ModuleType, settled: int) -> Iterator[None]:
    """Make a wait in the loop of `recipe` a RuntimeError, after so many updates.

    In the first ones memory is measured, and kernels are compiled and chosen.
    """
    state = {"mode": "default"}

    def change(mode: str) -> None:
        state["mode"] = mode
        set_mode(mode)

    class GuardedRun(recipe.Run):  # type: ignore[misc, name-defined]
        def batches(self, loader: Any) -> Iterator[Any]:
            try:
                for batch in super().batches(loader):
                    if self.progress.global_step >= settled:
                        change("error")
                    yield batch
            finally:
                change("default")

    with ExitStack() as stack:
        for owner, name in MAY_WAIT:
            stack.enter_context(patch.object(owner, name, allowed(getattr(owner, name), state)))
        stack.enter_context(patch.object(recipe, "Run", GuardedRun))
        stack.callback(change, "default")
        yield
