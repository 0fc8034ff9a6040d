"""What a search says about its best trial: whether chance alone may have put it first."""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

from common.tools.compare.comparison import standard_error
from common.tools.compare.readers import RunRecord
from common.tools.compare.sentences import decimals_for, scale_of
from common.tools.recipe import Recipe
from common.tools.statistics.samples import CONFIDENCE
from common.tools.tune.space import Space
from common.track.names import describe


def certainty_lines(ranked: Sequence[RunRecord], recipe: Recipe, space: Space) -> list[str]:
    """Return sentences on how far the best trial is ahead of the second, and of the defaults.

    Each trial is one run with one seed. So the only chance that the trials show is that in the
    samples of the validation data, and a verdict on it alone would be too confident.

    Args:
        ranked: the runs of finished trials, the best one first. Those without a summary, which
            was lost, are left out.
        recipe: has the default values of the flags.
        space: the flags that were searched.
    """
    known = [run for run in ranked if recipe.objective.best_key in run.summary]
    if not known:
        return []
    best, *others = known
    lines = []
    if others:
        lines.append(f"{pair_text(best, others[0], recipe)} (the second)")
    lines += lines_on_defaults(known, recipe, space)
    if others:
        lines.append(
            f"each trial is one seed, and the best of {len(known)} is partly the luckiest: repeat "
            "it and its rivals with several seeds to be sure (recipes vary has --seeds)"
        )
    return lines


def lines_on_defaults(ranked: Sequence[RunRecord], recipe: Recipe, space: Space) -> list[str]:
    """Return a sentence that compares the best trial with the recipe's own values, if it can."""
    best = ranked[0]
    defaults = [run for run in ranked if has_default_values(run, recipe, space)]
    if not defaults:
        return [
            "no finished trial has the recipe's default values of these flags, so the search does "
            "not show what it gained over them"
        ]
    if best in defaults:
        return [f"{best.name} has the recipe's default values of these flags"]
    return [f"{pair_text(best, defaults[0], recipe)} (the recipe's default values)"]


def has_default_values(run: RunRecord, recipe: Recipe, space: Space) -> bool:
    """Return whether a trial ran with the default of each searched flag.

    A default that the recipe chooses at its start, such as a learning rate by data set, is unknown
    here, so that no trial has it.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(recipe.config_class)}
    for flag in space:
        name = flag.replace("-", "_")
        default = defaults.get(name)
        if isinstance(default, tuple):
            default = [*default]  # as JSON has it
        if default is None or run.flags.get(name) != default:
            return False
    return True


def pair_text(best: RunRecord, other: RunRecord, recipe: Recipe) -> str:
    """Return by how much the best trial is ahead of another, and whether that may be chance."""
    objective = recipe.objective
    best_value = best.summary[objective.best_key]
    other_value = other.summary[objective.best_key]
    scale, unit = scale_of(objective)
    lead = scale * abs(best_value - other_value)
    errors = [
        standard_error(best, best_value, "validation"),
        standard_error(other, other_value, "validation"),
    ]
    names = f"{best.name} against {other.name}"
    if errors[0] is None or errors[1] is None:
        metric = describe(objective.metric)
        return (
            f"{names}: {metric.text(best_value)} and {metric.text(other_value)}, and nothing shows "
            f"how much of a difference in {metric.label} is chance"
        )
    # Both trials have the same samples, which makes the true error smaller than this.
    error = scale * math.hypot(errors[0], errors[1])
    form = f".{decimals_for(error)}f"
    figures = f"{lead:{form}}{unit} ahead, with a standard error of {error:{form}} by the samples"
    limit = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * error
    if lead <= limit:
        return f"{names}: {figures}, so they can't be told apart"
    return f"{names}: {figures}, which is more than the choice of samples explains"
