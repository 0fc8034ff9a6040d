"""Pairs of runs that should make the same updates in different ways, and why a pair differs.

The checks of accumulation and of processes compare such pairs. Here are the causes that both know.
"""

import math
from dataclasses import dataclass

from common.tools.prove.bench import Cause
from common.tools.prove.comparison import (
    TOLERANCES,
    WEIGHTS,
    UpdateDifference,
    UpdateLayout,
    differing_figure,
    first_differing_update,
    updates_of,
    weight_distance,
)
from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.observation import ObservedRun

RATIO = 0.02  # relative; by how much a ratio of gradients may differ from a whole number


@dataclass(frozen=True)
class RunPair:
    """Two runs that should make the same updates, and how each makes them."""

    first: ObservedRun
    second: ObservedRun
    baseline_layout: UpdateLayout
    variant_layout: UpdateLayout

    def first_difference(self) -> UpdateDifference | None:
        """Return where the updates differ first beyond the tolerance; None if they agree."""
        return first_differing_update(updates_of(self.first), updates_of(self.second))


def summary(pair: RunPair) -> str:
    """Return what was compared, in words."""
    updates = len(updates_of(pair.first).keys() & updates_of(pair.second).keys())
    return f"{updates} updates, {pair.variant_layout} against {pair.baseline_layout} ({TOLERANCES})"


def values_in_words(pair: RunPair, difference: UpdateDifference) -> str:
    """Return both values of a difference, with the ways that gave them."""
    return (
        f"{difference.second:.6g} with {pair.variant_layout} and {difference.first:.6g} with "
        f"{pair.baseline_layout}"
    )


def is_near(ratio: float, number: float) -> bool:
    """Whether a ratio is a number, within `RATIO`."""
    return math.isclose(ratio, number, rel_tol=RATIO)


def cause_of_optimizers(pair: RunPair, difference: UpdateDifference) -> Cause:
    """Return why the numbers of optimizer steps in an update differ."""
    return Cause(
        f"the optimizers' steps in update {difference.update} are {values_in_words(pair, difference)}: "
        "an optimizer is stepped for each micro-batch",
        "pass each optimizer to accelerator.prepare(...), which steps it once an update",
    )


def cause_of_later_loss(pair: RunPair, difference: UpdateDifference) -> Cause:
    """Return why losses differ first after some updates."""
    return Cause(
        f"the loss of update {difference.update} is {values_in_words(pair, difference)}, after equal "
        "gradients before: an update depends on something besides the gradients",
        "look for a value that changes with each micro-batch and enters the loss or the update",
    )


def cause_of_weights(pair: RunPair) -> Cause | None:
    """Return why the weights differ, after equal losses and gradients; None if they agree."""
    distance = weight_distance(pair.first, pair.second)
    if distance is None or distance.share <= WEIGHTS:
        return None
    return Cause(
        f"the weights after update {COMPARED_UPDATE} differ by {distance.share:.1%} of the "
        f"distance that they moved, most in {distance.name}",
        "look for weights that something besides the optimizer changes, such as an average that "
        "is updated for each micro-batch: do that under `if accelerator.sync_gradients:`",
    )


def cause_of_figures(pair: RunPair) -> Cause | None:
    """Return which figure of an evaluation differs, for equal weights; None if all agree."""
    figure = differing_figure(pair.first, pair.second)
    if figure is None:
        return None
    name, first_value, second_value = figure
    return Cause(
        f"{name} is {second_value:.6g} with {pair.variant_layout} and {first_value:.6g} with "
        f"{pair.baseline_layout}, for the same weights: it depends on how samples are divided into "
        "batches",
        "add up over samples, as Sums does, and not over batches",
    )
