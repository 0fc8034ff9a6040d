"""Hold a study to its trials' own directories, which decide what each result is credited to."""

import itertools
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from common.compare.readers import RunRecord, read_directory
from common.config import parse_config
from common.errors import UserError
from common.files import SUPERSEDED
from common.flags import role_of, spelled
from common.platforms import rename_path, split_words
from common.recipe import Recipe
from common.track.names import Facts
from common.tune.space import Space, command_words

TRIAL = "trial-"  # begins the name of a trial's directory
EPOCH, MOST_EPOCHS = "progress/epoch", 10**9
# Trials are judged at the same share of their training: evaluations fall on other updates where
# batches have other sizes.
STEPS_PER_EPOCH = 100


@dataclass(frozen=True)
class TrialsOnDisk:
    """The runs of a search's trials, and the values that each of them really tried."""

    runs: dict[int, RunRecord]  # by number of the trial
    values: dict[int, dict[str, Any]]  # of the searched flags, as a study keeps them

    @classmethod
    def read(
        cls, directory: Path, recipe: Recipe, space: Space, shared: Sequence[str]
    ) -> "TrialsOnDisk":
        """Read the trials of a directory.

        Raises:
            UserError: one of them is damaged, or it is a run that the search would not have made.
        """
        runs = {}
        for path in sorted(directory.glob(f"{TRIAL}*/config.json")):
            with suppress(ValueError):  # a folder that only begins like a trial's
                runs[int(path.parent.name.removeprefix(TRIAL))] = read_directory(path.parent)
        values = {number: values_tried(space, run) for number, run in runs.items()}
        if runs:
            sample = next(iter(values.values()))
            expected = parsed(recipe, [*command_words(space, sample), *shared])
            for run in runs.values():
                insist_on_shared_flags(run, recipe, space, expected)
        return cls(runs, values)

    def disagreement(self, study: Study, space: Space, best_key: str) -> str | None:
        """Return in what a study is not what the trials' directories say; None if it is."""
        trials = study.get_trials(deepcopy=False)
        for index, trial in enumerate(trials):
            if trial.number != index:
                return f"{TRIAL}{index:03d} is missing in it"
            if trial.state == TrialState.COMPLETE and trial.values is None:
                return f"the value of {TRIAL}{index:03d} is missing in it"
        for number, values in self.values.items():
            name = f"{TRIAL}{number:03d}"
            if number >= len(trials):
                return f"{name} is missing in it"
            trial = trials[number]
            if trial.params.keys() != space.keys():
                return f"values of {name} are missing in it"
            if command_words(space, trial.params) != command_words(space, values):
                return f"{name} has tried other values"
            if trial.state == TrialState.COMPLETE:
                reached = self.runs[number].summary.get(best_key)
                if reached != trial.value:
                    return f"{name} has reached another value"
        return None

    def as_trials(self, space: Space, best_key: str, metric: str) -> list[FrozenTrial]:
        """Return the trials for a new study, by number; a number without a directory has failed.

        What neither finished nor failed counts as running: the search goes on with it.
        """
        trials = []
        for number in range(max(self.runs, default=-1) + 1):
            if number not in self.runs:
                trials.append(create_trial(state=TrialState.FAIL))
                continue
            run = self.runs[number]
            reached = run.summary.get(best_key) if run.status == "finished" else None
            state = TrialState.RUNNING
            if reached is not None:
                state = TrialState.COMPLETE
            elif run.status in ("finished", "failed"):
                state = TrialState.FAIL
            trial = create_trial(
                state=state,
                value=reached,
                params=self.values[number],
                distributions=dict(space),
                intermediate_values=intermediate_values(run, metric),
            )
            trials.append(trial)
        return trials


def intermediate_values(run: RunRecord, metric: str) -> dict[int, float]:
    """Return a run's evaluations by hundredths of an epoch."""
    return {
        round(row[EPOCH] * STEPS_PER_EPOCH): row[metric]
        for row in run.rows
        if metric in row and 0 <= row.get(EPOCH, -1) <= MOST_EPOCHS
    }


