"""Checks that two processes make the same updates as one, also after a resume on another number."""

from collections.abc import Sequence

from common.tools.launching.command import FSDP2_VARIABLES
from common.tools.prove.checks import accumulation
from common.tools.prove.checks.base import Check
from common.tools.prove.exact_comparison.causes import causes_of_restored_parts
from common.tools.prove.layouts.expected_differences import (
    drawn_generators,
    mixing_modules_of,
    reason_processes_differ,
    sample_mixing_of,
)
from common.tools.prove.layouts.pairs import (
    RunPair,
    cause_in_batches,
    cause_of_drawing_collate,
    cause_of_independent_figures,
    cause_of_later_loss,
    cause_of_optimizers,
    cause_of_weights,
    comparison_in_words,
    is_near,
    note_on_buffer,
    values_in_words,
    verdict_on_updates_and_figures,
)
from common.tools.prove.layouts.process_runs import (
    PROCESS_COUNT_CHANGES,
    NoFloat64Error,
    ProcessCountChange,
    ProcessRuns,
    runs_on_one_and_two,
)
from common.tools.prove.proof_runs.bench import Bench, RunFailedError
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict, skipped_verdict

NOT_RESUMED = (
    "no resume on another number of processes was compared, because one process makes an update of "
    "a single batch, which two can't divide"
)


def judge_processes(bench: Bench) -> Verdict:
    """Compare a run on one process with one on two, and with runs that change the number."""
    try:
        runs = runs_on_one_and_two(bench, "two-processes")
    except NoFloat64Error as problem:
        return skipped_verdict(str(problem))
    verdict = verdict_of_runs(runs)
    if not verdict.passed:
        return verdict
    if not runs.accumulates:
        return Verdict(True, f"{verdict.compared}; {NOT_RESUMED}")
    compared = [verdict.compared]
    for change in PROCESS_COUNT_CHANGES:
        verdict = verdict_after_change(runs, change)
        if not verdict.passed:
            return verdict
        compared.append(change.phrase)
    return Verdict(True, "; ".join(compared))


def judge_sharded_processes(bench: Bench) -> Verdict:
    """Compare one process with two that shard the weights with FSDP2."""
    try:
        runs = runs_on_one_and_two(bench, "sharded", tuple(FSDP2_VARIABLES.items()))
    except NoFloat64Error as problem:
        return skipped_verdict(str(problem))
    return verdict_of_runs(runs)


def verdict_of_runs(runs: ProcessRuns) -> Verdict:
    """Return the verdict on a run on one process and one on two.

    The run on one process accumulates micro-batches. If its updates already differ from those of
    whole batches, the mistake is in the accumulation, and the comparison says nothing about two
    processes. The verdict then has the causes of the check `accumulation`.
    """
    verdict = verdict_of(runs.pair)
    if verdict.passed is not False or runs.in_float64 or not runs.accumulates:
        return verdict
    try:
        one_process = runs.pair_with_whole_batches()
    except RunFailedError:
        return verdict
    accumulated = accumulation.verdict_of(one_process)
    if accumulated.passed is not False:
        return verdict
    causes = [
        Cause(
            f"on one process already, as the check `accumulation` compares it: {sentence}",
            accumulated.advice,
        )
        for sentence in accumulated.causes
    ]
    # Figures that one process already gets wrong are among these causes, or follow from them.
    are_figures_known = (
        cause_of_independent_figures(one_process) is not None
        or cause_of_drawing_collate(one_process.variant) is not None
    )
    wrong_figures = None if are_figures_known else cause_of_evaluations(runs.pair)
    return verdict_on_updates_and_figures(verdict.compared, causes, wrong_figures)


def verdict_after_change(runs: ProcessRuns, change: ProcessCountChange) -> Verdict:
    """Return the verdict on a run that is resumed on another number of processes."""
    try:
        pair = runs.pair_with_change(change)
    except NoFloat64Error as problem:
        return skipped_verdict(f"{change.phrase}: {problem}")
    verdict = verdict_of(pair)
    if verdict.passed:
        return verdict
    return named_after_change(change, verdict, causes_of_restored_parts(pair.variant))


def named_after_change(
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


def verdict_of(pair: RunPair) -> Verdict:
    """Return the verdict on a run on two processes (the variant), compared with one on one."""
    reason = reason_processes_differ(sample_mixing_of(pair.variant))
    if reason is not None:
        return skipped_verdict(reason)
    compared = compared_in_words(pair)
    update_cause = cause_of(pair)
    wrong_figures = cause_of_evaluations(pair)
    if update_cause is None and wrong_figures is None:
        return Verdict(True, compared + note_on_buffer(pair))
    generators = drawn_generators(pair.variant)
    if generators:
        names = " and ".join(generators)
        return skipped_verdict(f"the loop draws random numbers on each process (generator {names})")
    batch_cause = cause_in_batches(pair)
    if batch_cause is not None:
        return failed_verdict(compared, [batch_cause])
    update_causes = [] if update_cause is None else [update_cause]
    return verdict_on_updates_and_figures(compared, update_causes, wrong_figures)


def compared_in_words(pair: RunPair) -> str:
    """Return what was compared, and why evaluations were not, if so."""
    compared = comparison_in_words(pair)
    mixing_modules = mixing_modules_of(pair.variant)
    if mixing_modules:
        compared += (
            f"; {' and '.join(mixing_modules)} may also mix the samples of an evaluation's batch, "
            "so evaluations are not compared"
        )
    mixing_layers = sample_mixing_of(pair.variant).batch_norms
    if mixing_layers:
        layers = " and ".join(mixing_layers)
        compared += (
            f"; in float64, as {layers} amplifies rounding; {layers} averages its statistics over "
            "processes, so evaluations are not compared"
        )
    return compared


def cause_of_evaluations(pair: RunPair) -> Cause | None:
    """Return the cause of wrong figures that do not follow from wrong updates; None without any.

    Evaluations that mix the samples of a batch are not compared.
    """
    if sample_mixing_of(pair.variant).batch_norms or mixing_modules_of(pair.variant):
        return None
    return cause_of_independent_figures(pair)


def cause_of(pair: RunPair) -> Cause | None:
    """Return the cause that two processes make different updates from one; None if they agree."""
    difference = pair.difference
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
