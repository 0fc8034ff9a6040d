"""Evaluations: what one does to a model and takes back, and which was the best."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.checkpoints.kinds import RandomState
from common.errors import UserError
from common.models.compile import as_written
from common.objective import Objective


@contextmanager
def evaluation_mode(
    accelerator: Any, model: nn.Module, random: RandomState
) -> Iterator[Callable[[], None]]:
    """Let a bare model evaluate with the ranks' mean buffers; give what puts its own back."""
    drawn, training = random.state_dict(), model.training
    undo = average_buffers(accelerator, model)
    model.eval()
    # What FSDP2 keeps of a forward pass, the next one must be able to train with.
    mode = torch.inference_mode if accelerator.mesh is None else torch.no_grad
    with mode(), as_written(model):
        yield undo
    model.train(training)
    random.load_state_dict(drawn)


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
    """The best evaluation on validation data so far, and how many there were since."""

    objective: Objective
    is_kept: bool = True  # by `--keep`: with its model, for the checkpoints to name
    value: float | None = None
    step: int = -1
    later: int = 0

    def improves(self, value: float, step: int) -> bool:
        """Take note of an evaluation; return whether it is better than all before it."""
        best = self.objective.best(v for v in (self.value, value) if v is not None)
        if best == self.value:
            self.later += 1
            return False
        self.value, self.step, self.later = best, step, 0
        return True

    def insist_on(self, files: Mapping[str, Any], directory: Any) -> None:
        """Raise a `UserError` where its model is not among a checkpoint's files."""
        name = f"best-{self.step:08d}"
        if self.is_kept and self.step != -1 and not any(file.startswith(name) for file in files):
            raise UserError(f"{directory} is damaged: its checkpoint names no {name}")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "later": self.later}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.later = int(state["step"]), int(state["later"])
