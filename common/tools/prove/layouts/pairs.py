"""Pairs of runs that should make the same updates, and causes for differences in a pair.

The checks of accumulation and of processes compare such pairs, and share these causes.
"""

import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.layouts.compared_runs import UpdateLayout
from common.tools.prove.layouts.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    SMALL_NORM,
    WEIGHT_TOLERANCE,
    Update,
    UpdateDifference,
    differing_buffer,
    differing_figure,
    first_differing_update,
    updates_of,
    weight_distance,
)
from common.tools.prove.layouts.expected_differences import generators_drawn_in_collate
from common.tools.prove.records.instrument_records import GradientChange
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import EvaluationBatch, MicroBatch
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict

# Relative. Within it, a ratio of gradient norms counts as equal to a number.
RATIO_TOLERANCE = 0.02
# Relative. Rounding makes gradient norms differ by less.
LARGEST_ROUNDING = 1e-4


@dataclass(frozen=True)
class RunPair:
    """Two runs that should make the same updates, and the layout of each.

    The variant divides its updates into more micro-batches, or among more processes. If the
    two differ, the baseline is taken to be right.
    """

    baseline: ObservedRun
    variant: ObservedRun
    baseline_layout: UpdateLayout
    variant_layout: UpdateLayout

    @cached_property
    def baseline_updates(self) -> Mapping[int, Update]:
        return updates_of(self.baseline)

    @cached_property
    def variant_updates(self) -> Mapping[int, Update]:
        return updates_of(self.variant)

    @cached_property
    def difference(self) -> UpdateDifference | None:
        """The first difference of the updates beyond the tolerance; None if they agree."""
        return first_differing_update(self.baseline_updates, self.variant_updates)


def comparison_in_words(pair: RunPair) -> str:
    """Return how many updates were compared, in which layouts, and with which tolerances."""
    update_count = len(pair.baseline_updates.keys() & pair.variant_updates.keys())
    layouts = f"{pair.variant_layout} against {pair.baseline_layout}"
    tolerances = (
        f"tolerance: losses {LOSS_TOLERANCE:.1%}, gradients {GRADIENT_TOLERANCE:.0%}, weights "
        f"{WEIGHT_TOLERANCE:.0%} of the distance that they moved up to update {COMPARED_UPDATE}"
    )
    return f"{update_count} updates, {layouts} ({tolerances})"


def values_in_words(pair: RunPair, difference: UpdateDifference) -> str:
    """Return both values of a difference, with the layouts that gave them."""
    return (
        f"{difference.variant:.6g} with {pair.variant_layout} and {difference.baseline:.6g} with "
        f"{pair.baseline_layout}"
    )


def is_near(ratio: float, number: float) -> bool:
    """Whether a ratio equals a number, within `RATIO_TOLERANCE`."""
    return math.isclose(ratio, number, rel_tol=RATIO_TOLERANCE)


def cause_of_optimizers(pair: RunPair, difference: UpdateDifference) -> Cause:
    """Return the cause that an update has too many optimizer steps."""
    values = values_in_words(pair, difference)
    return Cause(
        f"the optimizers' steps in update {difference.update} are {values}: an "
        "optimizer is stepped for each micro-batch",
        "pass each optimizer to accelerator.prepare(...), which steps it once an update",
    )


def cause_of_contents(pair: RunPair) -> Cause | None:
    """Return the cause that a batch of the same samples has other contents; None if none has.

    Only batches with the same samples in the same order can be compared.
    """
    baseline_batches = batches_by_samples(pair.baseline)
    for key, batch in batches_by_samples(pair.variant).items():
        baseline_batch = baseline_batches.get(key)
        if baseline_batch is None:
            continue
        if batch.batch_digest != baseline_batch.batch_digest:
            return Cause(
                f"the contents of a training batch of update {batch.step + 1} differ between "
                f"{pair.variant_layout} and {pair.baseline_layout}, although its samples are the "
                "same",
                "let the contents of a sample depend on its index and config.seed alone, and on no "
                "rank, clock, process id, hash of a text or order of a set; the check `repeatable` "
                "names a value that differs between two runs of the same command",
            )
    return None


def cause_of_drawing_collate(run: ObservedRun) -> Cause | None:
    """Return the cause that a collate function draws random numbers; None if it does not.

    The contents of a sample then depend on the others of its batch, so neither losses nor figures
    can agree between two layouts.
    """
    generators = generators_drawn_in_collate(run)
    if not generators:
        return None
    return Cause(
        f"collate_fn draws random numbers (generator {' and '.join(generators)}), so the contents "
        "of a sample depend on the other samples of its batch, and losses and figures change with "
        "the batch size",
        "draw them in __getitem__: the random generators are seeded before each sample",
    )


