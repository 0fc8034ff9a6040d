"""What a run is for: the metric that is its goal, and whether more or less of it is better."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from common.errors import TrainingError, UserError

# How the splits are called in metrics' names.
PREFIXES = {"validation": "val", "test": "test"}


class Objective(NamedTuple):
    """A metric of the evaluation, such as ``accuracy``, and its better direction."""

    metric: str
    mode: str  # max or min

    @classmethod
    def parse(cls, text: str) -> Self:
        if not isinstance(text, str):
            shown = f"objective {text!r} is a {type(text).__name__}"
            raise UserError(f"{shown}: write a metric and max or min in one text: 'accuracy:max'")
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

    def require(self, value: float, target: float | None) -> None:
        """Raise a TrainingError where the final value is worse than `--target`."""
        if target is not None and not self.reaches(value, target):
            what = f"the final {self.metric} {value:.4f}"
            raise TrainingError(f"{what} is worse than --target {target}")

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None of none. NaN is never the best."""
        known = [value for value in values if value == value]
        return (max if self.mode == "max" else min)(known, default=None)
