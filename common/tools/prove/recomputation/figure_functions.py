"""Functions that compute a figure, such as accuracy or F1, from the outcomes of samples."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from common.tools.prove.recomputation.sample_outcomes import SampleOutcome

# Computes a figure. Returns None if the outcomes lack the values that the figure needs.
FigureFunction = Callable[[Sequence[SampleOutcome]], float | None]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing or there are no values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


class MeanMetric(NamedTuple):
    """A metric that follows from the mean of one value of each sample.

    The error, for example, is 1 minus the mean of the hits.
    """

    value: Callable[[SampleOutcome], float | None]  # of a sample; None if it is unknown
    # The defaults return a number as it is.
    metric_of_mean: Callable[[float], float] = float  # makes the metric from the mean of the values
    rising_value: Callable[[float], float] = float  # makes a value that rises with the metric

    def figure(self, outcomes: Sequence[SampleOutcome]) -> float | None:
        """Return the metric of some samples; None if a value is unknown or there are none."""
        mean = mean_of([self.value(outcome) for outcome in outcomes])
        return None if mean is None else self.metric_of_mean(mean)

    def sample_value(self, outcome: SampleOutcome) -> float | None:
        """Return the value of a sample, whose mean rises with the metric; None if unknown.

        By these values, `margins.py` compares each sample before and after training.
        """
        value = self.value(outcome)
        return None if value is None else self.rising_value(value)


def complement(share: float) -> float:
    return 1 - share


def perplexity(mean_loss: float) -> float:
    """Return the perplexity of a mean loss, limited so that it stays finite."""
    return math.exp(min(700.0, mean_loss))


MEAN_METRICS = {
    "loss": MeanMetric(lambda outcome: outcome.loss),
    "accuracy": MeanMetric(lambda outcome: outcome.hit),
    "error": MeanMetric(
        lambda outcome: outcome.hit, metric_of_mean=complement, rising_value=complement
    ),
    "mse": MeanMetric(lambda outcome: outcome.squared_error),
    "rmse": MeanMetric(lambda outcome: outcome.squared_error, metric_of_mean=math.sqrt),
    "mae": MeanMetric(lambda outcome: outcome.absolute_error),
    "perplexity": MeanMetric(lambda outcome: outcome.loss, metric_of_mean=perplexity),
}
SYNONYMS = {"error_rate": "error"}


def known_name(metric: str) -> str:
    """Return the name under which the tables of this module list a metric."""
    return SYNONYMS.get(metric, metric)


def f1_of_classes(outcomes: Sequence[SampleOutcome]) -> list[float | None] | None:
    """Return the F1 of each class; None unless each sample has one class.

    A class that no sample has, or is predicted to have, has the value None.
    """
    classes = max((outcome.class_count for outcome in outcomes), default=0)
    if not classes or any(
        outcome.predicted is None or outcome.label is None for outcome in outcomes
    ):
        return None
    values: list[float | None] = []
    for class_number in range(classes):
        hits = sum(outcome.predicted == outcome.label == class_number for outcome in outcomes)
        predicted = sum(outcome.predicted == class_number for outcome in outcomes)
        labelled = sum(outcome.label == class_number for outcome in outcomes)
        occurs = predicted + labelled > 0
        values.append(2 * hits / (predicted + labelled) if occurs else None)
    return values


def f1(outcomes: Sequence[SampleOutcome]) -> float | None:
    """Return the F1 of the second of two classes, or the mean over classes if there are more."""
    values = f1_of_classes(outcomes)
    if values is None:
        return None
    if len(values) == 2:
        return values[1] or 0.0
    return mean_of_occurring(values)


def macro_f1(outcomes: Sequence[SampleOutcome]) -> float | None:
    """Return the mean F1 of the classes that occur."""
    values = f1_of_classes(outcomes)
    return None if values is None else mean_of_occurring(values)


def mean_of_occurring(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None: those of the classes that occur."""
    return fmean(value for value in values if value is not None)


FIGURE_FUNCTIONS: dict[str, FigureFunction] = {
    **{name: metric.figure for name, metric in MEAN_METRICS.items()},
    "f1": f1,
    "macro_f1": macro_f1,
}
