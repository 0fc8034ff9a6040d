"""Compares a study with the trials' directories, and reads the trials of a new study from them.

Where the two disagree, the directories are right, and the study must be rebuilt.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from common.config import parse_config
from common.errors import UserError
from common.flags import field_name, role_of, spelled
from common.metric_names import EPOCH
from common.run_directory.records import Flags
from common.storage.files import SUPERSEDED
from common.system.platforms.commands import split_words
from common.system.platforms.files import rename_path
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.recipe import Recipe
from common.tools.tune.space import Space, as_command_line, command_words

TRIAL = "trial-"  # the beginning of the name of a trial's directory
MAX_EPOCHS = 10**9  # a larger number can only come from a damaged file
# Optuna compares trials at the same step. Trials with different batch sizes evaluate at different
# updates, so a step of the study is not an update, but a hundredth of an epoch.
STEPS_PER_EPOCH = 100


@dataclass(frozen=True)
class TrialsOnDisk:
    """The runs of a search's trials, and the values that each of them actually tried."""

    runs: dict[int, RunRecord]  # by number of the trial
    values: dict[int, dict[str, object]]  # values of the searched flags, as a study keeps them

    @classmethod
    def read(
        cls, directory: Path, recipe: Recipe, space: Space, shared: Sequence[str]
    ) -> "TrialsOnDisk":
        """Read the trials of a directory.

        Raises:
            UserError: a trial is damaged, or it is a run that this search would not have made.
        """
        runs = {}
        for path in sorted(directory.glob(f"{TRIAL}*/config.json")):
            number = path.parent.name.removeprefix(TRIAL)
            if number.isdecimal():  # leaves out other folders, such as trial-notes
                runs[int(number)] = read_directory(path.parent)
        values = {number: values_tried(space, run) for number, run in runs.items()}
        if runs:
            # Any trial's values will do, because only the flags that all trials share are checked.
            sample = next(iter(values.values()))
            expected = parsed_flags(recipe, [*command_words(space, sample), *shared])
            for run in runs.values():
                require_shared_flags(run, recipe, space, expected)
        return cls(runs, values)

    def disagreement(self, study: Study, space: Space, best_key: str) -> str | None:
        """Return a clause on the first difference between a study and the trials' directories.

        In the clause, "it" is the study. The result is None if they agree. A trial without a
        directory can't be compared. A study whose file can be read may still have lost trials or
        values. Without this check, the search would go on from wrong results.

        Args:
            study: the study in its file.
            space: the flags that the search tries values for.
            best_key: the name of a trial's result in `summary.json`.
        """
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
                result = self.runs[number].summary.get(best_key)
                if result != trial.value:
                    return f"{name} has reached another value"
        return None

    def as_trials(self, space: Space, best_key: str, metric: str) -> list[FrozenTrial]:
        """Return the trials for a new study, in the order of their numbers.

        A number without a directory counts as a failed trial, and so does a run that finished
        without a result. A run that neither finished nor failed counts as running, so that the
        search continues it.

        Args:
            space: the flags that the search tries values for.
            best_key: the name of a trial's result in `summary.json`.
            metric: the name under which evaluations log the objective.
        """
        trials = []
        for number in range(max(self.runs, default=-1) + 1):
            if number not in self.runs:
                trials.append(create_trial(state=TrialState.FAIL))
                continue
            run = self.runs[number]
            result = run.summary.get(best_key) if run.status == "finished" else None
            state = TrialState.RUNNING
            if result is not None:
                state = TrialState.COMPLETE
            elif run.status in ("finished", "failed"):
                state = TrialState.FAIL
            trial = create_trial(
                state=state,
                value=result,
                params=self.values[number],
                distributions=dict(space),
                intermediate_values=intermediate_values(run, metric),
            )
            trials.append(trial)
        return trials


def intermediate_values(run: RunRecord, metric: str) -> dict[int, float]:
    """Return a run's values of a metric, by the step at which Optuna's pruner compares them.

    A step is a hundredth of an epoch: see `STEPS_PER_EPOCH`. A damaged file may have rows with no
    epoch or with an impossible one. These rows are left out.
    """
    return {
        round(row[EPOCH] * STEPS_PER_EPOCH): row[metric]
        for row in run.rows
        if metric in row and 0 <= row.get(EPOCH, -1) <= MAX_EPOCHS
    }


def stated_flags(run: RunRecord) -> Flags:
    """Return a run's flags as the user stated them, before the run resolved ``auto`` and the like.

    A flag that `config.json` has only in its resolved form keeps that form.
    """
    return {**run.flags, **run.saved_config.given_flags}


