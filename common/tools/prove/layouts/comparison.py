"""Compares two runs that make the same updates in different layouts, within a tolerance.

Sums in another order round differently. So the losses, the gradients and the weights of such runs
agree only within a tolerance. Learning rates do not depend on such sums, so their tolerance is
tiny.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from safetensors.torch import load_file

from common.tools.prove.instruments.updates import (
    FIRST_BUFFERS,
    FIRST_WEIGHTS,
    LATER_BUFFERS,
    LATER_WEIGHTS,
)
from common.tools.prove.layouts.compared_runs import UPDATES
from common.tools.prove.records.instrument_records import OptimizerStep
from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import EvaluationFigures, RecordedMicroBatch

# Relative tolerances.
LOSS_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-2
RATE_TOLERANCE = 1e-6
FIGURE_TOLERANCE = 1e-2  # of an evaluation's figures, besides MAX_FLIPPED_SAMPLES
MAX_FLIPPED_SAMPLES = 2  # samples that rounding may put into another class
ROUNDING_OF_LOSS = 1e-6  # of an evaluation's loss, if hardly any rounding is in it
WEIGHT_TOLERANCE = 2e-2  # a share of the distance that the weights moved up to COMPARED_UPDATE
# Absolute differences that are always allowed.
SMALL_LOSS = 1e-5
SMALL_NORM = 1e-6
SMALL_RATE = 1e-12
SMALL_FIGURE = 1e-5


@dataclass(frozen=True)
class Update:
    """One update of a run, over all ranks."""

    micro_batches: int  # the number of micro-batches of each rank
    loss: float  # the mean over micro-batches and ranks
    gradient_norms: tuple[float, ...]  # one for each optimizer step, in order
    learning_rates: tuple[float, ...]  # one for each group of these optimizers


@dataclass(frozen=True)
class UpdateDifference:
    """The first quantity in which the updates of two runs differ.

    The baseline and the variant are the two runs of a `RunPair`.
    """

    update: int  # the number of the update, from 1
    # "optimizers" is the number of optimizer steps in an update.
    quantity: Literal["optimizers", "learning rate", "loss", "gradients"]
    baseline: float
    variant: float

    @property
    def ratio(self) -> float:
        """The variant's value divided by the baseline's."""
        return self.variant / self.baseline if self.baseline else math.inf


def last_launches(run: ObservedRun) -> dict[int, int]:
    """Return the last launch that made each update, by the number of updates before it."""
    last_launch: dict[int, int] = {}
    for process, record in run.all(RecordedMicroBatch):
        if record.is_update:
            last_launch[record.step] = max(process.launch, last_launch.get(record.step, 0))
    return last_launch


def updates_of(run: ObservedRun) -> dict[int, Update]:
    """Return the first `UPDATES` updates of a run by number, from 1.

    Later updates are left out, because rounding moves the weights further and further apart. If a
    resumed run repeats an update, the last execution counts. Gradients and learning rates are those
    of rank 0.
    """
    updates = {}
    for step, launch in sorted(last_launches(run).items()):
        if step < UPDATES:
            updates[step + 1] = update_of_launch(run.processes_of_launch(launch), step)
    return updates


def update_of_launch(processes: Sequence[ObservedProcess], step: int) -> Update:
    """Return one update that a launch made.

    Args:
        processes: those of the launch, sorted by rank.
        step: the number of updates before this one.
    """
    losses = []
    for process in processes:
        for micro_batch in process.of(RecordedMicroBatch):
            if micro_batch.step == step:
                losses.append(micro_batch.loss)
    norms = []
    rates = []
    for optimizer_step in processes[0].of(OptimizerStep):
        if optimizer_step.step == step:
            norms.append(optimizer_step.gradient_norm)
            rates += optimizer_step.learning_rates
    return Update(
        micro_batches=sum(record.step == step for record in processes[0].of(RecordedMicroBatch)),
        loss=math.fsum(losses) / len(losses),
        gradient_norms=tuple(norms),
        learning_rates=tuple(rates),
    )


def first_differing_update(
    baseline: Mapping[int, Update],
    variant: Mapping[int, Update],
) -> UpdateDifference | None:
    """Return the first quantity in which the updates of two runs differ beyond the tolerance."""
    for number in sorted(baseline.keys() & variant.keys()):
        difference = differing_quantity(number, baseline[number], variant[number])
        if difference is not None:
            return difference
    return None


def differing_quantity(number: int, baseline: Update, variant: Update) -> UpdateDifference | None:
    """Return the first quantity in which two updates differ beyond the tolerance.

    Args:
        number: the number of the update, from 1.
    """
    steps = float(len(baseline.gradient_norms))
    variant_steps = float(len(variant.gradient_norms))
    if steps != variant_steps:
        return UpdateDifference(number, "optimizers", steps, variant_steps)
    for rate, variant_rate in zip(baseline.learning_rates, variant.learning_rates, strict=False):
        if not math.isclose(rate, variant_rate, rel_tol=RATE_TOLERANCE, abs_tol=SMALL_RATE):
            return UpdateDifference(number, "learning rate", rate, variant_rate)
    if not math.isclose(baseline.loss, variant.loss, rel_tol=LOSS_TOLERANCE, abs_tol=SMALL_LOSS):
        return UpdateDifference(number, "loss", baseline.loss, variant.loss)
    for norm, variant_norm in zip(baseline.gradient_norms, variant.gradient_norms, strict=True):
        if not math.isclose(norm, variant_norm, rel_tol=GRADIENT_TOLERANCE, abs_tol=SMALL_NORM):
            return UpdateDifference(number, "gradients", norm, variant_norm)
    return None


@dataclass(frozen=True)
class WeightDistance:
    """The distance between the weights of two runs after `updates.COMPARED_UPDATE` updates."""

    # Relative to the distance that the baseline's weights have moved; infinite if they have not.
    ratio: float
    name: str  # the parameter that differs most; empty if all are equal


def weight_distance(baseline: ObservedRun, variant: ObservedRun) -> WeightDistance | None:
    """Return the distance between two runs' weights, after the same number of updates.

    It is None if a run made too few updates to save its weights.
    """
    # Both runs begin with the same weights, so the first weights of one of them are enough.
    paths = [
        baseline.directory / FIRST_WEIGHTS,
        baseline.directory / LATER_WEIGHTS,
        variant.directory / LATER_WEIGHTS,
    ]
    if not all(path.exists() for path in paths):
        return None
    start, end, variant_end = [load_file(path) for path in paths]
    moved = 0.0  # the squared distance that the baseline's weights have moved
    apart = 0.0  # the squared distance between the weights of both runs
    largest = 0.0  # the squared distance of the parameter that differs most
    largest_name = ""
    for name, values in end.items():
        moved += float((values.double() - start[name].double()).square().sum())
        difference = float((values.double() - variant_end[name].double()).square().sum())
        apart += difference
        if difference > largest:
            largest = difference
            largest_name = name
    if not apart:
        return WeightDistance(0.0, "")
    ratio = math.sqrt(apart / moved) if moved else math.inf
    return WeightDistance(ratio, largest_name)


@dataclass(frozen=True)
class BufferDifference:
    """A buffer of a kept network in which two runs differ beyond the tolerance."""

    name: str
    # Relative to the distance that the baseline's buffer has moved; infinite if it has not.
    ratio: float


def differing_buffer(baseline: ObservedRun, variant: ObservedRun) -> BufferDifference | None:
    """Return the buffer that differs most between two runs after the same number of updates.

    It is None if no buffer differs by more than `WEIGHT_TOLERANCE`, or if a run made too few
    updates to save its buffers.
    """
    paths = [
        baseline.directory / FIRST_BUFFERS,
        baseline.directory / LATER_BUFFERS,
        variant.directory / LATER_BUFFERS,
    ]
    if not all(path.exists() for path in paths):
        return None
    start, end, variant_end = [load_file(path) for path in paths]
    largest: BufferDifference | None = None
    for name in start.keys() & end.keys() & variant_end.keys():
        first, later, other = (buffers[name].double() for buffers in (start, end, variant_end))
        if not first.shape == later.shape == other.shape:
            continue
        moved = float((later - first).norm())
        apart = float((later - other).norm())
        if apart <= WEIGHT_TOLERANCE * moved or math.isnan(apart):
            continue
        ratio = apart / moved if moved else math.inf
        if largest is None or (ratio, name) > (largest.ratio, largest.name):
            largest = BufferDifference(name, ratio)
    return largest


@dataclass(frozen=True)
class FigureDifference:
    """A figure of an evaluation in which two runs differ beyond the tolerance."""

    figure: str  # in words, such as "accuracy of the final evaluation after update 6"
    update: int  # the number of updates before the evaluation
    baseline: float
    variant: float


@dataclass(frozen=True)
class EvaluationPair:
    """The figures of the same evaluation in two runs."""

    baseline: EvaluationFigures
    variant: EvaluationFigures

    @property
    def common_names(self) -> list[str]:
        return [name for name in self.variant.figures if name in self.baseline.figures]

    @property
    def weights_and_samples(self) -> tuple[int, str]:
        """The number of updates and the split, which tell the weights and the samples."""
        return self.variant.step, self.variant.split

    @property
    def has_equal_losses(self) -> bool:
        """Whether the losses differ by rounding alone; False if the recipe returns no loss."""
        loss = self.baseline.figures.get("loss", math.nan)
        variant_loss = self.variant.figures.get("loss", math.nan)
        return math.isclose(loss, variant_loss, rel_tol=ROUNDING_OF_LOSS)

    def differs(self, name: str, tolerance: float) -> bool:
        """Whether a figure differs by more than `FIGURE_TOLERANCE` and an absolute tolerance."""
        value = self.variant.figures[name]
        expected = self.baseline.figures[name]
        relative = FIGURE_TOLERANCE * max(abs(value), abs(expected))
        return abs(value - expected) > relative + tolerance

    def difference(self, name: str) -> FigureDifference:
        figure = f"{name} of the {self.variant.phase} evaluation after update {self.variant.step}"
        return FigureDifference(
            figure, self.variant.step, self.baseline.figures[name], self.variant.figures[name]
        )


def differing_figure(
    baseline: ObservedRun, variant: ObservedRun, last_step: int | None = None
) -> FigureDifference | None:
    """Return the first evaluation figure that differs.

    The result is None if all figures agree within the tolerance. Figures that only one run has are
    left out.

    Args:
        last_step: evaluations after more updates than this are left out; None: all count.
    """
    pairs = paired_evaluations(baseline, variant, last_step)
    for pair in pairs:
        # Rounding may put a few samples into another class.
        tolerance = MAX_FLIPPED_SAMPLES / pair.variant.sample_count
        for name in pair.common_names:
            if pair.differs(name, tolerance):
                return pair.difference(name)
    return figure_that_differs_again(pairs)


def figure_that_differs_again(pairs: Sequence[EvaluationPair]) -> FigureDifference | None:
    """Return the first figure that differs in two evaluations by more than `FIGURE_TOLERANCE`.

    Only evaluations whose losses agree to the last digits count. A sample hardly ever gets into
    another class there, and even less so in two evaluations of other weights or samples.
    """
    first_pairs: dict[str, EvaluationPair] = {}
    for pair in pairs:
        if not pair.has_equal_losses:
            continue
        for name in pair.common_names:
            if not pair.differs(name, SMALL_FIGURE):
                continue
            first = first_pairs.setdefault(name, pair)
            if first.weights_and_samples != pair.weights_and_samples:
                return first.difference(name)
    return None


def paired_evaluations(
    baseline: ObservedRun, variant: ObservedRun, last_step: int | None
) -> list[EvaluationPair]:
    """Return the evaluations that both runs have made, up to `last_step` updates."""
    baseline_evaluations = evaluations_of(baseline)
    pairs = []
    for key, evaluation in evaluations_of(variant).items():
        is_too_late = last_step is not None and evaluation.step > last_step
        if key in baseline_evaluations and not is_too_late:
            pairs.append(EvaluationPair(baseline_evaluations[key], evaluation))
    return pairs


def evaluations_of(run: ObservedRun) -> dict[tuple[int, str], EvaluationFigures]:
    """Return the evaluations by the number of updates before them and by phase.

    All ranks have the same figures, so those of rank 0 are enough. If a resumed run repeats an
    evaluation, the last one counts.
    """
    return {
        (record.step, record.phase): record
        for process, record in run.all(EvaluationFigures)
        if process.rank == 0
    }
