"""Checks that two processes make the same updates as one, also after a resume on another number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from common.tools.launching.command import FSDP2_VARIABLES
from common.tools.prove.bench import Bench, RunFailedError
from common.tools.prove.causes import causes_of_restored_parts
from common.tools.prove.checks import accumulation
from common.tools.prove.comparison import (
    UpdateLayout,
    UpdateLayouts,
    drawn_generators,
    mixing_modules_of,
    run_with_layout,
    sample_mixing_of,
    update_layouts,
)
from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.launch_plan import PlannedInterruption
from common.tools.prove.pairs import (
    RunPair,
    cause_of_contents,
    cause_of_figures,
    cause_of_later_loss,
    cause_of_optimizers,
    cause_of_weights,
    comparison_in_words,
    is_near,
    values_in_words,
)
from common.tools.prove.records.instrument_records import SampleMixing
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.verdicts import Cause, Check, Verdict, failed_verdict, skipped_verdict

STOPPED_AFTER = COMPARED_UPDATE - 1  # the resumed run makes the compared update
KILLED_AFTER = COMPARED_UPDATE + 2  # later than the checkpoint after update 3
NOT_RESUMED = (
    "no resume on another number of processes was compared, because one process makes an update of "
    "a single batch, which two can't divide"
)


class NoFloat64Error(Exception):
    """A recipe with batch norm fails in float64 alone. The message says how."""


class LayoutOptions(TypedDict, total=False):
    """The options of `run_with_layout` that do not depend on the precision."""

    interruptions: tuple[PlannedInterruption, ...]
    resumed_processes: int | None
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ProcessCountChange:
    """A run that is resumed on a different number of processes after an interruption."""

    name: str  # the name of the run
    interruption: PlannedInterruption
    processes: int  # the number of processes of the first launch
    resumed_processes: int
    phrase: str  # the change in words


PROCESS_COUNT_CHANGES = (
    ProcessCountChange(
        "from-one-to-two",
        PlannedInterruption(manner="stop", step=STOPPED_AFTER),
        1,
        2,
        f"a run stopped on one process after update {STOPPED_AFTER} and resumed on two",
    ),
    ProcessCountChange(
        "from-two-to-one",
        PlannedInterruption(manner="update", step=KILLED_AFTER),
        2,
        1,
        f"a run killed on two processes after update {KILLED_AFTER} and resumed on one",
    ),
)


def judge_processes(bench: Bench) -> Verdict:
    """Compare a run on one process with one on two, and with runs that change the number."""
    layouts = update_layouts(bench)
    try:
        distributed, in_float64 = run_on_two(bench, "two-processes", layouts.distributed)
        mixing = sample_mixing_of(distributed)
        single, single_layout = run_on_one(bench, layouts, mixing, in_float64)
    except NoFloat64Error as problem:
        return skipped_verdict(str(problem))
    pair = RunPair(single, distributed, single_layout, layouts.distributed)
    verdict = verdict_of(pair)
    if verdict.passed is False and not in_float64:
        return verdict_with_accumulation(bench, pair, verdict)
    if not verdict.passed:
        return verdict
    if single_layout.accumulation == 1:
        return Verdict(True, f"{verdict.compared}; {NOT_RESUMED}")
    compared = [verdict.compared]
    for change in PROCESS_COUNT_CHANGES:
        first_layout = layouts.distributed if change.processes > 1 else single_layout
        try:
            changed_run = run_with_change(bench, change, first_layout, in_float64)
        except NoFloat64Error as problem:
            return skipped_verdict(f"{change.phrase}: {problem}")
        # In each of these runs, two processes make the compared update.
        pair = RunPair(single, changed_run, single_layout, layouts.distributed)
        verdict = verdict_of(pair)
        if not verdict.passed:
            return verdict_about(change, verdict, causes_of_restored_parts(changed_run))
        compared.append(change.phrase)
    return Verdict(True, "; ".join(compared))


def verdict_with_accumulation(bench: Bench, pair: RunPair, verdict: Verdict) -> Verdict:
    """Return a failed verdict, with the causes that lie in the accumulation on one process.

    If the micro-batches of one process do not make the updates of a whole batch, they say nothing
    about two processes.

    Args:
        pair: a run on one process and one on two.
        verdict: the verdict on them, which fails.
    """
    if pair.baseline_layout.accumulation == 1:
        return verdict
    whole_layout = update_layouts(bench).whole
    try:
        whole = run_with_layout(bench, "whole", whole_layout)
    except RunFailedError:
        return verdict
    accumulated = accumulation.verdict_of(
        RunPair(whole, pair.baseline, whole_layout, pair.baseline_layout)
    )
    if accumulated.passed is not False:
        return verdict
    causes = [
        f"on one process already, as the check `accumulation` compares it: {cause}"
        for cause in accumulated.causes
    ]
    return Verdict(False, verdict.compared, tuple(causes), accumulated.advice)


def run_with_change(
    bench: Bench, change: ProcessCountChange, first_layout: UpdateLayout, in_float64: bool
) -> ObservedRun:
    """Return a run that is interrupted, and resumed on another number of processes.

    Args:
        first_layout: the layout of the run's updates before the interruption.

    Raises:
        NoFloat64Error: the run fails in float64 alone.
        RunFailedError: the run fails in fp32.
    """
    return run_in_precision(
        bench,
        change.name,
        first_layout,
        in_float64,
        interruptions=(change.interruption,),
        resumed_processes=change.resumed_processes,
    )


def verdict_about(
    change: ProcessCountChange, verdict: Verdict, restored_parts: Sequence[Cause]
) -> Verdict:
    """Return a verdict on a change of the number of processes, whose texts begin with the change.

    Args:
        verdict: the verdict on the updates after the change. It fails, or the check does not apply.
        restored_parts: the causes why the resume began with another state than was saved. If the
            verdict fails, they come first.
    """
    sentences = [*verdict.causes]
    advice = verdict.advice
    if verdict.passed is False and restored_parts:
        sentences = [*(cause.sentence for cause in restored_parts), *sentences]
        advice = restored_parts[0].advice
    return Verdict(
        verdict.passed,
        f"{change.phrase}: {verdict.compared}",
        tuple(f"{change.phrase}: {sentence}" for sentence in sentences),
        advice,
    )


def judge_sharded_processes(bench: Bench) -> Verdict:
    """Compare one process with two that shard the weights with FSDP2."""
    layouts = update_layouts(bench)
    environment = tuple(FSDP2_VARIABLES.items())
    try:
        sharded, in_float64 = run_on_two(bench, "sharded", layouts.distributed, environment)
        single, layout = run_on_one(bench, layouts, sample_mixing_of(sharded), in_float64)
    except NoFloat64Error as problem:
        return skipped_verdict(str(problem))
    pair = RunPair(single, sharded, layout, layouts.distributed)
    verdict = verdict_of(pair)
    if verdict.passed is False and not in_float64:
        return verdict_with_accumulation(bench, pair, verdict)
    return verdict


def run_on_two(
    bench: Bench,
    name: str,
    layout: UpdateLayout,
    environment: tuple[tuple[str, str], ...] = (),
) -> tuple[ObservedRun, bool]:
    """Return the run on two processes, and whether it was computed in float64.

    Batch norm amplifies rounding, so a model with batch norm is compared in float64.

    Raises:
        NoFloat64Error: the model has batch norm, and the run fails in float64 alone.
        RunFailedError: the run fails in fp32.
    """
    run = run_with_layout(bench, name, layout, environment=environment)
    mixing = sample_mixing_of(run)
    if not mixing.layers or reason_to_skip(mixing) is not None:
        return run, False
    return run_in_float64(bench, name, layout, environment=environment), True


def run_in_precision(
    bench: Bench,
    name: str,
    layout: UpdateLayout,
    in_float64: bool,
    **options: Unpack[LayoutOptions],
) -> ObservedRun:
    """Return a run in float64 or in fp32; see `run_in_float64` for the errors."""
    if in_float64:
        return run_in_float64(bench, name, layout, **options)
    return run_with_layout(bench, name, layout, **options)


def run_in_float64(
    bench: Bench, name: str, layout: UpdateLayout, **options: Unpack[LayoutOptions]
) -> ObservedRun:
    """Return a run in float64; see `run_with_layout`.

    Raises:
        NoFloat64Error: the run fails in float64 alone.
        RunFailedError: the run fails in fp32, too.
    """
    try:
        return run_with_layout(bench, name, layout, in_float64=True, **options)
    except RunFailedError as problem:
        run_with_layout(bench, name, layout, **options)  # raises an error if it fails in fp32, too
        raise NoFloat64Error(
            "batch norm amplifies rounding, so the updates have to be compared in float64, in "
            f"which the recipe fails: {problem}"
        ) from problem


def run_on_one(
    bench: Bench, layouts: UpdateLayouts, mixing: SampleMixing, in_float64: bool
) -> tuple[ObservedRun, UpdateLayout]:
    """Return the run on one process that is the baseline for two processes, and its layout.

    A loss that compares samples with each other needs a larger batch instead of accumulation.
    """
    name = "divided"
    layout = layouts.divided
    if mixing.couples_samples:
        name = "whole"
        layout = layouts.whole
    return run_in_precision(bench, name, layout, in_float64), layout


def reason_to_skip(mixing: SampleMixing) -> str | None:
    """Return why one process and two must make different updates; None if they need not."""
    if "SyncBatchNorm" in mixing.layers:
        return "SyncBatchNorm mixes the samples of all processes"
    if mixing.layers and mixing.couples_samples:
        layers = " and ".join(mixing.layers)
        return (
            f"the loss compares samples with each other, so one process needs a larger batch, in "
            f"which {layers} has other statistics"
        )
    return None


def verdict_of(pair: RunPair) -> Verdict:
    """Return the verdict on a run on two processes (the variant), compared with one on one."""
    mixing = sample_mixing_of(pair.variant)
    reason = reason_to_skip(mixing)
    if reason is not None:
        return skipped_verdict(reason)
    mixing_modules = mixing_modules_of(pair.variant)
    cause = cause_of(pair)
    if cause is None and not mixing.layers and not mixing_modules:
        cause = cause_of_figures(pair)
    compared = comparison_in_words(pair)
    if mixing_modules:
        compared += (
            f"; {' and '.join(mixing_modules)} may also mix the samples of an evaluation's batch, "
            "so evaluations are not compared"
        )
    if mixing.layers:
        layers = " and ".join(mixing.layers)
        compared += (
            f"; in float64, as {layers} amplifies rounding; {layers} averages its statistics over "
            "processes, so evaluations are not compared"
        )
    if cause is None:
        return Verdict(True, compared)
    generators = drawn_generators(pair.variant)
    if generators:
        names = " and ".join(generators)
        return skipped_verdict(f"the loop draws random numbers on each process (generator {names})")
    return failed_verdict(compared, [cause_of_contents(pair) or cause])


def cause_of(pair: RunPair) -> Cause | None:
    """Return the cause that two processes make different updates from one; None if they agree."""
    difference = pair.first_difference()
    if difference is None:
        return cause_of_weights(pair)
    values = values_in_words(pair, difference)
    if difference.quantity == "optimizers":
        return cause_of_optimizers(pair, difference)
    if difference.quantity == "learning rate":
        return Cause(
            f"the learning rate of update {difference.update} is {values}: a schedule depends on "
            "the number of processes or of micro-batches",
            "pass the scheduler to accelerator.prepare(...), which steps it once an update",
        )
    if difference.quantity == "gradients":
        sentence = f"the gradients of update {difference.update} have the norm {values}"
        ratio = difference.ratio
        if sample_mixing_of(pair.variant).couples_samples:
            return Cause(
                f"{sentence}, {ratio:.2f} times as large: the loss of a process compares only "
                "its own samples, or counts those of others several times",
                "gather the rows of all processes by run.gather(rows), and take the mean",
            )
        return cause_of_ratio(sentence, ratio)
    if difference.update > 1:
        return cause_of_later_loss(pair, difference)
    return Cause(
        f"the loss of update 1 is {values}, before any weight has changed: the loss that is "
        "recorded is not a mean over the samples of a process",
        "pass run.record the mean loss of the process's own samples; the run averages it over "
        "processes",
    )


def cause_of_ratio(sentence: str, ratio: float) -> Cause:
    """Return the cause of gradients that are too large or too small on two processes."""
    if is_near(ratio, 0.5):
        return Cause(
            f"{sentence}, half as large: on one process, the loss is not divided by the number of "
            "micro-batches",
            "call accelerator.backward(loss), which divides it; loss.backward() does not",
        )
    if is_near(ratio, 2):
        return Cause(
            f"{sentence}, twice as large: the gradients of the processes are added up",
            "leave the mean over processes to the prepared model, and do not multiply the loss by "
            "their number",
        )
    return Cause(
        f"{sentence}, {ratio:.2f} times as large, for the same samples and weights",
        "call the model that accelerator.prepare(...) returned, and compute the loss as a mean "
        "over the samples of the process",
    )


CHECK = Check(
    "processes",
    "two processes make the same updates as one, also after a resume if it accumulates batches",
    judge_processes,
    compares_runs=True,
)
SHARDED_CHECK = Check(
    "sharded",
    "two processes that divide the weights among them by FSDP2 make the same updates as one",
    judge_sharded_processes,
    compares_runs=True,
    is_optional=True,
)
