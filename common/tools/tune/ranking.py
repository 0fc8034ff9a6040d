"""Ranks settings by their mean over seeds. Trials with the same settings form one group."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from optuna.trial import FrozenTrial

from common.flags import field_name
from common.objective import Objective
from common.tools.compare.groups import SEED_FLAG, name_of_group, settings_text
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.repetitions import means_of_seeds, seed_of
from common.tools.compare.settings import Settings
from common.tools.statistics.samples import MIN_RUNS
from common.tools.tune.space import Space


@dataclass(frozen=True)
class TrialGroup:
    """Trials with the same values of the searched flags, except for the seed."""

    runs: tuple[RunRecord, ...]  # the best run first
    values_of_seeds: Mapping[str, float]  # the best values on validation data, by seed
    mean: float  # the mean of these values
    settings: Settings = field(default_factory=dict)  # the searched values, by flag

    @property
    def name(self) -> str:
        return name_of_group([run.name for run in self.runs])

    def name_beside(self, other: "TrialGroup") -> str:
        """Return the group's name with those settings in which it differs from another group.

        For example, ``trial-000 and 2 more (dropout=0.1)``.
        """
        flags = [flag for flag, value in self.settings.items() if value != other.settings.get(flag)]
        return f"{self.name} ({settings_text(self.settings, flags)})" if flags else self.name

    @property
    def is_repeated(self) -> bool:
        """Whether the trials have several seeds, which show how much is chance."""
        return len(self.values_of_seeds) >= MIN_RUNS


def group_trials(
    trials: Sequence[RunRecord], objective: Objective, space: Space
) -> list[TrialGroup]:
    """Return the groups of trials, the one with the best mean first.

    A trial whose best value is unknown, NaN or infinite is left out.
    """
    sign = objective.sign
    runs_of_groups: dict[str, list[RunRecord]] = {}
    for run in trials:
        if math.isfinite(run.summary.get(objective.best_key, math.nan)):
            runs_of_groups.setdefault(settings_key_of_run(run, space), []).append(run)
    groups = []
    for runs in runs_of_groups.values():
        runs.sort(key=lambda run: sign * run.summary[objective.best_key], reverse=True)
        values = means_of_seeds((seed_of(run), run.summary[objective.best_key]) for run in runs)
        settings = searched_settings(runs[0], space)
        groups.append(TrialGroup(tuple(runs), values, fmean(values.values()), settings))
    return sorted(groups, key=lambda group: sign * group.mean, reverse=True)


def settings_key_of_run(run: RunRecord, space: Space) -> str:
    """Return a text that is equal for runs with the same searched values except for the seed."""
    names = sorted(field_name(flag) for flag in space if flag != SEED_FLAG)
    return json.dumps([run.flags.get(name) for name in names], default=str)


def searched_settings(run: RunRecord, space: Space) -> Settings:
    """Return a run's values of the searched flags except for the seed, by flag."""
    return {flag: run.flags.get(field_name(flag)) for flag in space if flag != SEED_FLAG}


def settings_key_of_trial(trial: FrozenTrial) -> str:
    """Return a text that is equal for trials with the same values except for the seed."""
    values = {flag: value for flag, value in trial.params.items() if flag != SEED_FLAG}
    return json.dumps(values, sort_keys=True, default=str)


def ranked_by_settings(trials: Sequence[FrozenTrial], objective: Objective) -> list[FrozenTrial]:
    """Return finished trials, those with the best settings first.

    Settings rank by their mean over the seeds, and not by the luckiest seed. Trials with the same
    settings follow each other, the best first.
    """
    sign = objective.sign
    trials_by_settings: dict[str, list[FrozenTrial]] = {}
    for trial in trials:
        trials_by_settings.setdefault(settings_key_of_trial(trial), []).append(trial)
    means = {key: mean_over_seeds(group) for key, group in trials_by_settings.items()}

    def rank(trial: FrozenTrial) -> tuple[float, str, float]:
        settings_key = settings_key_of_trial(trial)
        # The key keeps trials with the same settings together, even if others have the same mean.
        return (-sign * means[settings_key], settings_key, -sign * value_of(trial))

    return sorted(trials, key=rank)


def count_of_settings(trials: Sequence[FrozenTrial]) -> int:
    """Return how many different settings trials have, not counting the seed."""
    return len({settings_key_of_trial(trial) for trial in trials})


def trials_with_settings_of(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return those of `trials` that have the same values as `trial`, except for the seed."""
    key = settings_key_of_trial(trial)
    return [other for other in trials if settings_key_of_trial(other) == key]


def mean_over_seeds(trials: Sequence[FrozenTrial]) -> float:
    """Return the mean over the seeds; the trials of one seed count once, with their mean."""
    seeds_and_values = ((str(trial.params.get(SEED_FLAG)), value_of(trial)) for trial in trials)
    return fmean(means_of_seeds(seeds_and_values).values())


def value_of(trial: FrozenTrial) -> float:
    """Return the value of a finished trial, which is never None, although its type allows None."""
    return float(trial.value or 0)
