"""Runs a search: asks Optuna for values, runs one trial after another, and reports on them.

A search that was killed first continues its unfinished trial when it starts again.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from common.console import say
from common.errors import UserError
from common.objective import Objective
from common.run_directory.records import CONFIG
from common.run_directory.status import read_status
from common.system.platforms import command_line, quoted, shown_path
from common.system.wording import counted
from common.tools.compare.comparison import compare
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.table import show
from common.tools.launching.command import command_of_run
from common.tools.launching.folder import locked_folder_of_runs
from common.tools.launching.launched_run import LaunchedRun
from common.tools.launching.validation_share import with_validation_share
from common.tools.recipe import Recipe, load_recipe
from common.tools.tune.certainty import certainty_lines
from common.tools.tune.ranking import (
    count_of_settings,
    mean_over_seeds,
    trials_with_settings_of,
)
from common.tools.tune.records import write_settings
from common.tools.tune.recovery import (
    STEPS_PER_EPOCH,
    TRIAL,
    intermediate_values,
    resolved_words,
)
from common.tools.tune.settings import SearchSettings
from common.tools.tune.space import Space, command_words, parse_space
from common.tools.tune.study import (
    STUDY,
    finished_trials,
    open_study,
    rebuild_if_inconsistent,
    using_study,
)
from common.track.names import Metric, duration, metric_named

# If this many first trials all fail, the command itself is wrong. Other values will not help, so
# the search ends.
FIRST_TRIALS = 3
TRIALS_SHOWN = 5  # trials in the table at the end


class TrialResult(NamedTuple):
    """The outcome of one trial."""

    state: TrialState
    value: float | None  # best value of the objective; None unless the trial is complete
    message: str  # the text of the search's line about the trial


def run_search(directory: Path, settings: SearchSettings) -> None:
    """Run the rest of the search in `directory`, and report on the search.

    Raises:
        UserError: the search can't begin or go on, or none of its trials finished.
        SystemExit: with status 130, after Ctrl-C or SIGTERM.
    """
    recipe = load_recipe(Path(settings.recipe))
    space, stated = parse_space(settings.flags, recipe)
    shared = with_validation_share(stated)
    with (
        locked_folder_of_runs(directory, "--study", command_to_continue(directory)),
        using_study(directory / STUDY),
    ):
        study = open_study(directory, recipe.objective, settings.prune, space)
        # A kill may have left the study without rows that the trials' directories have.
        study = rebuild_if_inconsistent(directory, study, recipe, settings.prune, space, shared)
        write_settings(directory, settings)
        search = Search(directory, settings, space, shared, recipe.objective, study)
        say(f"search: {len(study.trials)} of {settings.trials} trials begun in {directory}")
        search.run()
        report_on_search(search, recipe)


def command_to_continue(directory: Path) -> str:
    return f"recipes tune --study {quoted(shown_path(directory))}"


@dataclass
class Search:
    """Runs the trials of a study. Each is a normal run in a directory of its own."""

    directory: Path  # an absolute path
    settings: SearchSettings
    space: Space
    shared: Sequence[str]  # words that all trials have on their command line
    objective: Objective
    study: Study

    @property
    def metric(self) -> Metric:
        """How the objective's metric is shown."""
        return metric_named(self.objective.validation_key)

    def run(self) -> None:
        """Run the remaining trials. On Ctrl-C the current trial saves itself.

        Raises:
            UserError: the first trials all failed, a trial has no result on validation data, or a
                signal stopped the trial.
        """
        total = self.settings.trials
        for trial in self.trials():
            directory = self.directory_of(trial)
            started = time.monotonic()
            trial_flags = command_words(self.space, trial.params)
            with closing(LaunchedRun(self.command(trial_flags, directory), directory)) as run:
                result = self.watch(trial, run)
            self.study.tell(trial, result.value, result.state)
            seconds = duration(time.monotonic() - started)
            flags = command_line(trial_flags)
            say(f"{directory.name} of {total}  {flags}  {result.message}  {seconds}")
            states = [begun_trial.state for begun_trial in self.study.get_trials(deepcopy=False)]
            have_all_failed = all(state == TrialState.FAIL for state in states)
            if have_all_failed and len(states) == min(FIRST_TRIALS, total):
                raise UserError(
                    f"all trials so far failed; {directory.name} {result.message}",
                    advice=self.advice_after_failures(),
                )

    def advice_after_failures(self) -> str:
        """Return what to do after the first trials have all failed."""
        if self.settings.trials <= FIRST_TRIALS:  # no trial is left to continue with
            return "correct the cause of the failures, and start a new search"
        command = command_to_continue(self.directory)
        return (
            f"correct the cause of the failures and continue with {command}, or start a new search "
            "with other values"
        )

    def trials(self) -> Iterator[Trial]:
        """Yield the trials that a kill or a signal left unfinished, then new ones up to the limit.

        The limit counts all trials of the study, also failed ones.
        """
        for unfinished in self.study.get_trials(states=(TrialState.RUNNING,)):
            if unfinished.params.keys() == self.space.keys():
                yield Trial(self.study, unfinished._trial_id)
            else:  # the trial was killed before all of its values were chosen
                self.study.tell(unfinished.number, state=TrialState.FAIL)
        while len(self.study.get_trials(deepcopy=False)) < self.settings.trials:
            yield self.study.ask(dict(self.space))

    def directory_of(self, trial: Trial | FrozenTrial) -> Path:
        return self.directory / f"{TRIAL}{trial.number:03d}"

    def command(self, trial_flags: Sequence[str], directory: Path) -> list[str]:
        """Return the command that starts a trial in a directory, or resumes the trial there.

        Args:
            trial_flags: the words that give the searched flags the trial's values.
            directory: the trial's directory.
        """
        config_file = self.settings.config_file
        launcher_options = ["--config_file", config_file] if config_file is not None else []
        flags = [*trial_flags, *self.shared]
        if "--keep-checkpoints" not in flags:  # checkpoints of many trials could fill the disk
            flags += ["--keep-checkpoints", "1"]
        return command_of_run(launcher_options, self.settings.recipe, flags, directory)

    def watch(self, trial: Trial, run: LaunchedRun) -> TrialResult:
        """Follow a trial's run to its end, or until the study prunes it.

        The study gets each evaluation of the run once. It prunes a trial that is worse than others
        were at the same epoch.

        Raises:
            UserError: the trial has no validation data, a signal stopped it, or it never evaluated.
        """
        # The steps of a study are hundredths of an epoch. A trial that continues has reported some
        # evaluations before.
        reported_steps = set(self.study.trials[trial.number].intermediate_values)
        record = None  # stays None if the run ends before it has written `config.json`
        for record in run.follow():
            self.require_validation_data(trial, record)
            values = intermediate_values(record, self.objective.validation_key)
            new_steps = values.keys() - reported_steps
            for step in sorted(new_steps):
                trial.report(values[step], step)
            reported_steps |= new_steps
            # After a run's last update, pruning would save no time, so the trial may finish.
            has_trained = record.last_step == record.saved_config.plan.total_steps
            if new_steps and run.is_running() and not has_trained and trial.should_prune():
                newest_step = max(new_steps)
                message = (
                    f"pruned after epoch {newest_step / STEPS_PER_EPOCH:.3g}, "
                    f"{self.metric.label} {self.metric.text(values[newest_step])}"
                )
                return TrialResult(TrialState.PRUNED, None, message)
        return self.result_of(trial, run, record)

    def require_validation_data(self, trial: Trial, record: RunRecord) -> None:
        """End the search with a `UserError` if its trials are evaluated on test data."""
        if record.splits[0] != "validation":
            problem = f"{self.settings.recipe} evaluates on test data, which must not choose trials"
            advice = "add a validation split to its data"
            if not record.flags.get("validation_share"):
                # A share of 0 was stated. Without the flag, the search passes a share of 0.1.
                advice = f"start a new search without --validation-share, or {advice}"
            self.refuse(trial, problem, advice)

    def result_of(self, trial: Trial, run: LaunchedRun, record: RunRecord | None) -> TrialResult:
        """Return the result of a trial whose run has ended.

        A run that a signal stopped has no result. Its trial stays unfinished in the study, so that
        a repetition of the search continues the run.

        Args:
            trial: the study's trial.
            run: the trial's run.
            record: the last record of the run; None if it never wrote one.

        Raises:
            UserError: a signal stopped the run, or the run never evaluated.
        """
        status = read_status(run.directory).status
        if status == "preempted":
            command = command_to_continue(self.directory)
            raise UserError(
                f"the trial in {run.directory} was stopped by a signal",
                advice=f"continue the search with {command}",
            )
        if record is None or status != "finished":
            reason = run.reason()
            trial.set_user_attr("reason", reason)
            return TrialResult(TrialState.FAIL, None, f"failed: {reason}")
        value = record.summary.get(self.objective.best_key)
        if value is None:
            problem = f"{run.directory.name} ended before its first evaluation on validation data"
            advice = (
                "start a new search with --eval-every and a number of updates, or with a longer "
                "training"
            )
            self.refuse(trial, problem, advice)
        message = f"{self.metric.label} {self.metric.text(value)}"
        return TrialResult(TrialState.COMPLETE, value, message)

    def refuse(self, trial: Trial, problem: str, advice: str) -> NoReturn:
        """Mark a trial as failed and end the search with a `UserError`."""
        self.study.tell(trial, state=TrialState.FAIL)
        raise UserError(problem, advice=advice)

    def best_command(self, best: FrozenTrial, recipe: Recipe) -> str:
        """Return the command that trains the best trial again.

        The command starts the recipe as the trials were started. It states the flags that all
        trials share, the trial's values of the searched flags, and what the trial chose itself: see
        `resolved_words`. It leaves out the directory and the ``--keep-checkpoints`` that `command`
        adds, on which no figure depends.
        """
        config_file = self.settings.config_file
        start = ["python"]
        if config_file is not None:
            start = ["accelerate", "launch", "--config_file", config_file]
        flags = [*command_words(self.space, best.params), *self.shared]
        flags += resolved_words(recipe, read_directory(self.directory_of(best)))
        return command_line([*start, self.settings.recipe, *flags])


