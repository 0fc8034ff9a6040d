"""Counts the figures that a proof has computed again, and those that it could not compute."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class FigureCount:
    """The number of figures of one kind."""

    compared: int = 0  # figures that were computed again
    unknown: int = 0  # figures that could not be computed again


@dataclass
class FigureCounts:
    """The numbers of figures of a proof, by kind."""

    rows: FigureCount = field(default_factory=FigureCount)  # means in the rows of metrics.jsonl
    losses: FigureCount = field(default_factory=FigureCount)  # losses that the loop recorded
    metrics: FigureCount = field(default_factory=FigureCount)  # metrics that the loop recorded
    evaluations: FigureCount = field(default_factory=FigureCount)  # figures of evaluations
    speeds: FigureCount = field(default_factory=FigureCount)  # logged speeds

    @property
    def has_outcomes(self) -> bool:
        """Whether a loss, metric or evaluation was computed again from a model's outputs."""
        return any(count.compared for count in (self.losses, self.metrics, self.evaluations))

    def in_words(self) -> str:
        """Return the numbers of figures in words."""
        compared = listing((name, count.compared) for name, count in self.named_counts())
        text = f"computed again: {compared or 'nothing'}"
        unknown = listing((name, count.unknown) for name, count in self.named_counts())
        if unknown:
            text += f"; not computed again, because their kind is unknown here: {unknown}"
        return text

    def named_counts(self) -> Iterator[tuple[str, FigureCount]]:
        """Yield the name and the count of each kind."""
        yield "recorded losses", self.losses
        yield "recorded metrics", self.metrics
        yield "figures of evaluations", self.evaluations
        yield "means in rows", self.rows
        yield "speeds", self.speeds


def listing(counts: Iterator[tuple[str, int]]) -> str:
    """Return the numbers above 0 with their names, such as "12 recorded losses, 3 speeds"."""
    return ", ".join(f"{number} {name}" for name, number in counts if number)
