"""The files that a contestant's process writes: its evaluations, and the operations of a sample.

Both sides write the same two files into the folder of a run: `evaluations.jsonl` while they train,
and `facts.json` at the end. Nothing here needs torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVALUATIONS = "evaluations.jsonl"
FACTS = "facts.json"
PASSES = 3  # a forward and a backward pass together, in forward passes
FIGURES = ("accuracy", "accuracy_tta", "f1")  # the figures that are written down


@dataclass(frozen=True)
class Evaluation:
    """The figures of one evaluation, when it ended, and the training data before it."""

    seconds: float  # from the start of the command to the end of the evaluation
    epoch: float
    samples: float  # trained on so far
    figures: dict[str, float]  # such as accuracy, as a share
    tokens: float = 0.0  # trained on so far, with the padding that was computed
    squared_tokens: float = 0.0  # sum over samples of the square of their tokens


@dataclass(frozen=True)
class ForwardCost:
    """The floating-point operations of a sample's forward pass; a multiply-add counts as two."""

    per_sample: float
    per_token: float = 0.0
    per_squared_token: float = 0.0

    def training_petaflop(self, evaluation: Evaluation) -> float:
        """Return the operations of all training until an evaluation, in 10¹⁵.

        The backward pass is counted as two forward passes. Optimizers, augmentation and evaluations
        are not counted.
        """
        operations = (
            self.per_sample * evaluation.samples
            + self.per_token * evaluation.tokens
            + self.per_squared_token * evaluation.squared_tokens
        )
        return PASSES * operations / 1e15


@dataclass(frozen=True)
class Trial:
    """The rates of a contestant that was measured for some updates and one evaluation only."""

    start_seconds: float  # from the start of the command to the first batch
    update_seconds: float
    updates_per_epoch: int
    samples_per_epoch: float
    tokens_per_epoch: float
    squared_tokens_per_epoch: float
    evaluation_seconds: float

    def after(self, epochs: float, figures: Mapping[str, float]) -> Evaluation:
        """Return the computed evaluation after so many epochs; an evaluation follows each epoch."""
        epoch_seconds = self.updates_per_epoch * self.update_seconds + self.evaluation_seconds
        return Evaluation(
            seconds=self.start_seconds + epochs * epoch_seconds,
            epoch=epochs,
            samples=epochs * self.samples_per_epoch,
            figures=dict(figures),
            tokens=epochs * self.tokens_per_epoch,
            squared_tokens=epochs * self.squared_tokens_per_epoch,
        )


@dataclass(frozen=True)
class Facts:
    """What a process reports at its end: the cost of a forward pass, and a trial's rates."""

    forward: ForwardCost
    trial: Trial | None = None  # None: the contestant trained to its end

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Facts:
        """Read what `asdict` returned."""
        trial = value["trial"]
        return cls(ForwardCost(**value["forward"]), None if trial is None else Trial(**trial))

    def write(self, folder: Path) -> None:
        """Write the file of facts."""
        (folder / FACTS).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


class EvaluationLog:
    """Writes evaluations down as they end, each with the time since the command began."""

    def __init__(self, folder: Path, began: float) -> None:
        """Write into `folder`.

        Args:
            began: `time.time()` just before the command was started.
        """
        self.file = folder / EVALUATIONS
        self.began = began

    def elapsed(self) -> float:
        """Return the seconds since the command began."""
        return time.time() - self.began

    def write(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the file."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(evaluation)) + "\n")


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations of a run, in their order; none if the process wrote none."""
    file = folder / EVALUATIONS
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Evaluation(**json.loads(line)) for line in lines]


def read_facts(folder: Path) -> Facts:
    """Return the facts of a run."""
    return Facts.from_json(json.loads((folder / FACTS).read_text(encoding="utf-8")))