def given_flags(run: RunRecord) -> Facts:
    """Return a run's flags as its command line had them."""
    given = run.fact("given")
    return {**run.flags, **(given if isinstance(given, dict) else {})}


def values_tried(space: Space, run: RunRecord) -> dict[str, Any]:
    """Return the values that a run was given for the searched flags, as a study keeps them."""
    given = given_flags(run)
    values = {}
    for flag, distribution in space.items():
        value = given.get(flag.replace("-", "_"))
        if isinstance(distribution, CategoricalDistribution):
            choices = [choice for choice in distribution.choices if means(str(choice), value)]
            is_tried = bool(choices)
            value = choices[0] if choices else value
        else:
            is_tried = False
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = float(value) if isinstance(distribution, FloatDistribution) else int(value)
                is_tried = distribution.low <= value <= distribution.high
        if not is_tried:
            refuse(run, f"--{flag} {value}, which the search does not try")
        values[flag] = value
    return values


def means(choice: str, value: Any) -> bool:
    """Whether a choice on the command line is a flag's value, as JSON has it."""
    if isinstance(value, list | tuple):
        words = split_words(choice)
        return len(words) == len(value) and all(map(means, words, value))
    if isinstance(value, bool):
        return choice == str(value).lower()
    if isinstance(value, int | float):
        with suppress(ValueError):
            return float(choice) == value
    return choice == str(value)


def parsed(recipe: Recipe, words: Sequence[str]) -> Facts:
    """Return the flags that a recipe reads from a command line."""
    before = sys.argv
    sys.argv = [str(recipe.path), *words]
    try:
        return vars(parse_config(recipe.config_class))
    finally:
        sys.argv = before


def insist_on_shared_flags(run: RunRecord, recipe: Recipe, space: Space, expected: Facts) -> None:
    """Raise a `UserError` for a run of another recipe, or whose other flags the search has not."""
    if run.fact("recipe") != recipe.path.stem:
        refuse(run, f"the recipe {run.fact('recipe')}, and not {recipe.path.stem}")
    given = given_flags(run)
    searched = {flag.replace("-", "_") for flag in space}
    if expected.get("effective_batch_size") is not None:
        searched.add("gradient_accumulation_steps")  # it follows from the number of processes
    for name in expected.keys() & given.keys() - searched:
        here = expected[name]
        there = given[name]
        # What was left to the run, it settles, and a resumed run may state.
        is_same = here in ("auto", tuple(there) if isinstance(there, list) else there)
        if not is_same and role_of(recipe.config_class, name).compared:
            refuse(run, f"{spelled(name)} {there}, and the search has {here}")


def refuse(run: RunRecord, difference: str) -> None:
    place = Path(run.source)
    raise UserError(
        f"{place} is no trial of this search: it was run with {difference}. Move it out of "
        f"{place.parent}"
    )


def put_aside(file: Path) -> Path:
    """Rename a file to a name that none has; return that."""
    for number in itertools.count(1):
        aside = file.with_name(f"{file.name}{SUPERSEDED}-{number}")
        if not aside.exists():
            rename_path(file, aside)
            return aside
    raise AssertionError("a number is always free")


def settled_words(recipe: Recipe, run: RunRecord) -> list[str]:
    """Return the flags for what a run settled by itself, so that a repetition does the same.

    Where the command line said ``auto``, that is what it chose: the data set, the precision.
    """
    given = given_flags(run)
    settled = {**run.flags, "mixed_precision": run.fact("environment.mixed_precision")}
    words: list[str] = []
    for name in vars(recipe.config_class)["__dataclass_fields__"]:
        is_open = given.get(name) == "auto" or (name == "dataset_config" and not given.get(name))
        if is_open and isinstance(settled.get(name), str) and settled[name] != "auto":
            words += [spelled(name), settled[name]]
    return words
