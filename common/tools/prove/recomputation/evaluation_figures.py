"""Computes the figures of an evaluation again, and explains wrong ones.

A correct figure covers every sample exactly once. A wrong one may be a mean over batches or over
processes, which gives more weight to the samples of a smaller batch. The results of such mistakes
are computed too, so that a check can say which mistake a recipe makes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.tools.prove.recomputation.figure_functions import (
    FIGURE_FUNCTIONS,
    FigureFunction,
    known_name,
    mean_of,
)
from common.tools.prove.recomputation.sample_outcomes import BatchOutcomes, first_of_each_sample
from common.tools.prove.recomputation.split_passes import SplitPass

CORRECT_TOLERANCE = 1e-4  # relative; the recipe computes in fp32
# Relative. A mistake explains a logged figure only if it gives that figure within this tolerance.
EXPLAINED_TOLERANCE = 2e-5
ABSOLUTE_TOLERANCE = 1e-6  # this difference is always allowed


class Mistake(NamedTuple):
    """A wrong way to compute a figure."""

    explanation: str
    figure: float | None  # the figure that the mistake gives; None if it can't be computed


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
    explained = explained_comparison(function, logged, expected_figures)
    if explained is not None:
        return explained
    if may_have_other_outputs or may_be_computed_otherwise(name, split_passes):
        return FigureComparison(None)
    _, last_expected = expected_figures[-1]
    return FigureComparison(False, last_expected, "no usual mistake explains the difference")


def explained_comparison(
    function: FigureFunction, logged: float, expected_figures: Sequence[tuple[SplitPass, float]]
) -> FigureComparison | None:
    """Return the comparison of a wrong figure that a usual mistake explains; None if none does.

    Args:
        logged: the wrong figure.
        expected_figures: the passes that give a figure, each with this figure.
    """
    for split_pass, expected in expected_figures:
        for mistake in likely_mistakes(function, split_pass):
            if mistake.figure is None:
                continue
            if is_close(logged, mistake.figure, EXPLAINED_TOLERANCE):
                return FigureComparison(False, expected, mistake.explanation)
    return None


def may_be_computed_otherwise(name: str, split_passes: Sequence[SplitPass]) -> bool:
    """Whether a figure that no mistake explains may still be correct.

    The recipe may add terms of its own to the loss that torch's function computed, or combine
    several losses, or weight the F1 of several classes.
    """
    has_several_losses = any(split_pass.calls > 1 for split_pass in split_passes)
    has_many_classes = any(
        outcome.class_count > 2 for split_pass in split_passes for outcome in split_pass.outcomes
    )
    is_ambiguous = name in ("loss", "perplexity") or (name == "f1" and has_many_classes)
    return is_ambiguous or has_several_losses


def is_close(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=ABSOLUTE_TOLERANCE)
