"""How many figures of each kind a proof has computed again, and how many it could not."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Count:
    """Figures of one kind."""

    compared: int = 0
    unknown: int = 0  # that were logged, and can't be computed again


@dataclass
class Counts:
    """All figures of a proof, by kind."""

    rows: Count = field(default_factory=Count)  # means of what the loop recorded
    losses: Count = field(default_factory=Count)  # that the loop recorded
    metrics: Count = field(default_factory=Count)  # that the loop recorded
    evaluations: Count = field(default_factory=Count)
    speeds: Count = field(default_factory=Count)

    @property
    def has_outcomes(self) -> bool:
        """Whether a loss or a metric was computed again from a model's outputs."""
        return any(count.compared for count in (self.losses, self.metrics, self.evaluations))

    def in_words(self) -> str:
        """Return what was computed again, and what could not be."""
        compared = listing((words, count.compared) for words, count in self.by_words())
        text = f"computed again: {compared or 'nothing'}"
        unknown = listing((words, count.unknown) for words, count in self.by_words())
        if unknown:
            text += f"; not computed again, because their kind is unknown here: {unknown}"
        return text

    def by_words(self) -> Iterator[tuple[str, Count]]:
        """Yield the counts, each with what it counts in words."""
        yield "recorded losses", self.losses
        yield "recorded metrics", self.metrics
        yield "figures of evaluations", self.evaluations
        yield "means in rows", self.rows
        yield "speeds", self.speeds


def listing(counts: Iterator[tuple[str, int]]) -> str:
    """Return numbers with what they count, such as "12 recorded losses, 3 speeds"."""
    return ", ".join(f"{number} {words}" for words, number in counts if number)