def values_tried(space: Space, run: RunRecord) -> dict[str, object]:
    """Return the values that a run has for the searched flags, in the form that a study keeps.

    Raises:
        UserError: one of the values is outside the search space.
    """
    stated = stated_flags(run)
    values: dict[str, object] = {}
    for flag, distribution in space.items():
        value = stated.get(field_name(flag))
        if isinstance(distribution, CategoricalDistribution):
            # A study keeps the text of a choice, and `config.json` keeps its value.
            choices = [choice for choice in distribution.choices if denotes(str(choice), value)]
            kept_value = choices[0] if choices else None
        else:
            kept_value = number_in_range(distribution, value)
        if kept_value is None:
            refuse_foreign_run(run, f"--{flag} {value}, which is outside the search space")
        values[flag] = kept_value
    return values


def number_in_range(
    distribution: IntDistribution | FloatDistribution, value: object
) -> float | None:
    """Return a flag's value in the form that a study keeps; None if it is not in the range.

    A range of integers has only whole numbers: 3.0 is kept as 3, and 3.7 is not in the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not distribution.low <= value <= distribution.high:
        return None
    if isinstance(distribution, FloatDistribution):
        return float(value)
    return int(value) if value % 1 == 0 else None


def denotes(choice: str, value: object) -> bool:
    """Return whether a choice, as typed, stands for a flag's value, as read from JSON."""
    if isinstance(value, list | tuple):
        words = split_words(choice)
        return len(words) == len(value) and all(map(denotes, words, value))
    if isinstance(value, bool):
        return choice == str(value).lower()
    if isinstance(value, int | float):
        with suppress(ValueError):
            return float(choice) == value
    return choice == str(value)


def parsed_flags(recipe: Recipe, words: Sequence[str]) -> Mapping[str, object]:
    """Return the flags that a recipe reads from a command line."""
    with as_command_line(recipe, words):
        return vars(parse_config(recipe.config_class))


def require_shared_flags(
    run: RunRecord, recipe: Recipe, space: Space, expected: Mapping[str, object]
) -> None:
    """Check that a run has the search's recipe and shared flags.

    Flags that no comparison of runs shows, such as those of reporting, may differ.

    Args:
        run: the run in a trial's directory.
        recipe: the search's recipe.
        space: the flags that the search tries values for. They differ between trials.
        expected: all flags of a trial, as the recipe reads them from the command line.

    Raises:
        UserError: the run has a different recipe or flag, so it is not a trial of this search.
    """
    if run.saved_config.recipe != recipe.path.stem:
        refuse_foreign_run(
            run, f"the recipe {run.saved_config.recipe} instead of {recipe.path.stem}"
        )
    stated = stated_flags(run)
    may_differ = {field_name(flag) for flag in space}
    if expected.get("effective_batch_size") is not None:
        # Then the run itself chooses the accumulation, by its number of processes.
        may_differ.add("gradient_accumulation_steps")
    must_agree = stated.keys() - may_differ
    for name in expected.keys() & must_agree:
        expected_value = expected[name]
        run_value = stated[name]
        # If the search states `auto`, the run may have any value: a resumed run states the value
        # that it chose. JSON has a list instead of a tuple.
        accepted = ("auto", tuple(run_value) if isinstance(run_value, list) else run_value)
        if expected_value not in accepted and role_of(recipe.config_class, name).compared:
            refuse_foreign_run(run, f"{spelled(name)} {run_value} instead of {expected_value}")


def refuse_foreign_run(run: RunRecord, difference: str) -> None:
    """Raise a `UserError`, because this search did not start the run in a trial's directory.

    Args:
        run: the run.
        difference: a flag or recipe of the run that the search would not have used.
    """
    directory = Path(run.source)
    raise UserError(
        f"{directory} does not fit this search, because it was run with {difference}",
        advice=(
            "if the search's flags or the recipe's defaults have changed, change them back or "
            "start a new search with --study NEW; otherwise move the folder "
            f"{directory.name} out of {directory.parent}"
        ),
    )


def put_aside(file: Path) -> Path:
    """Rename a damaged study, so that the user can still look at it, and return the new path.

    The new name is unused, and marks the file as superseded.
    """
    for number in itertools.count(1):
        renamed_path = file.with_name(f"{file.name}{SUPERSEDED}-{number}")
        if not renamed_path.exists():
            rename_path(file, renamed_path)
            return renamed_path
    raise AssertionError("a number is always free")
