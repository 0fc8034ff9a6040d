"""Simulated experiments with known truth, which count how often the statistics are wrong.

    python -m tests.unit.tools.statistics.simulation

prints the rates that benchmarks/statistics.md states. The tests repeat a part of it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from common.tools.statistics.contrasts import Contrast, contrast_by_seeds, welch_contrast
from common.tools.statistics.samples import (
    CONFIDENCE,
    Sample,
    runs_needed,
    series_sample,
    simultaneous_confidence,
    welch_interval,
)

# Runs of both groups, and the standard deviation of the second group where that of the first is 1.
DESIGNS = [(2, 2, 1.0), (3, 3, 1.0), (3, 3, 3.0), (3, 5, 3.0), (5, 5, 1.0), (5, 5, 3.0)]
DESIGNS += [(10, 10, 1.0), (10, 20, 2.0)]
# The difference of the means in standard deviations of the first group, and the deviation of the
# second group.
EFFECTS = [(0.5, 1.0), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 2.0), (3.0, 2.0)]

# Runs of both groups, and the correlation of the two runs that have the same seed.
SHARED_SEEDS = [(3, 0.0), (3, 0.5), (3, 0.9), (5, 0.0), (5, 0.5), (5, 0.9), (10, 0.0), (10, 0.5)]
SHARED_SEEDS += [(10, 0.9)]
# Log lines of each of two runs, and the correlation of neighbouring lines.
LINES = [(5, 0.5), (10, 0.0), (10, 0.5), (20, 0.5), (50, 0.0), (50, 0.5), (50, 0.8), (200, 0.5)]


def draw(
    generator: np.random.Generator, count: int, mean: float, deviation: float, repetitions: int
) -> list[Sample]:
    """Return the samples of as many simulated groups as there are repetitions."""
    values = generator.normal(mean, deviation, (repetitions, count))
    return [Sample.of(row) for row in values.tolist()]


def error_rates(
    generator: np.random.Generator,
    design: tuple[int, int, float],
    repetitions: int,
    difference: float,
) -> tuple[float, float]:
    """Return how often groups are called different, and how often intervals miss the truth.

    Args:
        design: a row of `DESIGNS`.
        difference: the true difference of the means. If it is 0, both rates are the same.
    """
    first_count, second_count, deviation = design
    firsts = draw(generator, first_count, 5.0, 1.0, repetitions)
    seconds = draw(generator, second_count, 5.0 + difference, deviation, repetitions)
    called_different = 0
    missed = 0
    for first, second in zip(firsts, seconds, strict=True):
        interval = welch_interval(first, second, confidence=CONFIDENCE)
        assert interval is not None
        called_different += interval.excludes_zero
        missed += not interval.low <= difference <= interval.high
    return called_different / repetitions, missed / repetitions


def rate_of_any_error(
    generator: np.random.Generator, groups: int, count: int, repetitions: int
) -> float:
    """Return how often any pair of several equal groups is called different."""
    confidence = simultaneous_confidence(math.comb(groups, 2))
    samples = [draw(generator, count, 5.0, 1.0, repetitions) for _ in range(groups)]
    errors = 0
    for groups_of_experiment in zip(*samples, strict=True):
        intervals = [
            welch_interval(first, second, confidence)
            for first, second in itertools.combinations(groups_of_experiment, 2)
        ]
        errors += any(interval is not None and interval.excludes_zero for interval in intervals)
    return errors / repetitions


@dataclass(frozen=True)
class SharedSeedRates:
    """How often two groups whose runs share seeds are called different, from 0 to 1."""

    equal_by_welch: float  # the true means are equal
    equal_by_pairs: float
    different_by_welch: float  # they differ by two standard deviations
    different_by_pairs: float


def rates_with_shared_seeds(
    generator: np.random.Generator, count: int, correlation: float, repetitions: int
) -> SharedSeedRates:
    """Return how often Welch's interval and that of the pairs' differences call groups different.

    Args:
        count: runs of each group.
        correlation: that of two runs with the same seed.
    """
    rates: list[float] = []
    seeds = [str(seed) for seed in range(count)]
    for difference in (0.0, 2.0):
        shared, first_noise, second_noise = generator.normal(0.0, 1.0, (3, repetitions, count))
        own_part = math.sqrt(1 - correlation)
        first = math.sqrt(correlation) * shared + own_part * first_noise
        second = math.sqrt(correlation) * shared + own_part * second_noise + difference
        by_welch = 0
        by_pairs = 0
        for first_values, second_values in zip(first.tolist(), second.tolist(), strict=True):
            samples = Sample.of(first_values), Sample.of(second_values)
            by_welch += is_different(welch_contrast(*samples, CONFIDENCE))
            groups = (
                dict(zip(seeds, values, strict=True)) for values in (first_values, second_values)
            )
            by_pairs += is_different(contrast_by_seeds(*groups, CONFIDENCE))
        rates += [by_welch / repetitions, by_pairs / repetitions]
    return SharedSeedRates(*rates)


def is_different(contrast: Contrast) -> bool:
    """Return whether the interval of two groups calls them different."""
    return contrast.interval is not None and contrast.interval.excludes_zero


def coverage_of_lines(
    generator: np.random.Generator, lines: int, correlation: float, repetitions: int
) -> float:
    """Return how often the interval of two series covers the true difference of their means.

    Args:
        lines: values of each series, which is autoregressive of order one.
        correlation: of neighbouring values.
    """
    noise = generator.normal(0.0, (1 - correlation**2) ** 0.5, (2, repetitions, lines))
    series = np.empty_like(noise)
    series[:, :, 0] = generator.normal(0.0, 1.0, (2, repetitions))
    for line in range(1, lines):
        series[:, :, line] = correlation * series[:, :, line - 1] + noise[:, :, line]
    covered = 0
    for first, second in zip(*series.tolist(), strict=True):
        interval = welch_interval(
            series_sample(first), series_sample(second), confidence=CONFIDENCE
        )
        assert interval is not None
        covered += interval.low <= 0.0 <= interval.high
    return covered / repetitions


def power_of_needed_runs(
    generator: np.random.Generator, effect: tuple[float, float], repetitions: int
) -> tuple[int, float]:
    """Return the number of runs that is said to be needed, and how often they find the difference.

    Args:
        effect: a row of `EFFECTS`, the truth from which the number is computed.
    """
    difference, deviation = effect
    count = runs_needed(
        Sample(3, 0.0, 1.0), Sample(3, difference, deviation), confidence=CONFIDENCE
    )
    assert count is not None
    return count, error_rates(generator, (count, count, deviation), repetitions, difference)[0]


def main() -> None:
    repetitions = 5_000
    generator = np.random.default_rng(0)
    print(f"{repetitions:,} repetitions")
    for design in DESIGNS:
        equal, _ = error_rates(generator, design, repetitions, 0.0)
        _, missed = error_rates(generator, design, repetitions, 1.0)
        print(f"n, n, deviation {design}: called different {equal:.3f}, covered {1 - missed:.3f}")
    for groups in (3, 6):
        rate = rate_of_any_error(generator, groups, 5, repetitions)
        print(f"{groups} equal groups of 5: any pair called different {rate:.3f}")
    for count, correlation in SHARED_SEEDS:
        print(f"{count} seeds, correlation {correlation}:", end=" ")
        print(rates_with_shared_seeds(generator, count, correlation, repetitions))
    for lines, correlation in LINES:
        covered = coverage_of_lines(generator, lines, correlation, repetitions)
        print(f"{lines} log lines, correlation {correlation}: covered {covered:.3f}")
    for effect in EFFECTS:
        count, power = power_of_needed_runs(generator, effect, repetitions)
        print(f"difference, deviation {effect}: {count} runs each, power {power:.3f}")


if __name__ == "__main__":
    main()
