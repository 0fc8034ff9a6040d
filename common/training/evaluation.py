"""Evaluations: the model's mode and buffers during one, its rehearsal, and the best one so far."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.kinds import RandomState
from common.data.order import hash_integers
from common.errors import UserError
from common.models.compile import as_written
from common.objective import Objective
from common.system.devices import seed_generator
from common.training.sharding import ShardingAccelerator

# One of the integers from which the seed of evaluations is hashed. It keeps their random numbers
# apart from those that order the samples.
EVALUATION_STREAM = 2


@contextmanager
def evaluation_mode(
    accelerator: ShardingAccelerator, model: nn.Module, generators: RandomState, seed: int
) -> Iterator[Callable[[], None]]:
    """Put a bare model into evaluation mode, with its buffers averaged over ranks.

    Each evaluation uses the same random numbers, so that figures can be compared. At the end, the
    random generators and the mode of each module are restored. The buffers stay averaged.

    Yields:
        A function that restores this rank's own buffers. An evaluation that is abandoned calls it,
        so that the checkpoint has the buffers of an uninterrupted run.
    """
    random_states = generators.state_dict()
    training_modes = {module: module.training for module in model.modules()}
    restore_buffers = average_buffers(accelerator, model)
    model.eval()
    seed_generators(
        generators.device, hash_integers(seed, accelerator.process_index, EVALUATION_STREAM)
    )
    # FSDP2 keeps tensors of a forward pass, and training can't use inference tensors.
    no_gradients = torch.inference_mode if accelerator.mesh is None else torch.no_grad
    with no_gradients(), as_written(model):
        yield restore_buffers
    for module, training in training_modes.items():
        module.training = training
    generators.load_state_dict(random_states)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that `RandomState` restores: torch's, NumPy's, Python's, the device's."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices
    np.random.seed(seed % 2**32)  # NumPy takes no larger seed
    random.seed(seed)
    seed_generator(device, seed)


def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores all buffers of `model` to their present values.

    The rehearsal and `--auto-batch-size` must leave no trace in them. But an evaluation averages
    buffers, and a forward pass in training mode changes batch norm's statistics.
    """
    buffers = [*model.buffers()]
    values = [buffer.clone() for buffer in buffers]

    def put_back() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    return put_back


class Rehearsal:
    """A short evaluation before the first update, which finds mistakes while they are cheap.

    It is due at the first batch of each start. Until that batch is recorded, evaluations read one
    batch, and then one with the same samples twice. Their figures are checked and discarded.

    Its state is one of these:

    - ``wanted``: the first batch has not come yet.
    - ``due``: the recipe should evaluate now.
    - ``reading``: the recipe evaluates, and loaders yield only the two batches.
    - ``read``: the evaluation is over, and `run.log` has not had its figures yet.
    - ``checked``: the figures are as they should be. The recipe may evaluate again before it
      records the first batch, and that is a rehearsal too.
    - ``over``: all evaluations are real ones.
    """

    def __init__(self, is_wanted: bool) -> None:
        self.state: Literal["wanted", "due", "reading", "read", "checked", "over"]
        self.state = "wanted" if is_wanted else "over"

    @property
    def is_wanted(self) -> bool:
        """Whether it has to begin at the next batch."""
        return self.state == "wanted"

    @property
    def is_due(self) -> bool:
        """Whether the recipe should evaluate now."""
        return self.state == "due"

    @property
    def is_on(self) -> bool:
        """Whether an evaluation that begins now is a rehearsal."""
        return self.state in ("due", "reading", "read", "checked")

    @property
    def is_reading(self) -> bool:
        """Whether loaders yield only the batches of a rehearsal."""
        return self.state == "reading"

    def begin(self, is_replaced: bool) -> None:
        """Make the rehearsal due if it is wanted, unless a real evaluation replaces it.

        A resumed run may begin with a real evaluation, which finds the same mistakes.
        """
        if self.is_wanted:
            self.state = "over" if is_replaced else "due"

    def begin_evaluation(self) -> None:
        """Note that the recipe evaluates now."""
        self.state = "reading"

    def end_evaluation(self) -> None:
        """Note that the evaluation has read its batches. Its figures come later, to `run.log`."""
        self.state = "read"

    def accept_figures(self) -> None:
        """Note that the figures of the rehearsal are as they should be."""
        self.state = "checked"

    def end(self) -> None:
        """Make all further evaluations real ones, even if the recipe has not rehearsed."""
        self.state = "over"

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of the rehearsal: that it was one, and how to turn it off."""
        if self.state in ("reading", "read") and isinstance(error, Exception):
            error.add_note(
                "This was the rehearsal of the evaluation before the first update, on a few "
                "samples. If the evaluation needs all data, write Run(config, __file__, OBJECTIVE, "
                "rehearse=False)."
            )


def average_buffers(accelerator: Accelerator, model: nn.Module) -> Callable[[], None]:
    """Average a model's buffers over ranks; return a function that restores this rank's own.

    Buffers of integers, such as counters, stay as they are.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return lambda: None
    sizes = [buffer.numel() for buffer in buffers]

    def set_buffers(flat: torch.Tensor) -> None:
        for buffer, values in zip(buffers, flat.split(sizes), strict=True):
            buffer.copy_(values.view_as(buffer))

    own_values = torch.cat([buffer.flatten() for buffer in buffers])  # for a single collective
    set_buffers(accelerator.reduce(own_values, "mean"))
    return lambda: set_buffers(own_values)


