"""Rounds in which contestants take turns, and the ratios of their figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Round:
    """The work of every contestant in one round."""

    updates: int  # that are timed
    seed: int
    judged: bool = True  # whether the trained model is evaluated, after the clock has stopped
    untimed: int = 0  # updates before the clock starts


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training of one contestant: the time of its loop, and the quality of the model."""

    seconds: float  # from asking for the first timed batch to the end of the last update
    samples: int  # in the timed updates
    train_loss: float  # mean over all samples of the loop
    model: nn.Module | None = None
    summary: dict[str, float] = field(default_factory=dict)  # a recipe's summary.json


@dataclass(frozen=True)
class Measurement:
    """One contestant's figure in one round, in the suite's unit."""

    value: float
    train_loss: float | None = None
    evaluation_loss: float | None = None
    accuracy: float | None = None
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1, where the recipe knows it


Contestant = Callable[[Round], Measurement]


@dataclass(frozen=True)
class Comparison:
    """A ratio of two contestants' figures of the same round, and the goal for its median."""

    title: str
    ours: str
    theirs: str
    at_least: float | None = None
    at_most: float | None = None
    inverted: bool = False  # divide theirs by ours, which turns rates into a ratio of times

    def ratios(self, measurements: dict[str, list[Measurement]]) -> list[float]:
        """Return the ratio of each round."""
        numerators = measurements[self.theirs if self.inverted else self.ours]
        denominators = measurements[self.ours if self.inverted else self.theirs]
        pairs = zip(numerators, denominators, strict=True)
        return [numerator.value / denominator.value for numerator, denominator in pairs]

    def is_reached(self, ratio: float) -> bool | None:
        """Whether `ratio` meets the goal; None if there is no goal."""
        if self.at_least is not None:
            return ratio >= self.at_least
        if self.at_most is not None:
            return ratio <= self.at_most
        return None

    @property
    def goal(self) -> str:
        """The goal, for people; empty if there is none."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return ""


@dataclass
class Suite:
    """Contestants that do the same work, and the comparisons between them."""

    name: str
    unit: str  # of every `Measurement.value`
    updates: int  # of each round, that are timed
    workload: Mapping[str, object]  # facts for the file of results
    contestants: dict[str, Contestant]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    # Rates that such loops reached on two cores of this kind, by contestant; shown beside theirs.
    quoted: dict[str, float] = field(default_factory=dict)
    warmup_updates: int = 0  # of each contestant's training before the first round
    untimed_updates: int = 0  # in each training, before its clock starts
    # Rounds that count as one round of `--rounds`. Many short rounds average out a busy host.
    rounds_for_one: int = 1
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)  # by contestant
    seconds: float = 0.0  # that the whole suite took

    def run(self, rounds: int, announce: Callable[[str], None]) -> None:
        """Warm up every contestant once, then let all take turns: A B C, B C A, and so on.

        The seed of a round is its number, the same for all contestants.

        Args:
            announce: takes a line about the current turn.
        """
        began = time.perf_counter()
        if self.warmup_updates:
            for name, contestant in self.contestants.items():
                announce(f"{self.name}: warming up {name}")
                contestant(Round(self.warmup_updates, seed=0, judged=False))
        self.measurements = {name: [] for name in self.contestants}
        rounds *= self.rounds_for_one
        names = [*self.contestants]
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                announce(f"{self.name}: round {number + 1} of {rounds}: {name}")
                turn = Round(self.updates, seed=number, untimed=self.untimed_updates)
                measurement = self.contestants[name](turn)
                self.measurements[name].append(measurement)
        self.seconds = time.perf_counter() - began

    def median(self, contestant: str, figure: str = "value") -> float | None:
        """Return the median of a figure over the rounds that have it; None if none has.

        Args:
            figure: a field of `Measurement`.
        """
        values = [getattr(measurement, figure) for measurement in self.measurements[contestant]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None
