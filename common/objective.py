"""The objective of a run: a metric of its evaluation, and whether more or less is better."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

from common.errors import TrainingError, UserError

Mode = Literal["max", "min"]  # whether more or less of a metric is better
MODES: dict[str, Mode] = {"max": "max", "min": "min"}  # the modes by their text in an objective
Split = Literal["validation", "test"]  # the splits that are evaluated
EVALUATED_SPLITS: tuple[Split, ...] = ("validation", "test")
# The prefixes of metrics' names, by split.
PREFIXES = {"validation": "val", "test": "test"}
EVALUATION_PREFIXES = tuple(f"{prefix}/" for prefix in PREFIXES.values())


class Objective(NamedTuple):
    """A metric of the evaluation, such as ``accuracy``, and its better direction."""

    metric: str
    mode: Mode

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an objective such as ``accuracy:max``; raise a `UserError` for anything else."""
        # The text may be the constant OBJECTIVE of a recipe, which Python does not check.
        if not isinstance(text, str):
            raise UserError(
                f"OBJECTIVE is {text!r}, of type {type(text).__name__}",
                advice='write it as a string "METRIC:max" or "METRIC:min", such as "accuracy:max"',
            )
        metric, _, mode = text.partition(":")
        if not metric or mode not in MODES:
            raise UserError(
                f"objective {text!r} does not name a metric and max or min",
                advice='write it as "METRIC:max" or "METRIC:min", such as "accuracy:max"',
            )
        return cls(metric, MODES[mode])

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}"

    @property
    def sign(self) -> int:
        """1 if larger values are better, -1 if smaller values are."""
        return 1 if self.mode == "max" else -1

    @property
    def validation_key(self) -> str:
        """The name under which evaluations on validation data log the metric."""
        return f"val/{self.metric}"

    @property
    def best_key(self) -> str:
        """The name in `summary.json` of the best value on validation data."""
        return f"val/best_{self.metric}"

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target, or better; NaN never is."""
        return value >= target if self.mode == "max" else value <= target

    def require_target(self, value: float, target: float | None, *, was_trained: bool) -> None:
        """Raise a `TrainingError` if the final value is worse than `--target`.

        This is the last check of a run, so its results are written by then.

        Args:
            target: the value of `--target`; None: any final value will do.
            was_trained: whether the run trained the model; otherwise, it only evaluated it.
        """
        if target is not None and not self.reaches(value, target):
            remedy = "evaluate another model"
            if was_trained:  # this run is finished, so a resume would not train any longer
                remedy = "start another run that trains for longer"
            raise TrainingError(
                f"the final {self.metric} {value:.4f} is worse than --target {target}",
                advice=f"{remedy}, or pass another --target",
            )

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best value; None if none is known. NaN is never the best.

        Args:
            values: the values to choose from; an unknown value is None.
        """
        numbers = [value for value in values if value is not None and not math.isnan(value)]
        if not numbers:
            return None
        return max(numbers) if self.mode == "max" else min(numbers)
