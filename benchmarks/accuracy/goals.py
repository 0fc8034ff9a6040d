"""The goals: what an evaluation must reach, and on which data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.records import Evaluation


@dataclass(frozen=True)
class Goal:
    """Figures that one evaluation must reach together."""

    title: str  # for tables
    least: Mapping[str, float]  # by name of a figure, as shares
    # Whether a side that has test-time augmentation may use it. The other side is judged without.
    allows_views: bool = False

    def figure(self, figures: Mapping[str, float], name: str) -> float | None:
        """Return the figure that counts; None if the evaluation lacks it."""
        if self.allows_views and f"{name}_tta" in figures:
            return figures[f"{name}_tta"]
        return figures.get(name)

    def is_met(self, figures: Mapping[str, float]) -> bool:
        """Whether an evaluation reaches all figures."""
        for name, least in self.least.items():
            value = self.figure(figures, name)
            if value is None or value < least:
                return False
        return True

    def first_met(self, evaluations: Sequence[Evaluation]) -> Evaluation | None:
        """Return the first evaluation that meets the goal; None if none does."""
        return next((entry for entry in evaluations if self.is_met(entry.figures)), None)

    def best(self, evaluations: Sequence[Evaluation]) -> float | None:
        """Return the best value of the goal's first figure; None if no evaluation has it."""
        name = next(iter(self.least))
        values = [self.figure(entry.figures, name) for entry in evaluations]
        return max((value for value in values if value is not None), default=None)
