"""Computes the figures of an evaluation again, from the outcomes of its samples.

A right figure is one of all samples, each counted once. A wrong one may be a mean over batches or
over processes, which weighs the samples of a smaller batch more. These wrong ways are computed too,
so that a check can say which of them a recipe uses.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from common.tools.prove.notes import Outcome

RIGHT = 1e-4  # relative; the recipe computes in fp32
EXPLAINED = 2e-5  # relative; a wrong way must give the figure more closely than a right one
SMALL = 1e-6  # an absolute difference that is always allowed


@dataclass(frozen=True)
class Row:
    """The outcome of one sample."""

    sample: int
    loss: float | None = None
    hit: float | None = None  # the share of its elements that are classified correctly
    square: float | None = None  # its mean squared error
    distance: float | None = None  # its mean absolute error
    predicted: int | None = None
    label: int | None = None
    classes: int = 0


Batch = list[Row]
Value = TypeVar("Value", int, float)
Figure = Callable[[Sequence[Row]], float | None]  # None: the rows lack what it needs
WrongWay = tuple[str, float | None]  # in words, and the figure that it gives


@dataclass(frozen=True)
class Reading:
    """One pass over a split in an evaluation: the batches of each rank."""

    split: str
    batches: list[list[Batch]]  # by rank
    calls: int  # of loss functions for each batch

    @property
    def rows(self) -> list[Row]:
        """All rows, also those that repeat a sample."""
        return [row for batches in self.batches for batch in batches for row in batch]

    @property
    def unique_rows(self) -> list[Row]:
        """One row for each sample."""
        return once_each(self.rows)


def once_each(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each sample."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row.sample, row)
    return [*first.values()]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def loss(rows: Sequence[Row]) -> float | None:
    return mean_of([row.loss for row in rows])


def accuracy(rows: Sequence[Row]) -> float | None:
    return mean_of([row.hit for row in rows])


def error(rows: Sequence[Row]) -> float | None:
    share = accuracy(rows)
    return None if share is None else 1 - share


def mean_squared_error(rows: Sequence[Row]) -> float | None:
    return mean_of([row.square for row in rows])


def root_mean_squared_error(rows: Sequence[Row]) -> float | None:
    square = mean_squared_error(rows)
    return None if square is None else math.sqrt(square)


def mean_absolute_error(rows: Sequence[Row]) -> float | None:
    return mean_of([row.distance for row in rows])


def perplexity(rows: Sequence[Row]) -> float | None:
    mean_loss = loss(rows)
    return None if mean_loss is None else math.exp(min(700.0, mean_loss))


def f1_of_classes(rows: Sequence[Row]) -> list[float] | None:
    """Return the F1 of each class, 0 where undefined; None if samples have no single class."""
    classes = max((row.classes for row in rows), default=0)
    if not classes or any(row.predicted is None or row.label is None for row in rows):
        return None
    values = []
    for number in range(classes):
        hits = sum(row.predicted == row.label == number for row in rows)
        predicted = sum(row.predicted == number for row in rows)
        labelled = sum(row.label == number for row in rows)
        values.append(2 * hits / max(1, predicted + labelled))
    return values


def f1(rows: Sequence[Row]) -> float | None:
    """Return the F1 of the second of two classes."""
    values = f1_of_classes(rows)
    return values[1] if values is not None and len(values) == 2 else None


def macro_f1(rows: Sequence[Row]) -> float | None:
    values = f1_of_classes(rows)
    return None if values is None else fmean(values)


KNOWN: dict[str, Figure] = {
    "loss": loss,
    "accuracy": accuracy,
    "error": error,
    "error_rate": error,
    "mse": mean_squared_error,
    "rmse": root_mean_squared_error,
    "mae": mean_absolute_error,
    "perplexity": perplexity,
    "f1": f1,
    "macro_f1": macro_f1,
}


def wrong_ways(figure: Figure, reading: Reading) -> Iterator[WrongWay]:
    """Yield ways to compute a figure that do not count each sample once, the likeliest first."""
    if len(reading.rows) > len(reading.unique_rows):
        yield "it counts samples twice that only fill up a batch", figure(reading.rows)
    all_batches = [batch for batches in reading.batches for batch in batches]
    of_batches = [figure(batch) for batch in all_batches]
    yield (
        "it is a mean over batches, not over samples, and the last batch is smaller",
        mean_of(of_batches),
    )
    if len(reading.batches) > 1:
        yield from wrong_means_of_processes(figure, reading.batches)
        yield from wrong_factors_of_processes(figure(reading.unique_rows), len(reading.batches))
    yield "it counts the last batch alone", figure(reading.batches[0][-1])
    known = [value for value in of_batches if value is not None]
    yield "it is added up over batches, not averaged", sum(known) if known else None


def wrong_means_of_processes(
    figure: Figure, batches_of_ranks: Sequence[Sequence[Batch]]
) -> Iterator[WrongWay]:
    """Yield means over processes or their batches, which are no means over samples."""
    rows_of_ranks = [[row for batch in batches for row in batch] for batches in batches_of_ranks]
    yield (
        "it is a mean over processes, not over samples, and they have different numbers of samples",
        mean_of([figure(once_each(rows)) for rows in rows_of_ranks]),
    )
    means = [mean_of([figure(batch) for batch in batches]) for batches in batches_of_ranks]
    yield "it is a mean over the batches of each process, not over samples", mean_of(means)
    yield "it counts the samples of the first process alone", figure(rows_of_ranks[0])


def wrong_factors_of_processes(right: float | None, processes: int) -> Iterator[WrongWay]:
    """Yield a right figure, multiplied or divided by the number of processes by mistake."""
    if right is not None:
        yield "it is added up over processes, not averaged", right * processes
        yield "it is divided by the number of processes once too often", right / processes


def readings_of(ranks: Sequence[Sequence[Outcome]]) -> list[Reading]:
    """Return each pass of an evaluation, once for each loss that a batch computes.

    Args:
        ranks: for each rank, the outcomes of one evaluation.
    """
    by_key: dict[tuple[int, int], list[list[Batch]]] = {}
    splits: dict[int, str] = {}
    calls: dict[int, int] = {}
    for rank, outcomes in enumerate(ranks):
        for reading, call, outcome in numbered(outcomes):
            splits[reading] = outcome.split
            calls[reading] = max(calls.get(reading, 0), call + 1)
            batches = by_key.setdefault((reading, call), [[] for _ in ranks])
            batches[rank].append(rows_of(outcome))
    readings = []
    for (reading, _), batches in by_key.items():
        if all(batches) and all(batch for ranks_batches in batches for batch in ranks_batches):
            readings.append(Reading(splits[reading], batches, calls[reading]))
    return readings


def numbered(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, int, Outcome]]:
    """Yield each outcome with the number of its pass, from 0, and of the call in its batch."""
    passes: dict[int, int] = {}
    call = 0
    before: tuple[int, list[int]] | None = None
    for outcome in outcomes:
        reading = passes.setdefault(outcome.reading, len(passes))
        batch = (outcome.reading, outcome.samples)
        call = call + 1 if batch == before else 0
        before = batch
        yield reading, call, outcome


def rows_of(outcome: Outcome) -> Batch:
    """Return the rows of a batch; empty if its outcomes can't be told apart by sample."""
    of_rows = outcome.of_rows
    columns = (
        outcome.losses,
        of_rows.hits,
        of_rows.squares,
        of_rows.distances,
        of_rows.predicted,
        of_rows.labels,
    )
    if all(column is None for column in columns):
        return []
    return [
        Row(
            sample=sample,
            loss=value_at(number, outcome.losses),
            hit=value_at(number, of_rows.hits),
            square=value_at(number, of_rows.squares),
            distance=value_at(number, of_rows.distances),
            predicted=value_at(number, of_rows.predicted),
            label=value_at(number, of_rows.labels),
            classes=of_rows.classes,
        )
        for number, sample in enumerate(outcome.samples)
    ]