class BestState(TypedDict):
    """The best evaluation's part of a checkpoint; see the fields of `Best`."""

    value: float | None
    step: int
    later: int
    loss: NotRequired[float | None]  # older checkpoints have none


@dataclass
class Best:
    """The best evaluation on validation data so far, and the number of evaluations since.

    Among equal values the model with the lower loss is kept, and among equal losses the later one.
    An equal value is no improvement, so early stopping goes on counting.
    """

    objective: Objective
    is_kept: bool = True  # whether `--keep best` saves its model, which checkpoints then name
    value: float | None = None
    step: int = -1  # the update after which the kept model was evaluated; -1 if there is none
    later: int = 0  # evaluations since the first one with this value
    loss: float | None = None  # the loss of the kept model, if its evaluation had one

    def record(self, value: float, step: int, loss: float | None = None) -> bool:
        """Record an evaluation; return whether its model is the one to keep.

        Args:
            value: the value of the objective; NaN never improves.
            step: the update after which it was evaluated.
            loss: the loss of the same evaluation, which decides between equal values.
        """
        values = [value] if self.value is None else [self.value, value]
        best = self.objective.best(values)
        if best != self.value:  # the new value is better than all before
            self.value = best
            self.step = step
            self.later = 0
            self.loss = loss
            return True
        self.later += 1
        # Only an equal value with a loss that is not higher replaces the kept model.
        if value != self.value or sorting_loss(loss) > sorting_loss(self.loss):
            return False
        self.step = step
        self.loss = loss
        return True

    def insist_on(self, files: Iterable[str], directory: Path) -> None:
        """Raise a `UserError` if a checkpoint's `files` lack the model of the best evaluation."""
        if not self.is_kept or self.step == -1:
            return
        name = f"best-{self.step:08d}"
        if not any(file.startswith(name) for file in files):
            raise UserError(
                f"{directory} is damaged, because its checkpoint does not name {name}",
                advice="put a whole copy of it back, or resume from an older checkpoint",
            )

    def state_dict(self) -> BestState:
        return {"value": self.value, "step": self.step, "later": self.later, "loss": self.loss}

    def load_state_dict(self, state: BestState) -> None:
        value = state["value"]
        loss = state.get("loss")
        self.value = None if value is None else float(value)
        self.step = int(state["step"])
        self.later = int(state["later"])
        self.loss = None if loss is None else float(loss)


def sorting_loss(loss: float | None) -> float:
    """Return a loss to sort by; an unknown loss or NaN sorts after all others."""
    return math.inf if loss is None or math.isnan(loss) else loss
