"""Curves of runs: the points of a metric, and the mean over the runs of a group."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from common.metric_names import SAMPLES, STEP, TRAINING_SECONDS
from common.tools.compare.readers.run_record import RunRecord

# The measures of progress on the x-axis of curves, with the heading of the axis.
X_AXES = {STEP: "updates", SAMPLES: "samples", TRAINING_SECONDS: "training time"}

Curve = Mapping[float, tuple[float, float]]  # the point (x, y) of each step, by step


class MeanPoint(NamedTuple):
    """The mean of several curves at one step."""

    step: float
    x: float
    mean: float
    deviation: float  # the standard deviation, with count - 1 in its denominator


def curve_of(run: RunRecord, name: str, x_name: str) -> Curve:
    """Return the points of a metric, by step.

    Rows that lack one of the values are left out, and so are values that are NaN or infinite.
    """
    return {
        row[STEP]: (row[x_name], row[name])
        for row in run.rows
        if is_finite(row.get(x_name)) and is_finite(row.get(name))
    }


def is_finite(value: float | None) -> bool:
    """Return whether a value is known, and neither NaN nor infinite."""
    return value is not None and math.isfinite(value)


def mean_curve(curves: Sequence[Curve]) -> list[MeanPoint]:
    """Return the mean and the standard deviation of curves, at the steps that all of them have.

    Args:
        curves: at least two curves.
    """
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    points = []
    for step in steps:
        values = [curve[step][1] for curve in curves]
        mean = fmean(values)
        # Runs reach the same step at different times, so the x-position is a mean, too.
        x = fmean(curve[step][0] for curve in curves)
        points.append(MeanPoint(step, x, mean, deviation_from(mean, values)))
    return points


def deviation_from(mean: float, values: Sequence[float]) -> float:
    """Return the standard deviation of at least two values from their mean.

    `statistics.stdev` computes with exact fractions, which takes too long for every point of a
    curve.
    """
    # The distance of two points is the root of the sum of the squared differences.
    distance_from_mean = math.dist(values, [mean] * len(values))
    return distance_from_mean / math.sqrt(len(values) - 1)
