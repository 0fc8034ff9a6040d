"""The outcome of a sample: how well the model did on it, such as the sample's loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.tools.prove.records.instrument_records import OutcomeColumns


@dataclass(frozen=True)
class SampleOutcome:
    """How well the model did on one sample. None: the loss function does not tell this value."""

    sample_index: int  # in its split
    loss: float | None = None
    hit: float | None = None  # the share of the sample's elements that are classified correctly
    squared_error: float | None = None  # the mean over the sample's elements
    absolute_error: float | None = None  # the mean over the sample's elements
    predicted: int | None = None  # the predicted class
    label: int | None = None
    class_count: int = 0  # 0 unless each sample of the batch has one class


BatchOutcomes = list[SampleOutcome]
Value = TypeVar("Value", int, float)


def first_of_each_sample(outcomes: Sequence[SampleOutcome]) -> list[SampleOutcome]:
    """Return the first outcome of each sample."""
    first: dict[int, SampleOutcome] = {}
    for outcome in outcomes:
        first.setdefault(outcome.sample_index, outcome)
    return [*first.values()]


def outcomes_of_columns(
    samples: Sequence[int], losses: Sequence[float] | None, columns: OutcomeColumns
) -> BatchOutcomes:
    """Return the outcome of each sample; empty if no column is known.

    Args:
        samples: the number of each sample.
        losses: the loss of each sample; None if they are unknown.
        columns: the other values of each sample.
    """
    all_columns = (
        losses,
        columns.hits,
        columns.squared_errors,
        columns.absolute_errors,
        columns.predicted,
        columns.labels,
    )
    if all(column is None for column in all_columns):
        return []
    return [
        SampleOutcome(
            sample_index=sample,
            loss=value_at(number, losses),
            hit=value_at(number, columns.hits),
            squared_error=value_at(number, columns.squared_errors),
            absolute_error=value_at(number, columns.absolute_errors),
            predicted=value_at(number, columns.predicted),
            label=value_at(number, columns.labels),
            class_count=columns.class_count,
        )
        for number, sample in enumerate(samples)
    ]


def value_at(number: int, column: Sequence[Value] | None) -> Value | None:
    return None if column is None else column[number]
