"""One run as the tools that look at several see it, wherever it was read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """What one run left behind; what it did not leave is empty."""

    name: str
    source: str  # its folder, or its address at W&B
    facts: dict[str, Any]  # as in `config.json`
    rows: list[dict[str, float]]  # as in `metrics.jsonl`: one a step, in order
    summary: dict[str, Any]  # as in `summary.json`; empty where the run did not get that far
    status: str  # running, finished, preempted or failed
    reason: str | None = None  # why it was preempted or failed

    @property
    def last_step(self) -> int:
        """The update that was logged last; 0 before the first."""
        return int(self.rows[-1]["progress/global_step"]) if self.rows else 0

    @property
    def total_steps(self) -> int | None:
        """How many updates were planned."""
        return self.facts.get("plan", {}).get("total_steps")

    def series(self, metric: str, axis: str) -> tuple[list[float], list[float]]:
        """Return a metric and where on an axis it was logged; both empty where one is missing.

        Args:
            axis: another metric, such as ``progress/samples``.
        """
        rows = [row for row in self.rows if metric in row and axis in row]
        return [row[axis] for row in rows], [row[metric] for row in rows]


def merge_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return one row a step, in order of steps, with what is a number in it.

    Of a step that was logged twice, because a resumed run replayed it, the later values count.
    """
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
        }
        if "progress/global_step" in numbers:
            merged.setdefault(int(numbers["progress/global_step"]), {}).update(numbers)
    return [merged[step] for step in sorted(merged)]
