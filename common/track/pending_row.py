"""The row of figures that a run collects for one step, before it is written."""

from collections.abc import Mapping
from typing import TypedDict


class PendingRowState(TypedDict):
    """The pending row's part of a checkpoint."""

    latest: dict[str, float]
    pending: dict[str, float]


class PendingRow:
    """Collects the figures of a step until the step is over.

    A step is over when the next update is recorded, not when its own update is. In between, at the
    top of the recipe's loop, an evaluation may add the figures of the model after this update. Such
    figures belong to the same row. So the flow of a row is:

    1. `Log.add_interval` adds the training figures of update N, if a row is due.
    2. `Log.add_evaluation` adds the figures of the model after update N, if an evaluation is due.
    3. `Log.write_row` takes and writes the row when update N + 1 is recorded, or when the run ends.

    A checkpoint after update N contains the row that is not yet written.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        # The latest value of each figure that any row has had, for the summary of the run.
        self.latest: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add figures to the row; they replace figures of the same names."""
        self.figures |= values
        self.latest |= self.figures

    def take(self) -> dict[str, float]:
        """Return the row of the step that is over, and begin the row of the next step."""
        figures = self.figures
        self.figures = {}
        return figures

    def state_dict(self) -> PendingRowState:
        return {"latest": self.latest, "pending": self.figures}

    def load_state_dict(self, state: PendingRowState) -> None:
        self.latest = state["latest"]
        self.figures = state["pending"]
