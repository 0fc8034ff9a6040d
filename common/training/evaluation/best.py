"""The best evaluation of a run so far, which decides what is exported and when training stops."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from common.checkpoints.folders import best_name
from common.errors import UserError
from common.objective import Objective
from common.run_directory.records import CHECKPOINTS_FOLDER
from common.system.platforms.commands import quoted


class BestState(TypedDict):
    """The best evaluation's part of a checkpoint; see the fields of `Best`."""

    value: float | None
    step: int | None
    later: int  # `evaluations_since_best`
    loss: float | None


@dataclass
class Best:
    """The best evaluation on validation data so far, and the number of evaluations since.

    Among equal values the model with the lower loss is the best, and among equal losses the later
    model. An equal value is not an improvement, so early stopping goes on counting.
    """

    objective: Objective
    # Whether the best model is saved (`--keep best`). Then checkpoints name its file.
    is_kept: bool = True
    value: float | None = None
    # The update after which the best model was evaluated; None if there was no evaluation yet,
    # or only NaN.
    step: int | None = None
    evaluations_since_best: int = 0  # evaluations after the first one that had this value
    loss: float | None = None  # the loss of the best model, if its evaluation had one

    def consider(self, value: float, step: int, loss: float | None = None) -> bool:
        """Count an evaluation, and return whether its model is the best so far.

        Args:
            value: the value of the objective; NaN never improves.
            step: the update after which the model was evaluated.
            loss: the loss of the same evaluation, which decides between equal values.
        """
        best = self.objective.best([self.value, value])
        if best != self.value:  # the new value is better than all earlier values
            self.value = best
            self.step = step
            self.evaluations_since_best = 0
            self.loss = loss
            return True
        self.evaluations_since_best += 1
        # Only an equal value with a loss that is not higher replaces the best model.
        if value != self.value or sorting_loss(loss) > sorting_loss(self.loss):
            return False
        self.step = step
        self.loss = loss
        return True

    def require_best_model(self, files: Iterable[str], directory: Path) -> None:
        """Raise a `UserError` if a checkpoint's `files` lack the model of the best evaluation.

        A resume calls this. Otherwise only the end of the run would find that the model is missing.
        """
        if not self.is_kept or self.step is None:
            return
        name = best_name(self.step)
        if not any(file.startswith(name) for file in files):
            raise UserError(
                f"this checkpoint of {directory} can't be resumed, because its manifest.json does "
                f"not list the best model, whose files are called {name}",
                advice=(
                    f"restore {directory} from a backup, or resume an older checkpoint, as with "
                    f"--resume {quoted(directory / CHECKPOINTS_FOLDER / 'step-NUMBER')}"
                ),
            )

    def state_dict(self) -> BestState:
        return {
            "value": self.value,
            "step": self.step,
            "later": self.evaluations_since_best,
            "loss": self.loss,
        }

    def load_state_dict(self, state: BestState) -> None:
        value = state["value"]
        step = state["step"]
        loss = state["loss"]
        self.value = None if value is None else float(value)
        self.step = None if step is None else int(step)
        self.evaluations_since_best = int(state["later"])
        self.loss = None if loss is None else float(loss)


def sorting_loss(loss: float | None) -> float:
    """Return a loss that can be compared; an unknown loss or NaN counts as infinite."""
    return math.inf if loss is None or math.isnan(loss) else loss
