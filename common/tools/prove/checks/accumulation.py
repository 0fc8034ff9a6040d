"""Checks that n micro-batches of b samples make the update that one of n × b makes."""

import math
from dataclasses import dataclass

from common.tools.prove.bench import Bench, Check, Verdict
from common.tools.prove.comparison import (
    STATED,
    WEIGHTS,
    Difference,
    Way,
    differing_figure,
    drawn_generators,
    first_difference,
    mixers_of,
    run_of,
    updates_of,
    ways_of,
    weight_distance,
)
from common.tools.prove.observation import ObservedRun

RATIO = 0.02  # by which a ratio of gradients may differ from a whole number


@dataclass(frozen=True)
class Pair:
    """Two runs that should make the same updates, and how each makes them."""

    first: ObservedRun
    second: ObservedRun
    first_way: Way
    second_way: Way


@dataclass(frozen=True)
class Cause:
    """Why two ways of making the same updates differ."""

    sentence: str
    advice: str


def answer(bench: Bench) -> Verdict:
    ways = ways_of(bench)
    pair = Pair(
        run_of(bench, "whole", ways.whole),
        run_of(bench, "divided", ways.divided),
        ways.whole,
        ways.divided,
    )
    return verdict_of(pair)


def verdict_of(pair: Pair) -> Verdict:
    """Compare a run of whole batches with one of micro-batches."""
    cause = cause_of_counts(pair) or cause_of_rates(pair)
    if cause is not None:
        return failed(pair, cause)
    mixers = mixers_of(pair.second)
    if mixers.layers:
        layers = " and ".join(mixers.layers)
        return Verdict(
            None, f"{layers} mixes the samples of a micro-batch: not comparable, skipped"
        )
    if mixers.couples_samples:
        sentence = "the recipe states couples_samples=True: not comparable, skipped"
        return Verdict(None, sentence)
    return compared(pair)


def compared(pair: Pair) -> Verdict:
    """Compare all updates, the weights and the evaluations of two runs."""
    cause = cause_of_difference(pair) or cause_of_weights(pair) or cause_of_figures(pair)
    if cause is None:
        return Verdict(True, summary(pair))
    generators = drawn_generators(pair.second)
    if generators:
        names = " and ".join(generators)
        sentence = f"the loop draws random numbers for each micro-batch (generator {names})"
        return Verdict(None, f"{sentence}: not comparable, skipped")
    return failed(pair, cause)


def failed(pair: Pair, cause: Cause) -> Verdict:
    return Verdict(False, summary(pair), (cause.sentence,), cause.advice)


def summary(pair: Pair) -> str:
    """Return what was compared, in words."""
    updates = len(updates_of(pair.first).keys() & updates_of(pair.second).keys())
    return f"{updates} updates, {pair.second_way} against {pair.first_way} ({STATED})"


def cause_of_counts(pair: Pair) -> Cause | None:
    """Return what is wrong with the number of micro-batches of an update."""
    way = pair.second_way
    for number, update in updates_of(pair.second).items():
        if update.micro_batches != way.accumulation:
            return Cause(
                f"update {number} used {update.micro_batches} micro-batch(es) of {way.batch_size} "
                f"with --gradient-accumulation-steps {way.accumulation}: each micro-batch makes an "
                "update of its own",
                "put the forward pass, the backward pass and the steps of optimizer and scheduler "
                "under `with accelerator.accumulate(model):`",
            )
    return None


def cause_of_rates(pair: Pair) -> Cause | None:
    """Return what is wrong with the learning rates or the number of optimizer steps."""
    difference = first_difference(updates_of(pair.first), updates_of(pair.second))
    if difference is None:
        return None
    values = values_of(pair, difference)
    if difference.quantity == "learning rate":
        return Cause(
            f"the learning rate of update {difference.update} is {values}: a schedule is stepped "
            "for each micro-batch",
            "pass the scheduler to accelerator.prepare(...), which steps it once an update, or "
            "step it under `if accelerator.sync_gradients:`",
        )
    if difference.quantity == "optimizers":
        return Cause(
            f"the optimizers' steps in update {difference.update} are {values}: an optimizer is "
            "stepped for each micro-batch",
            "pass each optimizer to accelerator.prepare(...), which steps it once an update",
        )
    return None


def cause_of_difference(pair: Pair) -> Cause | None:
    """Return why the losses or gradients differ."""
    difference = first_difference(updates_of(pair.first), updates_of(pair.second))
    if difference is None:
        return None
    values = values_of(pair, difference)
    if difference.quantity == "gradients":
        sentence = f"the gradients of update {difference.update} have the norm {values}"
        return cause_of_ratio(pair, sentence, difference.ratio)
    sentence = f"the loss of update {difference.update} is {values}"
    if difference.update == 1:
        return Cause(
            f"{sentence}, before any weight has changed: it is no mean over samples, or depends on "
            "something besides the weights and the batch",
            "compute the loss as a mean over the samples of the micro-batch",
        )
    return Cause(
        f"{sentence}, after equal gradients before: an update depends on something besides the "
        "gradients",
        "look for a value that changes with each micro-batch and enters the loss or the update",
    )


def cause_of_ratio(pair: Pair, sentence: str, ratio: float) -> Cause:
    """Return why gradients are larger or smaller."""
    divisor = pair.second_way.accumulation
    if is_near(ratio, divisor):
        return Cause(
            f"{sentence}, {ratio:.2f} times as large: the loss is not divided by the number of "
            "micro-batches",
            "call accelerator.backward(loss), which divides it; loss.backward() does not",
        )
    if is_near(ratio * divisor, 1):
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


def is_near(ratio: float, number: float) -> bool:
    """Whether a ratio is a number, within `RATIO`."""
    return math.isclose(ratio, number, rel_tol=RATIO)


def cause_of_weights(pair: Pair) -> Cause | None:
    """Return why the last weights differ, after equal losses and gradients."""
    distance = weight_distance(pair.first, pair.second)
    if distance is None or distance.share <= WEIGHTS:
        return None
    return Cause(
        f"the last weights differ by {distance.share:.1%} of the distance that they moved, most in "
        f"{distance.name}",
        "look for weights that something besides the optimizer changes, such as an average that "
        "is updated for each micro-batch: do that under `if accelerator.sync_gradients:`",
    )


def cause_of_figures(pair: Pair) -> Cause | None:
    """Return which figure of an evaluation differs, for equal weights."""
    figure = differing_figure(pair.first, pair.second)
    if figure is None:
        return None
    name, before, value = figure
    return Cause(
        f"{name} is {value:.6g} with {pair.second_way} and {before:.6g} with {pair.first_way}, for "
        "the same weights: it depends on how samples are divided into batches",
        "add up over samples, as Sums does, and not over batches",
    )


def values_of(pair: Pair, difference: Difference) -> str:
    """Return both values of a difference, with the ways that gave them."""
    return (
        f"{difference.second:.6g} with {pair.second_way} and {difference.first:.6g} with "
        f"{pair.first_way}"
    )


CHECK = Check(
    "accumulation",
    "n micro-batches of b samples make the same updates as one of n × b",
    answer,
)