def report_on_search(search: Search, recipe: Recipe) -> None:
    """Show the best trials, draw the search, and print the command that repeats the best trial.

    Raises:
        UserError: no trial finished.
    """
    ranked = ranked_trials(search)
    directories = [str(search.directory_of(trial)) for trial in ranked[:TRIALS_SHOWN]]
    show(compare(read_runs(directories)))
    draw(search)
    tried_trials = search.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    records = readable_records(search, ranked)
    for line in certainty_lines(records, recipe, search.space, count_of_settings(tried_trials)):
        say(line)
    say(best_line(search, ranked))
    say(search.best_command(ranked[0], recipe))


def ranked_trials(search: Search) -> list[FrozenTrial]:
    """Return the finished trials, those with the best settings first.

    Only trials that still have a directory count: the user may have removed some.

    Raises:
        UserError: there is no such trial.
    """
    finished = finished_trials(search.study)
    ranked = [trial for trial in finished if (search.directory_of(trial) / CONFIG).is_file()]
    if not ranked:
        raise no_result_error(search, has_finished=bool(finished))
    return ranked


def draw(search: Search) -> None:
    """Write the picture of a search, and say where it is."""
    from common.tools.tune.plot import plot_search

    picture = search.directory / "search.png"
    plot_search(search.study, search.metric.heading, picture)
    say(f"picture: {shown_path(picture)}")


