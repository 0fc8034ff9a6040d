"""What a run has logged: written once a step, shown on the terminal, kept for the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.console import ProgressDisplay
from common.tracking import Tracking


class Logbook:
    """Collects the metrics of one step from wherever they come, and writes them in one row."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking
        self.display: ProgressDisplay | None = None
        self.pending: dict[str, Any] = {}  # of the last step that logged, not yet written
        self.latest: dict[str, Any] = {}
        self.best_accuracy: float | None = None

    def open_display(self, total_steps: int, first_step: int) -> None:
        """Show the progress from now on."""
        self.display = ProgressDisplay(total_steps, first_step)

    def close_display(self) -> None:
        """Take the bar away."""
        if self.display is not None:
            self.display.close()

    def show_interval(self) -> None:
        """Show the metrics of the last log interval."""
        if self.display is not None:
            self.display.update(self.pending)

    def log(self, values: Mapping[str, Any]) -> None:
        """Add metrics to those of the present step."""
        self.pending |= values
        self.latest |= self.pending

    def note_accuracy(self, accuracy: float) -> None:
        """Remember the best accuracy on validation data."""
        self.best_accuracy = max(accuracy, self.best_accuracy or 0.0)

    def flush(self) -> None:
        """Write what was logged at the last step, to `metrics.jsonl` and the tracker."""
        if self.pending:
            self.tracking.log(self.pending, self.pending["progress/global_step"])
            self.pending = {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {
            "latest": self.latest,
            "pending": self.pending,
            "best_accuracy": self.best_accuracy,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint kept."""
        self.latest, self.pending = state["latest"], state["pending"]
        self.best_accuracy = state["best_accuracy"]