def cause_in_batches(pair: RunPair) -> Cause | None:
    """Return the cause that the two runs train on other contents of batches; None if none is known.

    Their evaluations may then have other contents as well.
    """
    return cause_of_contents(pair) or cause_of_drawing_collate(pair.variant)


def batches_by_samples(run: ObservedRun) -> dict[tuple[int, tuple[int, ...]], MicroBatch]:
    """Return the first micro-batch of each epoch and list of samples, by these two."""
    batches: dict[tuple[int, tuple[int, ...]], MicroBatch] = {}
    for _, record in run.all(MicroBatch):
        key = (record.epoch, tuple(record.sample_indices))
        batches.setdefault(key, record)
    return batches


def cause_of_changed_gradients(run: ObservedRun) -> Cause | None:
    """Return the cause that a loop changes gradients while they still add up; None if it does not.

    Args:
        run: a run with several micro-batches in each update.
    """
    for _, change in run.all(GradientChange):
        moment = (
            f"between micro-batches {change.micro_batch + 1} and {change.micro_batch + 2} of "
            f"update {change.step + 1}"
        )
        if change.norm_after == 0:
            return Cause(
                f"the gradients are cleared {moment}, before they are used",
                "pass each optimizer to accelerator.prepare(...), whose zero_grad() clears them "
                "once an update, or clear them under `if accelerator.sync_gradients:`",
            )
        norms = f"from the norm {change.norm_before:.6g} to {change.norm_after:.6g}"
        if change.clipping_file:
            text = linecache.getline(change.clipping_file, change.clipping_line).strip()
            place = f"{Path(change.clipping_file).name}, line {change.clipping_line}"
            return Cause(
                f"{place}, clips the gradients {norms} {moment}, before the accumulation ends: "
                f"{text}",
                "clip only `if accelerator.sync_gradients:`, with "
                "run.clip_grad_norm_(model, optimizer)",
            )
        return Cause(
            f"the gradients are changed {norms} {moment}, outside of a backward pass and before "
            "the accumulation ends",
            "change gradients only `if accelerator.sync_gradients:`",
        )
    return None


def gradient_difference(pair: RunPair, last_update: int) -> float:
    """Return the largest relative difference of gradient norms up to an update."""
    largest = 0.0
    for number in pair.baseline_updates.keys() & pair.variant_updates.keys():
        if number > last_update:
            continue
        norms = pair.baseline_updates[number].gradient_norms
        variant_norms = pair.variant_updates[number].gradient_norms
        for norm, variant_norm in zip(norms, variant_norms, strict=False):
            if norm > SMALL_NORM:
                largest = max(largest, abs(variant_norm - norm) / norm)
    return largest


def buffer_in_words(pair: RunPair) -> str | None:
    """Return that a buffer of a kept network differs, and by how much; None if none does."""
    difference = differing_buffer(pair.baseline, pair.variant)
    if difference is None:
        return None
    if math.isinf(difference.ratio):
        return f"the buffer {difference.name} has changed in only one of the runs"
    return (
        f"the buffer {difference.name} differs by {difference.ratio:.0%} of its change up to "
        f"update {COMPARED_UPDATE}"
    )


def note_on_buffer(pair: RunPair) -> str:
    """Return the end of a verdict that passes, although a buffer differs; empty if none does."""
    buffer = buffer_in_words(pair)
    return f"; {buffer}, although the updates agree" if buffer else ""


def cause_with_buffer(pair: RunPair, cause: Cause) -> Cause:
    """Return a cause that also names a buffer that differs; the same cause if none does."""
    buffer = buffer_in_words(pair)
    if buffer is None:
        return cause
    return Cause(
        f"{cause.sentence}; {buffer}, which may be the reason",
        "change the buffer once an update, `if accelerator.sync_gradients:`, by the samples of all "
        "its micro-batches and of all processes (run.gather(rows) returns those of all processes); "
        f"if the buffer is not the reason, {cause.advice}",
    )


