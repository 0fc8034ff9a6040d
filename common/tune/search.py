"""A search: asks Optuna what to try, carries out one trial after another, and can be killed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn, Self

import optuna
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from common.compare.readers import read_directory
from common.console import say
from common.directory import read_status
from common.errors import UserError
from common.files import read_json_if_there, writing
from common.flags import from_json
from common.objective import Objective
from common.platforms import command_line, quoted, shown_path
from common.recipe import Recipe
from common.track.names import describe, duration
from common.tune.recovery import (
    STEPS_PER_EPOCH,
    TRIAL,
    TrialsOnDisk,
    intermediate_values,
    put_aside,
    settled_words,
)
from common.tune.space import Space, command_words
from common.tune.trial import TrialRun, launched

# All failed among so many at the beginning: the command is wrong, not what was tried.
FIRST_TRIALS = 3
STUDY = "study.db"


@dataclass(frozen=True)
class SearchSettings:
    """What a search was asked to do, as `search.json` in its directory keeps it."""

    recipe: str
    flags: tuple[str, ...]  # as given: ranges, choices, and what all trials share
    config_file: str | None = None  # for `accelerate launch`
    trials: int = 20
    prune: bool = True

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read what a search in a directory was asked to do; None where there is none."""
        path, names = directory / "search.json", [field.name for field in fields(cls)]
        if (kept := read_json_if_there(path)) is None:
            return None
        if missing := ", ".join(name for name in names if name not in kept):
            raise UserError(f"{path} is not what a search wrote: it lacks {missing}")
        return cls(**from_json(cls, {name: kept[name] for name in names}, str(path)))


def open_study(directory: Path, objective: Objective, prune: bool, space: Space) -> Study:
    """Open the study of a directory, or begin one; a `UserError` if it is damaged or another's."""
    path = directory / STUDY
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    judged = optuna.pruners.MedianPruner(n_warmup_steps=STEPS_PER_EPOCH + 1)  # not by one epoch
    with usable(path, Exception):
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name="search",
            direction="maximize" if objective.mode == "max" else "minimize",
            pruner=judged if prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        before, trials = study.user_attrs.get("objective", str(objective)), study.trials
    if before != str(objective):
        raise UserError(f"{directory} is a search for {before}, not {objective}: begin another")
    tried = {pair for trial in trials for pair in trial.distributions.items()}
    if tried - set(space.items()):
        raise UserError(f"{path} is of another search than {directory}/search.json")
    study.set_user_attr("objective", str(objective))
    # The same command tries the same values; one that goes on must not repeat the first ones.
    study.sampler = optuna.samplers.TPESampler(seed=len(trials))
    return study


def reconciled(
    directory: Path, study: Study, recipe: Recipe, prune: bool, space: Space, shared: Sequence[str]
) -> Study:
    """Return the study, made anew from the trials' directories where it does not agree with them.

    Results are credited to the values in a trial's own `config.json`. A study that was truncated,
    or lost rows, is put aside.
    """
    objective = recipe.objective
    on_disk = TrialsOnDisk.read(directory, recipe, space, with_defaults(shared))
    path = directory / STUDY
    with usable(path, Exception):
        difference = on_disk.disagreement(study, space, objective.best_key)
    if difference is None:
        return study
    trials = on_disk.as_trials(space, objective.best_key, f"val/{objective.metric}")
    with writing(str(path)):
        aside = put_aside(path)
    say(f"{path.name} does not fit the trials ({difference}): made anew; {aside.name} has the old")
    study = open_study(directory, objective, prune, space)
    study.add_trials(trials)
    study.sampler = optuna.samplers.TPESampler(seed=len(trials))
    return study


@contextmanager
def usable(path: Path, errors: type[Exception] = SQLAlchemyError) -> Iterator[None]:
    """Turn what a damaged file of a study, or a full disk, leads to, into a sentence."""
    try:
        yield
    except errors as problem:
        message = str(problem).partition("\n")[0]
        advice = "move it away, and the same command makes another from the trials' directories"
        raise UserError(
            f"{path} can't be used ({type(problem).__name__}): {message}: {advice}"
        ) from None


def finished_trials(study: Study) -> list[FrozenTrial]:
    finished = study.get_trials(states=(TrialState.COMPLETE,))
    more_is_better = study.direction == StudyDirection.MAXIMIZE
    return sorted(finished, key=lambda trial: float(trial.value or 0), reverse=more_is_better)


