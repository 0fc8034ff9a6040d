"""Notes that a generated copy writes, from which the tests compute its metrics again.

Each rank appends lines of JSON to a file of its own, next to the run directory. If a variable of
the environment names a place in the loop, the copy kills its whole job there.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = "GENERATED_NOTES"  # the folder that the notes go to
KILL = "GENERATED_KILL"  # rank:number of the micro-batch:place in the loop
PLACES = ("batch", "backward", "step", "record", "save")


class Notes:
    """The notes of one rank."""

    def __init__(self, rank: int) -> None:
        self.path = Path(os.environ[FOLDER]) / f"rank-{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        killed_rank, number, place = os.environ.get(KILL, "-1:0:none").split(":")
        self.kill = (int(number), place) if int(killed_rank) == rank else None

    def write(self, event: str, **values: Any) -> None:
        """Append a note, which `Ended.records` finds by its event."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def reached(self, number: int, place: str) -> None:
        """Kill every process of the job, as a power cut would, if this is the place of the kill."""
        if (number, place) == self.kill:
            os.killpg(0, signal.SIGKILL)

    def recorded(self, update: int, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Note the arguments of ``run.record`` in an update, counted from 1."""
        named = {name: elements(value) for name, value in metrics.items()}
        self.write("record", update=update, loss=elements(loss), metrics=named)

    def evaluated(
        self,
        purpose: str,
        step: int,
        count: int,
        *,
        totals: Mapping[str, Any] | None = None,
        loss: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Note the arguments of ``sums.add`` (totals) or ``sums.record`` (loss and metrics).

        A metric that is one number is the mean of its batch, so it counts for each sample.
        """
        added = {name: elements(value) for name, value in (totals or {}).items()}
        named = {name: elements(value) for name, value in (metrics or {}).items()}
        for name, value in (metrics or {}).items():
            if torch.as_tensor(value).ndim == 0:
                named[name] *= count
        mean_loss = None if loss is None else elements(loss)
        self.write(
            "evaluation",
            purpose=purpose,
            step=step,
            count=count,
            totals=added,
            loss=mean_loss,
            metrics=named,
        )

    def clipped(self, update: int, model: nn.Module) -> None:
        """Note the norm of the gradients as the lines after ``run.clip_grad_norm_`` find them."""
        gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        self.write("clipped", update=update, norm=float(norm))

    def ended(self, **parts: nn.Module) -> None:
        """Note a digest of the weights of each part, once training is over."""
        digests = {name: digest(part) for name, part in parts.items()}
        self.write("end", digests=digests)


def elements(value: Any) -> list[float]:
    """Return the elements of a number or of a tensor of any shape, in float64."""
    return torch.as_tensor(value).detach().double().flatten().tolist()


def digest(part: nn.Module) -> str:
    """Return a digest of all bits of a part's parameters."""
    sha256 = hashlib.sha256()
    for name, parameter in part.named_parameters():
        sha256.update(name.encode())
        sha256.update(parameter.detach().contiguous().numpy().tobytes())
    return sha256.hexdigest()
