"""Computes the figures of an evaluation again, from the outcomes of its samples.

The outcome of a sample is how well the model did on it: its loss, and its hits or errors.

A correct figure covers every sample exactly once. A wrong one may be a mean over batches or over
processes, which gives more weight to the samples of a smaller batch. The results of such mistakes
are computed too, so that a check can say which mistake a recipe makes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, TypeVar

from common.tools.prove.records.instrument_records import EvaluationLoss, OutcomeColumns

CORRECT_TOLERANCE = 1e-4  # relative; the recipe computes in fp32
# Relative. A mistake explains a logged figure only if it gives that figure within this tolerance.
EXPLAINED_TOLERANCE = 2e-5
ABSOLUTE_TOLERANCE = 1e-6  # this difference is always allowed


@dataclass(frozen=True)
class SampleOutcome:
    """How well the model did on one sample. None: the loss function does not tell this value."""

    sample: int  # the index of the sample in its split
    loss: float | None = None
    hit: float | None = None  # the share of the sample's elements that are classified correctly
    squared_error: float | None = None  # the mean over the sample's elements
    absolute_error: float | None = None  # the mean over the sample's elements
    predicted: int | None = None  # the predicted class
    label: int | None = None
    classes: int = 0  # the number of classes; 0 unless each sample of the batch has one class


BatchOutcomes = list[SampleOutcome]
Value = TypeVar("Value", int, float)
# Computes a figure. Returns None if the outcomes lack the values that the figure needs.
FigureFunction = Callable[[Sequence[SampleOutcome]], float | None]


class Mistake(NamedTuple):
    """A wrong way to compute a figure."""

    explanation: str
    figure: float | None  # the figure that the mistake gives; None if it can't be computed


@dataclass(frozen=True)
class SplitPass:
    """The outcomes of one pass over a split in an evaluation.

    They come from one loss of each batch. If the recipe computes several losses for a batch, the
    pass has a `SplitPass` for each of these.
    """

    split: str
    batches_by_rank: list[list[BatchOutcomes]]
    calls: int  # the most losses that the recipe computes for a batch of the pass

    @property
    def batches(self) -> list[BatchOutcomes]:
        """The batches of all ranks."""
        return [batch for batches in self.batches_by_rank for batch in batches]

    @property
    def outcomes(self) -> list[SampleOutcome]:
        """All outcomes, including those that repeat a sample."""
        return [outcome for batch in self.batches for outcome in batch]

    @property
    def unique_outcomes(self) -> list[SampleOutcome]:
        """The first outcome of each sample."""
        return first_of_each_sample(self.outcomes)


def first_of_each_sample(outcomes: Sequence[SampleOutcome]) -> list[SampleOutcome]:
    """Return the first outcome of each sample."""
    first: dict[int, SampleOutcome] = {}
    for outcome in outcomes:
        first.setdefault(outcome.sample, outcome)
    return [*first.values()]


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


def f1_of_classes(outcomes: Sequence[SampleOutcome]) -> list[float] | None:
    """Return the F1 of each class, 0 where undefined; None unless each sample has one class."""
    classes = max((outcome.classes for outcome in outcomes), default=0)
    if not classes or any(
        outcome.predicted is None or outcome.label is None for outcome in outcomes
    ):
        return None
    values = []
    for class_number in range(classes):
        hits = sum(outcome.predicted == outcome.label == class_number for outcome in outcomes)
        predicted = sum(outcome.predicted == class_number for outcome in outcomes)
        labelled = sum(outcome.label == class_number for outcome in outcomes)
        values.append(2 * hits / max(1, predicted + labelled))
    return values


def f1(outcomes: Sequence[SampleOutcome]) -> float | None:
    """Return the F1 of the second of two classes, or the mean over classes if there are more."""
    values = f1_of_classes(outcomes)
    if values is None:
        return None
    return values[1] if len(values) == 2 else fmean(values)


def macro_f1(outcomes: Sequence[SampleOutcome]) -> float | None:
    values = f1_of_classes(outcomes)
    return None if values is None else fmean(values)


FIGURE_FUNCTIONS: dict[str, FigureFunction] = {
    **{name: metric.figure for name, metric in MEAN_METRICS.items()},
    "f1": f1,
    "macro_f1": macro_f1,
}


def likely_mistakes(function: FigureFunction, split_pass: SplitPass) -> Iterator[Mistake]:
    """Yield mistakes that may explain a wrong figure, the likeliest first."""
    if len(split_pass.outcomes) > len(split_pass.unique_outcomes):
        yield Mistake(
            "it counts samples twice that only fill up a batch", function(split_pass.outcomes)
        )
    batch_figures = [function(batch) for batch in split_pass.batches]
    yield Mistake(
        "it is a mean over batches, not over samples, and the last batch is smaller",
        mean_of(batch_figures),
    )
    # Each sample gets the figure of its batch. For a mean of samples, their mean is correct.
    figures_of_samples: list[float | None] = []
    for batch, figure in zip(split_pass.batches, batch_figures, strict=True):
        figures_of_samples += [figure] * len(batch)
    yield Mistake(
        "it is a mean of the figures of batches, which differs from the figure of all samples",
        mean_of(figures_of_samples),
    )
    processes = len(split_pass.batches_by_rank)
    if processes > 1:
        correct = function(split_pass.unique_outcomes)
        yield from mistaken_means_of_processes(function, split_pass.batches_by_rank)
        yield from mistakes_by_number_of_processes(correct, processes)
    last_batch = split_pass.batches_by_rank[0][-1]
    yield Mistake("it counts only the last batch", function(last_batch))
    known_figures = [figure for figure in batch_figures if figure is not None]
    total = sum(known_figures) if known_figures else None
    yield Mistake("it is added up over batches, not averaged", total)


def mistaken_means_of_processes(
    function: FigureFunction, batches_by_rank: Sequence[Sequence[BatchOutcomes]]
) -> Iterator[Mistake]:
    """Yield figures that are not means over the samples of all processes.

    These are means over processes, means over their batches, and the figure of the first process.
    """
    outcomes_by_rank = []
    batch_means = []
    for batches in batches_by_rank:
        outcomes_by_rank.append([outcome for batch in batches for outcome in batch])
        batch_means.append(mean_of([function(batch) for batch in batches]))
    figures = [function(first_of_each_sample(outcomes)) for outcomes in outcomes_by_rank]
    yield Mistake(
        "it is a mean over processes, not over samples, and they have different numbers of samples",
        mean_of(figures),
    )
    yield Mistake(
        "it is a mean over the batches of each process, not over samples", mean_of(batch_means)
    )
    yield Mistake("it counts only the samples of the first process", function(outcomes_by_rank[0]))


def mistakes_by_number_of_processes(correct: float | None, processes: int) -> Iterator[Mistake]:
    """Yield the correct figure, wrongly multiplied or divided by the number of processes.

    Args:
        correct: the correct figure; None if it is unknown, which yields nothing.
        processes: at least 2, or the mistakes would give the correct figure.
    """
    if correct is not None:
        yield Mistake("it is added up over processes, not averaged", correct * processes)
        yield Mistake(
            "it is divided by the number of processes once too often", correct / processes
        )


def split_passes_of(losses_by_rank: Sequence[Sequence[EvaluationLoss]]) -> list[SplitPass]:
    """Return each pass over a split, once for each loss that the recipe computes per batch.

    A pass is left out if a rank has no batch of it, or if the outcomes of a batch are unknown.

    Args:
        losses_by_rank: for each rank, the losses that one evaluation computed.
    """
    # The batches of each rank, by the number of the pass and the number of the call.
    batches_by_key: dict[tuple[int, int], list[list[BatchOutcomes]]] = {}
    splits: dict[int, str] = {}  # by the number of the pass
    calls: dict[int, int] = {}  # how many losses a batch has at most, by the number of the pass
    for rank, losses in enumerate(losses_by_rank):
        for pass_number, call, loss in with_pass_and_call(losses):
            splits[pass_number] = loss.split
            calls[pass_number] = max(calls.get(pass_number, 0), call + 1)
            key = (pass_number, call)
            batches_by_rank = batches_by_key.setdefault(key, [[] for _ in losses_by_rank])
            batches_by_rank[rank].append(outcomes_of_batch(loss))
    split_passes = []
    for (pass_number, _), batches_by_rank in batches_by_key.items():
        has_all_ranks = all(batches_by_rank)
        has_all_outcomes = all(batch for batches in batches_by_rank for batch in batches)
        if has_all_ranks and has_all_outcomes:
            split_pass = SplitPass(splits[pass_number], batches_by_rank, calls[pass_number])
            split_passes.append(split_pass)
    return split_passes


def with_pass_and_call(
    losses: Sequence[EvaluationLoss],
) -> Iterator[tuple[int, int, EvaluationLoss]]:
    """Yield each loss with the number of its pass and the number of its call, both from 0.

    Passes are counted within the evaluation, so all ranks give a pass the same number. A call is a
    call of a loss function. Calls are counted within a batch, which may have several losses.
    """
    passes: dict[int, int] = {}
    call = 0
    previous_batch: tuple[int, list[int]] | None = None
    for loss in losses:
        pass_number = passes.setdefault(loss.pass_number, len(passes))
        batch = (loss.pass_number, loss.samples)
        call = call + 1 if batch == previous_batch else 0
        previous_batch = batch
        yield pass_number, call, loss


def outcomes_of_batch(loss: EvaluationLoss) -> BatchOutcomes:
    """Return the outcomes of a batch; empty if they are not known for each sample."""
    return outcomes_of_columns(loss.samples, loss.losses, loss.of_samples)


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
            sample=sample,
            loss=value_at(number, losses),
            hit=value_at(number, columns.hits),
            squared_error=value_at(number, columns.squared_errors),
            absolute_error=value_at(number, columns.absolute_errors),
            predicted=value_at(number, columns.predicted),
            label=value_at(number, columns.labels),
            classes=columns.classes,
        )
        for number, sample in enumerate(samples)
    ]


def value_at(number: int, column: Sequence[Value] | None) -> Value | None:
    return None if column is None else column[number]


@dataclass(frozen=True)
class FigureComparison:
    """Whether a logged figure agrees with the outcomes of its samples."""

    is_correct: bool | None  # None: the figure can't be computed again
    expected: float | None = None  # the value that the outcomes give, if the figure is wrong
    explanation: str = ""  # how the recipe probably computed a wrong figure


def compare_figure(
    name: str,
    logged: float,
    split_passes: Sequence[SplitPass],
    *,
    may_have_other_outputs: bool = False,
) -> FigureComparison:
    """Compare a figure that a recipe logged with the outcomes of its evaluation.

    Args:
        name: the name of the figure without its prefix, such as "accuracy".
        logged: its value.
        split_passes: the passes of the evaluation. The figure is correct if it follows from one.
        may_have_other_outputs: whether the figure may come from outputs of the model that no loss
            got, as with test-time augmentation.
    """
    function = FIGURE_FUNCTIONS.get(known_name(name))
    if function is None:
        return FigureComparison(None)
    expected_figures: list[tuple[SplitPass, float]] = []
    for split_pass in split_passes:
        expected = function(split_pass.unique_outcomes)
        if expected is not None:
            expected_figures.append((split_pass, expected))
    if not expected_figures:
        return FigureComparison(None)
    if any(is_close(logged, expected, CORRECT_TOLERANCE) for _, expected in expected_figures):
        return FigureComparison(True)
    for split_pass, expected in expected_figures:
        for mistake in likely_mistakes(function, split_pass):
            if mistake.figure is None:
                continue
            if is_close(logged, mistake.figure, EXPLAINED_TOLERANCE):
                return FigureComparison(False, expected, mistake.explanation)
    # The recipe may add terms of its own to the loss that torch's function computed, or combine
    # several losses, or weight the F1 of several classes. Then a figure that no mistake explains
    # may still be correct.
    has_several_losses = any(split_pass.calls > 1 for split_pass in split_passes)
    has_many_classes = any(
        outcome.classes > 2 for split_pass in split_passes for outcome in split_pass.outcomes
    )
    is_ambiguous = name in ("loss", "perplexity") or (name == "f1" and has_many_classes)
    if is_ambiguous or has_several_losses or may_have_other_outputs:
        return FigureComparison(None)
    _, last_expected = expected_figures[-1]
    return FigureComparison(False, last_expected, "no usual mistake explains the difference")


def is_close(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=ABSOLUTE_TOLERANCE)