@dataclass
class Search:
    """Carries out the trials of a study, each a normal run in its own directory."""

    directory: Path  # absolute
    settings: SearchSettings
    space: Space
    shared: Sequence[str]  # words that all trials have on their command line
    objective: Objective
    study: Study

    def run(self) -> None:
        """Carry out what is left of the search; the trial that runs saves itself on a Ctrl-C."""
        for trial in self.trials():
            directory, began = self.place(trial), time.monotonic()
            words = command_words(self.space, trial.params)
            with closing(TrialRun(self.command(words, directory), directory)) as run:
                state, value, said = self.watch(trial, run)
            self.study.tell(trial, value, state)
            took, total = duration(time.monotonic() - began), self.settings.trials
            say(f"{directory.name} of {total}  {command_line(words)}  {said}  {took}")
            states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
            if states == [TrialState.FAIL] * min(FIRST_TRIALS, total):
                raise UserError(f"no trial succeeds; {directory.name} {said}")

    def trials(self) -> Iterator[Trial]:
        """Yield the trials that a kill left unfinished, then new ones up to their number."""
        for left in self.study.get_trials(states=(TrialState.RUNNING,)):
            if left.params.keys() == self.space.keys():
                yield Trial(self.study, left._trial_id)
            else:  # killed before all of its values were chosen
                self.study.tell(left.number, state=TrialState.FAIL)
        while len(self.study.get_trials(deepcopy=False)) < self.settings.trials:
            yield self.study.ask(dict(self.space))

    def place(self, trial: Trial | FrozenTrial) -> Path:
        return self.directory / f"{TRIAL}{trial.number:03d}"

    def command(self, words: Sequence[str], directory: Path) -> list[str]:
        """Return what starts a trial in its directory, or goes on with what that holds."""
        file = self.settings.config_file
        options = ["--config_file", file] if file is not None else []
        flags = [*words, *with_defaults(self.shared)]
        if "--keep-checkpoints" not in flags:
            flags += ["--keep-checkpoints", "1"]
        return launched(options, self.settings.recipe, flags, directory)

    def watch(self, trial: Trial, run: TrialRun) -> tuple[TrialState, float | None, str]:
        """Return how a trial's run ended, its best value on validation data, what to say of it."""
        name, record = f"val/{self.objective.metric}", None
        metric, reported = describe(name), set(self.study.trials[trial.number].intermediate_values)
        for record in run.follow():
            if record.splits[0] != "validation":
                why = f"{self.settings.recipe} evaluates on test data, which must not choose"
                self.refuse(trial, f"{why}: let its data have a validation split")
            values = intermediate_values(record, name)
            new = values.keys() - reported
            for step in sorted(new):
                trial.report(values[step], step)
            reported |= new
            is_ending = record.last_step == record.fact("plan.total_steps")
            if new and run.is_running() and not is_ending and trial.should_prune():
                said = f"pruned after epoch {max(new) / STEPS_PER_EPOCH:.3g}, {metric.label}"
                return TrialState.PRUNED, None, f"{said} {metric.text(values[max(new)])}"
        status = read_status(run.directory).get("status")
        if status == "preempted":
            again = f"python -m common.tune --study {quoted(shown_path(self.directory))}"
            raise UserError(f"{run.directory} was stopped from outside: go on with {again}")
        if record is None or status != "finished":
            trial.set_user_attr("reason", reason := run.reason())
            return TrialState.FAIL, None, f"failed: {reason}"
        value = record.summary.get(self.objective.best_key)
        if value is None:
            ended = f"{run.directory.name} ended before its first evaluation on validation data"
            advice = "give --eval-every a number of updates, or train for longer"
            self.refuse(trial, f"{ended}: {advice}")
        return TrialState.COMPLETE, value, f"{metric.label} {metric.text(value)}"

    def refuse(self, trial: Trial, sentence: str) -> NoReturn:
        self.study.tell(trial, state=TrialState.FAIL)
        raise UserError(sentence)

    def best_command(self, best: FrozenTrial, recipe: Recipe) -> str:
        """Return the command that gives the figures of the best trial again.

        It starts the recipe as the trials were started, and has each flag that they had, also what
        they settled by themselves.
        """
        file = self.settings.config_file
        start = ["python"]
        if file is not None:
            start = ["accelerate", "launch", "--config_file", file]
        words = [*command_words(self.space, best.params), *with_defaults(self.shared)]
        words += settled_words(recipe, read_directory(self.place(best)))
        return command_line([*start, self.settings.recipe, *words])


def with_defaults(shared: Sequence[str]) -> list[str]:
    """Return the flags of all trials; where they name no validation share, 10 % are held out.

    Test data must not choose: where there is no validation split, train gives some.
    """
    is_stated = "--validation-share" in shared
    return [*shared] if is_stated else [*shared, "--validation-share", "0.1"]
