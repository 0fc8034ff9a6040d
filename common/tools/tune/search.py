"""Runs the trials of a search: asks Optuna for values, and runs one trial after another.

A search that was killed first continues its unfinished trial when it starts again.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from common.console import say
from common.errors import UserError
from common.objective import Objective
from common.run_directory.status import read_status
from common.system.platforms.commands import command_line, quoted, shown_path
from common.tools.compare.readers.run_record import RunRecord
from common.tools.launching.command import command_of_run
from common.tools.launching.launched_run import LaunchedRun
from common.tools.tune.recovery import (
    STEPS_PER_EPOCH,
    TRIAL,
    intermediate_values,
)
from common.tools.tune.settings import SearchSettings
from common.tools.tune.space import Space, command_words
from common.track.names import Metric, duration, metric_named

# If this many first trials all fail, the command itself is wrong. Other values will not help, so
# the search ends.
FIRST_TRIALS = 3


class TrialResult(NamedTuple):
    """The outcome of one trial."""

    state: TrialState
    value: float | None  # best value of the objective; None unless the trial is complete
    message: str  # the text of the search's line about the trial


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

        The study gets each evaluation of the run once. It prunes a trial that is worse than the
        median of the finished trials at the same epoch.

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