def cause_of_later_loss(pair: RunPair, difference: UpdateDifference) -> Cause:
    """Return the cause of a loss that differs although all earlier gradients agreed."""
    values = values_in_words(pair, difference)
    earlier_difference = gradient_difference(pair, difference.update - 1)
    if earlier_difference > LARGEST_ROUNDING:
        cause = Cause(
            f"the loss of update {difference.update} is {values}, after gradients whose norms "
            f"differed by up to {earlier_difference:.2%}, which is more than rounding",
            "compute the loss as a mean over the samples of the micro-batch; if it is one, look "
            "for a value that changes with each micro-batch and enters the loss or the update",
        )
        return cause_with_buffer(pair, cause)
    cause = Cause(
        f"the loss of update {difference.update} is {values}, after gradients that agreed within "
        "the tolerance: an update depends on more than the gradients",
        "look for a value that changes with each micro-batch and enters the loss or the update",
    )
    return cause_with_buffer(pair, cause)


def cause_of_weights(pair: RunPair) -> Cause | None:
    """Return the cause of weights that differ although the updates agree.

    The result is None if the weights agree too, or if a run has not saved them.
    """
    distance = weight_distance(pair.baseline, pair.variant)
    if distance is None or distance.ratio <= WEIGHT_TOLERANCE:
        return None
    sentence = (
        f"the weights after update {COMPARED_UPDATE} differ by {distance.ratio:.1%} of the "
        f"distance that they moved, most in {distance.name}"
    )
    norm_difference = gradient_difference(pair, COMPARED_UPDATE)
    if norm_difference > LARGEST_ROUNDING:
        return Cause(
            f"{sentence}, and the norms of the gradients by up to {norm_difference:.2%}, which is "
            "more than rounding",
            "compute the loss as a mean over the samples of the micro-batch; if it is one, look "
            "for code outside the optimizer that changes weights",
        )
    return Cause(
        sentence,
        "look for code outside the optimizer that changes weights, such as an average that "
        "is updated for each micro-batch: do that under `if accelerator.sync_gradients:`",
    )


def cause_of_figures(pair: RunPair, last_step: int | None = None) -> Cause | None:
    """Return the cause of a figure that differs for equal weights; None if all figures agree.

    Args:
        last_step: the number of updates after which both runs still have equal weights; None: they
            always have.
    """
    difference = differing_figure(pair.baseline, pair.variant, last_step)
    if difference is None:
        return None
    baseline_batch = largest_evaluation_batch(pair.baseline)
    variant_batch = largest_evaluation_batch(pair.variant)
    if baseline_batch == variant_batch:
        sentence = (
            f"{difference.figure} is {difference.variant:.6g} with {pair.variant_layout} and "
            f"{difference.baseline:.6g} with {pair.baseline_layout}, for the same weights: it "
            "depends on how samples are divided into batches"
        )
    else:
        sentence = (
            f"{difference.figure} is {difference.variant:.6g} in batches of {variant_batch} and "
            f"{difference.baseline:.6g} in batches of {baseline_batch}, for the same weights: it "
            "changes with the batch size, as a mean over batches does"
        )
    cause = Cause(
        sentence,
        "add up over samples, as Sums does, and not over batches: pass totals to sums.add(...), "
        "and compute the figure from them; for a figure that is no function of totals, such as an "
        "average precision, gather the values of the whole split from all processes by "
        "sums.collect(...)",
    )
    return cause if difference.update == 0 else cause_with_buffer(pair, cause)


def largest_evaluation_batch(run: ObservedRun) -> int:
    """Return the number of samples in the largest batch of an evaluation; 0 without any."""
    sizes = [len(record.sample_indices) for _, record in run.all(EvaluationBatch)]
    return max(sizes, default=0)


def cause_of_independent_figures(pair: RunPair) -> Cause | None:
    """Return the cause of wrong figures that do not follow from wrong updates; None without any.

    If an update differs, only the evaluations before it are compared. If the weights differ
    although the updates agree, only the evaluation before the first update is compared.
    """
    if pair.difference is not None:
        return cause_of_figures(pair, last_step=pair.difference.update - 1)
    return cause_of_figures(pair, last_step=None if cause_of_weights(pair) is None else 0)


def verdict_on_updates_and_figures(
    compared: str, update_causes: Sequence[Cause], wrong_figures: Cause | None
) -> Verdict:
    """Return the verdict of a check that fails, with the advice for updates and for figures.

    Args:
        compared: see `Verdict`.
        update_causes: why the updates differ; empty if they agree.
        wrong_figures: the result of `cause_of_independent_figures`.
    """
    if wrong_figures is None or not update_causes:
        causes = [*update_causes] if wrong_figures is None else [wrong_figures]
        return failed_verdict(compared, causes)
    first, *others = update_causes
    advice = f"{first.advice}; for the evaluation, {wrong_figures.advice}"
    return failed_verdict(compared, [Cause(first.sentence, advice), *others, wrong_figures])
