"""Evaluations: what one does to a model and takes back, and which was the best."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common.checkpoints.kinds import RandomState
from common.data.order import hash_integers
from common.errors import UserError
from common.models.compile import as_written
from common.objective import Objective

DRAWS = 2  # sets the random numbers of evaluations apart from those that order the samples


@contextmanager
def evaluation_mode(
    accelerator: Any, model: nn.Module, generators: RandomState, seed: int
) -> Iterator[Callable[[], None]]:
    """Let a bare model evaluate with the ranks' mean buffers; give what puts its own back.

    What draws random numbers within draws the same ones in each evaluation. Afterwards the
    generators, and the mode of each module, are as they were.
    """
    drawn = generators.state_dict()
    training_modes = {module: module.training for module in model.modules()}
    undo = average_buffers(accelerator, model)
    model.eval()
    seed_generators(generators.device, hash_integers(seed, accelerator.process_index, DRAWS))
    # What FSDP2 keeps of a forward pass, the next one must be able to train with.
    mode = torch.inference_mode if accelerator.mesh is None else torch.no_grad
    with mode(), as_written(model):
        yield undo
    for module, training in training_modes.items():
        module.training = training
    generators.load_state_dict(drawn)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that `RandomState` restores: torch's, NumPy's, Python's, the device's."""
    torch.default_generator.manual_seed(seed)  # of the CPU alone: `torch.manual_seed` is of all
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Return what gives all buffers of `model` the values that they have now."""
    buffers = [*model.buffers()]
    values = [buffer.clone() for buffer in buffers]

    def put_back() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    return put_back


@dataclass
class Rehearsal:
    """A short evaluation before the first update, which finds mistakes while they are cheap.

    It is due with the first batch of each start. From then on until that batch is recorded,
    evaluations read one batch (and its samples once more), and what is logged is checked and
    discarded.
    """

    is_wanted: bool
    is_due: bool = False  # whether the loop is to evaluate
    is_on: bool = False  # whether evaluations are rehearsed
    is_reading: bool = False  # whether loaders are to be short
    is_unchecked: bool = False  # whether it has begun, and its figures are not checked yet

    def begin(self, is_replaced: bool) -> None:
        """Let it be due with the first batch, unless a real evaluation replaces it.

        A resumed run may begin with one, which finds the same mistakes.
        """
        self.is_due = self.is_on = self.is_wanted and not is_replaced
        self.is_wanted = False

    def enter(self) -> None:
        self.is_due = False
        self.is_reading = self.is_unchecked = True

    def leave(self) -> None:
        self.is_reading = False

    def end(self) -> None:
        self.is_due = self.is_on = self.is_unchecked = False

    def explain(self, error: BaseException) -> None:
        """Say at an error's end that it was a rehearsal, and how to do without."""
        if self.is_unchecked and isinstance(error, Exception):
            error.add_note(
                "This was the rehearsal of the evaluation before the first update, on one batch. "
                "If the evaluation needs all data, write Run(config, __file__, OBJECTIVE, "
                "rehearse=False)."
            )


def average_buffers(accelerator: Any, model: nn.Module) -> Callable[[], None]:
    """Average a model's buffers over ranks; return what puts back those that this rank had."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return lambda: None

    def put(flat: torch.Tensor) -> None:
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    before = torch.cat([buffer.flatten() for buffer in buffers])  # one collective for all
    put(accelerator.reduce(before, "mean"))
    return lambda: put(before)


@dataclass
class Best:
    """The best evaluation on validation data so far, and how many there were since.

    Of equal values the one with the lower loss is kept, and of equal losses the later one. Neither
    is better than the other: early stopping counts on.
    """

    objective: Objective
    is_kept: bool = True  # by `--keep`: with its model, for the checkpoints to name
    value: float | None = None
    step: int = -1
    later: int = 0  # evaluations since the first one with this value
    loss: float | None = None  # of the one that is kept, where it has one

    def improves(self, value: float, step: int, loss: float | None = None) -> bool:
        """Take note of an evaluation; return whether its model is the one to keep."""
        known = [number for number in (self.value, value) if number is not None]
        best = self.objective.best(known)
        if best != self.value:
            self.value, self.step, self.later, self.loss = best, step, 0, loss
            return True
        self.later += 1
        if value != self.value or sorting_loss(loss) > sorting_loss(self.loss):
            return False
        self.step, self.loss = step, loss
        return True

    def insist_on(self, files: Mapping[str, Any], directory: Any) -> None:
        """Raise a `UserError` where its model is not among a checkpoint's files."""
        name = f"best-{self.step:08d}"
        if self.is_kept and self.step != -1 and not any(file.startswith(name) for file in files):
            raise UserError(f"{directory} is damaged: its checkpoint names no {name}")

    def state_dict(self) -> dict[str, Any]:
        names = ("value", "step", "later", "loss")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loss = state.get("loss")  # which older checkpoints lack
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.later = int(state["step"]), int(state["later"])
        self.loss = None if loss is None else float(loss)


def sorting_loss(loss: float | None) -> float:
    """Return a loss to sort by: one that is unknown or NaN is no better than any other."""
    return math.inf if loss is None or math.isnan(loss) else loss
