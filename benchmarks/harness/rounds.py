"""Interleaved rounds, and the ratios that they give."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Round:
    """What every contestant is asked to do in one round."""

    steps: int  # optimizer updates that are timed
    seed: int
    judged: bool = True  # whether the trained model is evaluated, after the clock has stopped
    untimed: int = 0  # updates before the clock starts


@dataclass(frozen=True)
class Training:
    """What one contestant did: its loop's time, and how good the result is."""

    seconds: float  # from asking for the first timed batch to the end of the last update
    samples: int  # of the timed updates
    train_loss: float  # mean over all samples of the loop
    model: nn.Module | None = None
    summary: dict[str, float] = field(default_factory=dict)  # a recipe's own


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
    inverted: bool = False  # theirs by ours: turns rates into a ratio of times

    def ratios(self, measurements: dict[str, list[Measurement]]) -> list[float]:
        """Return the ratio of each round."""
        pairs = zip(measurements[self.ours], measurements[self.theirs], strict=True)
        values = [(ours.value, theirs.value) for ours, theirs in pairs]
        return [theirs / ours if self.inverted else ours / theirs for ours, theirs in values]

    def is_reached(self, ratio: float) -> bool | None:
        """Whether `ratio` meets the goal; None where there is none."""
        if self.at_least is not None:
            return ratio >= self.at_least
        return ratio <= self.at_most if self.at_most is not None else None

    @property
    def goal(self) -> str:
        """The goal, for people."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else ""


@dataclass
class Suite:
    """Contestants that do the same work, and what they are compared for."""

    name: str
    unit: str  # of every `Measurement.value`
    steps: int
    workload: dict[str, Any]
    contestants: dict[str, Contestant]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    quoted: dict[str, float] = field(default_factory=dict)  # what peers should reach, see results
    warmup_steps: int = 0  # of a training before the first round
    untimed_steps: int = 0  # in each training, before its clock starts
    rounds_for_one: int = (
        1  # that are made for each asked for: shorter ones average out a busy host
    )
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    seconds: float = 0.0  # that measuring took

    def run(self, rounds: int, announce: Callable[[str], None]) -> None:
        """Warm every contestant up once, then let all take turns: A B C, B C A, and so on.

        The seed of a round is its number, the same for all contestants.
        """
        began = time.perf_counter()
        if self.warmup_steps:
            for name, contestant in self.contestants.items():
                announce(f"{self.name}: warming up {name}")
                contestant(Round(self.warmup_steps, seed=0, judged=False))
        self.measurements = {name: [] for name in self.contestants}
        rounds *= self.rounds_for_one
        names = [*self.contestants]
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                announce(f"{self.name}: round {number + 1} of {rounds}: {name}")
                turn = Round(self.steps, seed=number, untimed=self.untimed_steps)
                measurement = self.contestants[name](turn)
                self.measurements[name].append(measurement)
        self.seconds = time.perf_counter() - began

    def median(self, contestant: str, figure: str = "value") -> float | None:
        """Return the median of a figure over the rounds that have it."""
        values = [getattr(one, figure) for one in self.measurements[contestant]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None