def value_at(number: int, column: Sequence[Value] | None) -> Value | None:
    return None if column is None else column[number]


@dataclass(frozen=True)
class Judged:
    """What the outcomes say of one figure."""

    is_right: bool | None  # None: it can't be computed again
    expected: float | None = None
    explanation: str = ""  # of a wrong one


def judge(name: str, value: float, readings: Sequence[Reading]) -> Judged:
    """Compare a figure that a recipe logged with the outcomes of its evaluation."""
    figure = KNOWN.get(name)
    if figure is None:
        return Judged(None)
    candidates = [(reading, figure(reading.unique_rows)) for reading in readings]
    known = [(reading, expected) for reading, expected in candidates if expected is not None]
    if not known:
        return Judged(None)
    if any(is_close(value, expected, RIGHT) for _, expected in known):
        return Judged(True)
    for reading, expected in known:
        for words, wrong in wrong_ways(figure, reading):
            if wrong is not None and is_close(value, wrong, EXPLAINED):
                return Judged(False, expected, words)
    # A loss may have more terms than one function of torch computes, or several of them.
    is_ambiguous = name in ("loss", "perplexity") or any(reading.calls > 1 for reading in readings)
    if is_ambiguous:
        return Judged(None)
    return Judged(False, known[-1][1], "it is not the figure of these outcomes")


def is_close(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=SMALL)
