"""The statistics of `recipes compare` beside SciPy's, on generated groups of runs.

    python -m tests.unit.tools.statistics.beside_scipy

prints the largest differences that benchmarks/statistics.md states.
"""

from __future__ import annotations

import numpy as np
from scipy import special, stats

from common.tools.statistics.samples import CONFIDENCE, Sample, paired_interval, welch_interval
from common.tools.statistics.student import quantile, tail

CASES = 2000


def largest_differences(seed: int, cases: int) -> dict[str, float]:
    """Return the largest difference between ours and SciPy's for each figure.

    The bounds of an interval differ in units of its width, and the other figures relatively.
    """
    generator = np.random.default_rng(seed)
    largest: dict[str, float] = {}
    for _ in range(cases):
        first_count, second_count = generator.integers(2, 21, size=2)
        deviations = 10 ** generator.uniform(-3, 0, size=2)
        first = generator.normal(0.9, deviations[0], first_count)
        second = generator.normal(0.9, deviations[1], second_count)
        for name, difference in differences_of_case(first, second).items():
            largest[name] = max(difference, largest.get(name, 0.0))
    return largest


def differences_of_case(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Return the difference between ours and SciPy's for each figure of two groups.

    Args:
        first, second: the values of the runs, [runs].
    """
    interval = welch_interval(Sample.of(first.tolist()), Sample.of(second.tolist()), CONFIDENCE)
    assert interval is not None
    pairs = min(len(first), len(second))
    differences = second[:pairs] - first[:pairs]
    paired = paired_interval(Sample.of(differences.tolist()), CONFIDENCE)
    assert paired is not None
    expected_pairs = stats.ttest_rel(second[:pairs], first[:pairs]).confidence_interval(CONFIDENCE)
    paired_width = expected_pairs.high - expected_pairs.low
    expected = stats.ttest_ind(second, first, equal_var=False)
    bounds = expected.confidence_interval(CONFIDENCE)
    width = bounds.high - bounds.low
    probability = 0.5 + CONFIDENCE / 2
    expected_quantile = special.stdtrit(expected.df, probability)
    statistic = abs(expected.statistic)
    expected_tail = special.stdtr(expected.df, -statistic)
    return {
        "bounds of the 95 % interval": max(
            abs(interval.low - bounds.low) / width, abs(interval.high - bounds.high) / width
        ),
        "bounds of the 95 % interval of pairs": max(
            abs(paired.low - expected_pairs.low) / paired_width,
            abs(paired.high - expected_pairs.high) / paired_width,
        ),
        "degrees of freedom": abs(interval.degrees / expected.df - 1),
        "quantile of Student's t": abs(quantile(probability, expected.df) / expected_quantile - 1),
        "tail probability": abs(tail(statistic, expected.df) / expected_tail - 1),
    }


def main() -> None:
    for name, difference in largest_differences(seed=0, cases=CASES).items():
        print(f"{name}: {difference:.0e}")


if __name__ == "__main__":
    main()
