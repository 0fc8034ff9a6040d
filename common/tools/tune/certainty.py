"""Says whether chance alone may explain the lead of a search's best settings.

Even if all settings are equally good, the best of many trials leads by more than chance explains in
a comparison of only two. So every limit here has Bonferroni's correction for the number of the best
trial's rivals.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

from common.flags import field_name
from common.objective import Objective
from common.tools.compare.figures import standard_error
from common.tools.compare.groups import SEED_FLAG
from common.tools.compare.objective_text import decimals_for, scale_of, shown_interval
from common.tools.compare.readers.run_record import RunRecord
from common.tools.recipe import Recipe
from common.tools.statistics.contrasts import contrast_by_seeds
from common.tools.statistics.samples import ConfidenceInterval, simultaneous_confidence
from common.tools.tune.ranking import TrialGroup, group_trials
from common.tools.tune.space import Space
from common.track.names import metric_named


def certainty_lines(
    trials: Sequence[RunRecord], recipe: Recipe, space: Space, tried_settings_count: int
) -> list[str]:
    """Return sentences on the lead of the best settings over the second, and over the defaults.

    Settings with several seeds are compared by how much the seeds differ. For settings with one
    seed, only the sampling error of the validation data is known, and not how much seeds differ.
    So a verdict on them is too confident.

    Args:
        trials: the runs of finished trials. A run whose summary was lost is left out.
        recipe: the recipe, which has the default values of the flags.
        space: the flags that were searched.
        tried_settings_count: the number of settings that the search tried, also in trials that it
            stopped early. If `trials` has more settings than this, their number counts instead.
    """
    groups = group_trials(trials, recipe.objective, space)
    if not groups:
        return []
    best, *others = groups
    candidate_count = max(tried_settings_count, len(groups))
    lines = []
    if others:
        text = pair_text(best, others[0], recipe.objective, candidate_count)
        lines.append(f"{text} (the second)")
    lines += lines_on_defaults(groups, recipe, space, candidate_count)
    if others:
        lines.append(note_on_luck(groups, candidate_count))
    return lines


def lines_on_defaults(
    groups: Sequence[TrialGroup], recipe: Recipe, space: Space, candidate_count: int
) -> list[str]:
    """Return one sentence, in a list, that compares the best settings with the defaults.

    If a flag has no fixed default, if no finished trial had the defaults, or if the best settings
    are the defaults, the sentence says so instead.
    """
    unknown = flags_without_default(recipe, space)
    if unknown:
        return [
            f"the recipe has no fixed default of {' and '.join(unknown)}, so the search does not "
            "show what it gained over the defaults"
        ]
    best = groups[0]
    defaults = [group for group in groups if has_default_values(group.runs[0], recipe, space)]
    if not defaults:
        return [
            "no finished trial has the recipe's default values of the searched flags, so the "
            "search does not show what it gained over them"
        ]
    if best in defaults:
        return [f"{best.name} has the recipe's default values of the searched flags"]
    text = pair_text(best, defaults[0], recipe.objective, candidate_count)
    return [f"{text} (the recipe's default values)"]


def has_default_values(run: RunRecord, recipe: Recipe, space: Space) -> bool:
    """Return whether a trial ran with the default of each searched flag, whatever its seed.

    All flags must have fixed defaults; see `flags_without_default`.
    """
    defaults = defaults_of(recipe)
    for flag in space:
        name = field_name(flag)
        if flag != SEED_FLAG and run.flags.get(name) != defaults[name]:
            return False
    return True


def flags_without_default(recipe: Recipe, space: Space) -> list[str]:
    """Return the searched flags that have no fixed default, with their dashes.

    Their default in the config is None. The recipe chooses the value at its start, such as a
    learning rate by data set.
    """
    defaults = defaults_of(recipe)
    return [
        f"--{flag}"
        for flag in space
        if flag != SEED_FLAG and defaults.get(field_name(flag)) is None
    ]


def defaults_of(recipe: Recipe) -> dict[str, object]:
    """Return the default of each flag by name, with lists instead of tuples, as in JSON."""
    defaults: dict[str, object] = {}
    for field in dataclasses.fields(recipe.config_class):
        default = field.default
        defaults[field.name] = [*default] if isinstance(default, tuple) else default
    return defaults


def note_on_luck(groups: Sequence[TrialGroup], candidate_count: int) -> str:
    """Return a sentence on why the best settings may be worse than they seem.

    If each trial is one seed, the sentence also says what to do.
    """
    if groups[0].is_repeated:
        return (
            f"the best of {candidate_count} settings is partly the luckiest, so new seeds will "
            "probably be a little worse"
        )
    return (
        f"each trial is one seed, and the best of {candidate_count} is partly the luckiest: repeat "
        "it and its rivals with several seeds to be sure (recipes vary has --seeds)"
    )


def pair_text(
    best: TrialGroup, other: TrialGroup, objective: Objective, candidate_count: int
) -> str:
    """Return a sentence on the lead of the best settings, and whether that may be chance.

    Args:
        candidate_count: how many settings the best ones were chosen from.
    """
    if best.is_repeated and other.is_repeated:
        text = text_by_seeds(best, other, objective, candidate_count)
    else:
        text = text_by_samples(best, other, objective, candidate_count)
    return f"{best.name_beside(other)} against {other.name_beside(best)}: {text}"


def text_by_seeds(
    best: TrialGroup, other: TrialGroup, objective: Objective, candidate_count: int
) -> str:
    """Return the lead of the best settings, with its interval from the seeds of both."""
    scale, unit = scale_of(objective)
    lead = scale * abs(best.mean - other.mean)
    interval = interval_of_lead(best, other, candidate_count)
    if interval is None:
        return f"{lead:.3g}{unit} ahead, and no seed of either differs from the others"
    form, span = shown_interval(objective, lead, interval)
    conclusion = conclusion_on(interval.excludes_zero, "seeds")
    return f"{lead:{form}}{unit} ahead ({span}), {conclusion}"


def interval_of_lead(
    best: TrialGroup, other: TrialGroup, candidate_count: int
) -> ConfidenceInterval | None:
    """Return the interval of the difference between settings, from their seeds.

    The interval is wide enough for the best of several candidates. The result is None if no seed
    differs from the others.
    """
    rival_count = candidate_count - 1
    confidence = simultaneous_confidence(rival_count)
    return contrast_by_seeds(other.values_of_seeds, best.values_of_seeds, confidence).interval


def text_by_samples(
    best: TrialGroup, other: TrialGroup, objective: Objective, candidate_count: int
) -> str:
    """Return the lead of the best settings, judged by the sampling error.

    The validation data are a sample, so another sample would give other values.
    """
    scale, unit = scale_of(objective)
    error = standard_error_of_lead(best, other)
    if error is None:
        metric = metric_named(objective.metric)
        return (
            f"{metric.text(best.mean)} and {metric.text(other.mean)}, and nothing shows "
            f"how much of a difference in {metric.label} is chance"
        )
    lead = scale * abs(best.mean - other.mean)
    form = f".{decimals_for(scale * error)}f"
    is_beyond_chance = exceeds_chance(abs(best.mean - other.mean), error, candidate_count)
    conclusion = conclusion_on(is_beyond_chance, "samples")
    if is_beyond_chance and candidate_count > 2:
        conclusion += f", for the best of {candidate_count}"
    return (
        f"{lead:{form}}{unit} ahead, with a standard error of {scale * error:{form}} by the "
        f"samples, {conclusion}"
    )


def conclusion_on(is_beyond_chance: bool, chosen: str) -> str:
    """Return the end of the sentence on a lead: whether chance alone may explain the lead.

    Args:
        chosen: what chance chooses, "seeds" or "samples".
    """
    if is_beyond_chance:
        return f"which is more than the choice of {chosen} explains"
    return "so they can't be told apart"


def standard_error_of_lead(best: TrialGroup, other: TrialGroup) -> float | None:
    """Return the standard error of the lead, from the number of validation samples.

    It is computed as if each trial had samples of its own. All trials share their samples, so the
    true error is smaller. The result is None if the number of samples is unknown.
    """
    errors = []
    for group in (best, other):
        run = group.runs[0]
        errors.append(standard_error(run, run.objective.metric, group.mean, "validation"))
    if errors[0] is None or errors[1] is None:
        return None
    return math.hypot(errors[0], errors[1])


def exceeds_chance(lead: float, error: float, candidate_count: int) -> bool:
    """Return whether the best of several candidates is ahead of another by more than chance.

    Args:
        lead: the lead of the best candidate, at least 0.
        error: the standard error of the difference of two candidates.
        candidate_count: how many candidates there are, with these two.
    """
    rival_count = candidate_count - 1
    confidence = simultaneous_confidence(rival_count)
    return lead > NormalDist().inv_cdf(0.5 + confidence / 2) * error
