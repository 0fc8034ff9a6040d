"""Writes down the samples of each update, from within the process that trains."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.resume.attempt import WEIGHTS_FILE, Attempt, record_name
from benchmarks.resume.stopping import stop_after_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


class UpdateRecorder:
    """Records the updates of one process of one attempt, and stops the process where it is told.

    A record is in the hands of the system before the call returns, so it survives a kill.
    """

    def __init__(self, folder: Path) -> None:
        """Open the record of this process for the attempt that is under way in `folder`."""
        self.folder = folder
        self.attempt = Attempt.read(folder)
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        path = folder / record_name(self.attempt.number, self.rank)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write({"process": os.getpid()})

    def write(self, value: dict[str, object]) -> None:
        """Append a line to the record."""
        os.write(self.file, json.dumps(value).encode() + b"\n")

    def update(self, optimizer: Optimizer, samples: torch.Tensor, epoch: int) -> None:
        """Record an update that has just been made.

        Args:
            optimizer: its state has the number of updates that the current weights have had.
            samples: indices of this process's samples, int64 [batch].
            epoch: the epoch that the framework says it is in, from 0.
        """
        number = updates_of(optimizer)
        self.write({"update": number, "epoch": epoch, "samples": samples.tolist()})
        if number == self.attempt.stop_after:
            if self.attempt.stop_after_bytes is not None:
                stop_after_bytes(self.folder, self.attempt.stop_after_bytes)
            os.kill(os.getpid(), signal.SIGSTOP)  # the parent kills this process, or lets it go on

    def finish(self, model: nn.Module) -> None:
        """Save the final weights, on rank 0."""
        if self.rank == 0:
            import torch

            torch.save(model.state_dict(), self.folder / WEIGHTS_FILE)


def updates_of(optimizer: Optimizer) -> int:
    """Return how many updates an Adam optimizer has made, those before a resume included."""
    original = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    state = next(iter(original.state.values()))
    return int(state["step"])
