"""What a run is for: the metric that is its goal, and whether more or less of it is better."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from common.errors import UserError

# How the splits are called in metrics' names.
PREFIXES = {"validation": "val", "test": "test"}


class Objective(NamedTuple):
    """A metric of the evaluation, such as ``accuracy``, and its better direction."""

    metric: str
    mode: str  # max or min

    @classmethod
    def parse(cls, text: str) -> Self:
        metric, _, mode = text.partition(":")
        if not metric or mode not in ("max", "min"):
            raise UserError(f"objective {text!r}: write a metric and max or min: accuracy:max")
        return cls(metric, mode)

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}"

    @property
    def best_key(self) -> str:
        """The name in `summary.json` of the best value on validation data."""
        return f"val/best_{self.metric}"

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target, or better; NaN never is."""
        return value >= target if self.mode == "max" else value <= target

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None of none. NaN is never the best."""
        known = [value for value in values if value == value]
        return (max if self.mode == "max" else min)(known, default=None)


@dataclass
class Best:
    """The best evaluation on validation data so far, and how many there were since."""

    objective: Objective
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

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "later": self.later}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.later = int(state["step"]), int(state["later"])
