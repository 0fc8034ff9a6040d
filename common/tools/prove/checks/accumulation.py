"""Checks that n micro-batches of b samples make the same update as one of n × b."""

from common.tools.prove.checks.base import Check
from common.tools.prove.layouts.compared_runs import (
    run_of_whole_batches,
    run_with_layout,
    update_layouts,
)
from common.tools.prove.layouts.expected_differences import (
    drawn_generators,
    mixing_modules_of,
    sample_mixing_of,
)
from common.tools.prove.layouts.loss_divisors import cause_of_divisor
from common.tools.prove.layouts.pairs import (
    RunPair,
    cause_in_batches,
    cause_of_changed_gradients,
    cause_of_independent_figures,
    cause_of_later_loss,
    cause_of_optimizers,
    cause_of_weights,
    cause_with_buffer,
    comparison_in_words,
    is_near,
    note_on_buffer,
    values_in_words,
    verdict_on_updates_and_figures,
)
from common.tools.prove.proof_runs.bench import Bench
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict, skipped_verdict


def judge_accumulation(bench: Bench) -> Verdict:
    """Launch a run of whole batches and one of micro-batches, and compare them."""
    layouts = update_layouts(bench)
    pair = RunPair(
        run_of_whole_batches(bench),
        run_with_layout(bench, "divided", layouts.divided),
        layouts.whole,
        layouts.divided,
    )
    return verdict_of(pair)


def verdict_of(pair: RunPair) -> Verdict:
    """Compare a run of whole batches with one of micro-batches."""
    compared = comparison_in_words(pair)
    # These mistakes can be seen even if the samples of a micro-batch are mixed.
    cause = cause_of_counts(pair) or cause_of_steps(pair)
    if cause is not None:
        return failed_verdict(compared, [cause])
    mixing = sample_mixing_of(pair.variant)
    if mixing.batch_norms:
        return skipped_verdict(
            f"{' and '.join(mixing.batch_norms)} mixes the samples of a micro-batch"
        )
    if mixing.couples_samples:
        return skipped_verdict("the recipe states couples_samples=True")
    update_cause = cause_of_loss_or_gradients(pair) or cause_of_weights(pair)
    wrong_figures = cause_of_independent_figures(pair)
    if update_cause is None and wrong_figures is None:
        return Verdict(True, compared + note_on_buffer(pair))
    mixing_modules = mixing_modules_of(pair.variant)
    if mixing_modules:
        return skipped_verdict(
            f"the updates differ, and {' and '.join(mixing_modules)} mixes the samples of a "
            "micro-batch"
        )
    generators = drawn_generators(pair.variant)
    if generators:
        names = " and ".join(generators)
        return skipped_verdict(
            f"the loop draws random numbers for each micro-batch (generator {names})"
        )
    batch_cause = cause_in_batches(pair)
    if batch_cause is not None:
        return failed_verdict(compared, [batch_cause])
    update_causes = []
    if update_cause is not None:
        update_causes = [
            cause_of_changed_gradients(pair.variant) or cause_of_divisor(pair) or update_cause
        ]
    return verdict_on_updates_and_figures(compared, update_causes, wrong_figures)


def cause_of_counts(pair: RunPair) -> Cause | None:
    """Return the cause of a wrong number of micro-batches in an update; None if it is correct."""
    layout = pair.variant_layout
    for number, update in pair.variant_updates.items():
        if update.micro_batches != layout.accumulation:
            return Cause(
                f"update {number} used {update.micro_batches} micro-batch(es) of "
                f"{layout.batch_size} with --gradient-accumulation-steps {layout.accumulation}: "
                "each micro-batch makes an update of its own",
                "put the forward pass, the backward pass and the steps of optimizer and scheduler "
                "under `with accelerator.accumulate(model):`",
            )
    return None


def cause_of_steps(pair: RunPair) -> Cause | None:
    """Return the cause of wrong steps of a schedule or an optimizer; None if they agree."""
    difference = pair.difference
    if difference is not None and difference.quantity == "optimizers":
        return cause_of_optimizers(pair, difference)
    if difference is not None and difference.quantity == "learning rate":
        values = values_in_words(pair, difference)
        return Cause(
            f"the learning rate of update {difference.update} is {values}: a schedule is stepped "
            "for each micro-batch, or the rate depends on the size of a micro-batch",
            "pass the scheduler to accelerator.prepare(...), which steps it once an update, or "
            "step it under `if accelerator.sync_gradients:`; do not compute the rate from "
            "--batch-size",
        )
    return None


def cause_of_loss_or_gradients(pair: RunPair) -> Cause | None:
    """Return the cause that losses or gradients differ; None if they agree."""
    difference = pair.difference
    if difference is None:
        return None
    values = values_in_words(pair, difference)
    if difference.quantity == "gradients":
        sentence = f"the gradients of update {difference.update} have the norm {values}"
        return cause_of_ratio(sentence, difference.ratio, pair.variant_layout.accumulation)
    if difference.update > 1:
        return cause_of_later_loss(pair, difference)
    cause = Cause(
        f"the loss of update 1 is {values}, before any weight has changed: it is not a mean "
        "over samples, or depends on more than the weights and the batch",
        "compute the loss as a mean over the samples of the micro-batch",
    )
    return cause_with_buffer(pair, cause)


def cause_of_ratio(sentence: str, ratio: float, accumulation: int) -> Cause:
    """Return the cause of gradients that are too large or too small with micro-batches.

    Args:
        sentence: a sentence about the gradients that differ.
        ratio: the norm with micro-batches divided by the norm with the whole batch.
        accumulation: the number of micro-batches in an update.
    """
    if is_near(ratio, accumulation):
        return Cause(
            f"{sentence}, {ratio:.2f} times as large: the loss is not divided by the number of "
            "micro-batches",
            "call accelerator.backward(loss), which divides it; loss.backward() does not",
        )
    if is_near(ratio * accumulation, 1):
        return Cause(
            f"{sentence}, {ratio:.2f} times as large: the loss is divided twice by the number of "
            "micro-batches",
            "leave the division to accelerator.backward(loss)",
        )
    return Cause(
        f"{sentence}, {ratio:.2f} times as large, for the same samples and weights",
        "compute the loss as a mean over the samples of the micro-batch, pass it to "
        "accelerator.backward(loss), and clear the gradients once an update",
    )


CHECK = Check(
    "accumulation",
    "n micro-batches of b samples make the same updates as one of n × b",
    judge_accumulation,
    compares_runs=True,
)