def best_line(search: Search, ranked: Sequence[FrozenTrial]) -> str:
    """Return the line that names the best trial, with its result or the mean over its seeds.

    Args:
        ranked: the finished trials, those with the best settings first.
    """
    metric = search.metric
    best = ranked[0]
    repetitions = trials_with_settings_of(best, ranked)
    figure = f"validation {metric.label} {metric.text(mean_over_seeds(repetitions))}"
    name = search.directory_of(best).name
    if len(repetitions) == 1:
        return f"best: {name}, {figure}"
    return f"best: {name} and {len(repetitions) - 1} more with these settings, mean {figure}"


def no_result_error(search: Search, has_finished: bool) -> UserError:
    """Return the error for a search without a single finished trial to report on.

    Args:
        has_finished: whether trials finished, whose directories are gone now.
    """
    if has_finished:
        total = len(search.study.get_trials(deepcopy=False))
        return UserError(
            f"the directories of the finished trials in {shown_path(search.directory)} were "
            f"removed, or have no {CONFIG}",
            advice=(
                "put them back, or run more trials with "
                f"{command_to_continue(search.directory)} --trials {total + FIRST_TRIALS}"
            ),
        )
    failed = search.study.get_trials(states=(TrialState.FAIL,))
    reasons = [trial.user_attrs["reason"] for trial in failed if "reason" in trial.user_attrs]
    last_reason = f"; the last reason is: {reasons[-1]}" if reasons else ""
    return UserError(
        f"no trial of the search finished ({counted(len(failed), 'trial')} failed{last_reason})",
        advice="correct the cause of the failures, and start a new search",
    )


def readable_records(search: Search, trials: Sequence[FrozenTrial]) -> list[RunRecord]:
    """Return the records of trials, in their order, without those whose files are damaged."""
    records = []
    for trial in trials:
        with suppress(UserError):
            records.append(read_directory(search.directory_of(trial)))
    return records
