"""A search: asks Optuna what to try, carries out one trial after another, and can be killed."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.comparison_table import duration
from common.console import say
from common.errors import UserError
from common.search_space import Dimension
from common.study import STEPS_PER_EPOCH, SearchSettings, finished_trials
from common.trial import TrialRun

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial, TrialState

OBJECTIVE = "eval/best_accuracy"
POLL_SECONDS = 0.2
# All failed among so many at the beginning: the command is wrong, not what was tried.
FIRST_TRIALS = 3


@dataclass
class Search:
    """Carries out the trials of a study, each a normal run in its own directory."""

    directory: Path  # absolute
    settings: SearchSettings
    dimensions: Sequence[Dimension]
    shared: Sequence[str]  # words that all trials have on their command line
    study: Study
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self) -> None:
        """Carry out what is left of the search.

        Raises:
            UserError: when the first trials all fail, one is stopped from outside, or there is no
                validation data to choose by.
            KeyboardInterrupt: after the trial that was running has saved itself.
        """
        self.environment.setdefault("WANDB_RUN_GROUP", self.directory.name)
        for trial in self.trials():
            words = [word for dimension in self.dimensions for word in dimension.suggest(trial)]
            run = TrialRun(
                [*self.launcher(), *words, *self.shared, *self.given_to_each(trial.number)],
                self.trial_directory(trial.number),
                self.environment,
            )
            try:
                state, value, said = self.watch(trial, run)
            except BaseException:
                run.stop()
                raise
            self.study.tell(trial, value, state)
            say(f"{run.directory.name} of {self.settings.trials}  {shlex.join(words)}  {said}")
            self.check_beginning(said)

    def trials(self) -> Iterator[Trial]:
        """Yield the trials that a kill left unfinished, then new ones up to their number."""
        from optuna.trial import Trial, TrialState

        for left in self.study.get_trials(states=(TrialState.RUNNING,)):
            yield Trial(self.study, left._trial_id)
        while len(self.study.get_trials(deepcopy=False)) < self.settings.trials:
            yield self.study.ask()

    def trial_directory(self, number: int) -> Path:
        """Return the directory of a trial's run."""
        return self.directory / f"trial-{number:03d}"

    def launcher(self) -> list[str]:
        """Return the words before a trial's flags."""
        if self.settings.config_file is None:
            return [sys.executable, self.settings.recipe]
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        return [*launch, "--config_file", self.settings.config_file, self.settings.recipe]

    def given_to_each(self, number: int) -> list[str]:
        """Return the flags that the search itself gives to a trial."""
        words = ["--output-dir", str(self.trial_directory(number)), "--resume", "auto"]
        # Test data must not choose: where there is no validation split, some of train becomes one.
        defaults = {"--validation-share": "0.1", "--keep-checkpoints": "1"}
        for flag, value in defaults.items():
            if flag not in [*self.shared, *(dimension.flag for dimension in self.dimensions)]:
                words += [flag, value]
        return words

    def watch(self, trial: Trial, run: TrialRun) -> tuple[TrialState, float | None, str]:
        """Start a trial's run and watch it to its end, or until it is pruned.

        Returns:
            how it ended, its best validation accuracy where it finished, and what to say of it.
        Raises:
            UserError: see `run`.
        """
        from optuna.trial import TrialState

        began = time.monotonic()
        seen = set(self.study.trials[trial.number].intermediate_values)
        if not run.is_finished:
            run.start()
        running = True
        while running:
            running = run.is_running  # asked first, so that nothing written before is missed
            for row in run.evaluations():
                step = round(row["progress/epoch"] * STEPS_PER_EPOCH)
                if step in seen:
                    continue
                self.check_validation(trial, run)
                seen.add(step)
                trial.report(row["eval/accuracy"], step)
                planned = run.read("config.json")["plan"]["total_steps"]
                is_last = row["progress/global_step"] >= planned
                if running and not is_last and trial.should_prune():
                    run.stop()
                    epoch = f"{row['progress/epoch']:.3g}"
                    said = f"pruned after epoch {epoch}, accuracy {row['eval/accuracy']:.4f}"
                    return TrialState.PRUNED, None, said
            time.sleep(POLL_SECONDS if running else 0)
        if run.is_finished:
            self.check_validation(trial, run)
            value = run.read("summary.json").get(OBJECTIVE)
            if value is None:
                self.study.tell(trial, state=TrialState.FAIL)
                raise UserError(
                    f"{run.directory.name} ended before its first evaluation on validation data: "
                    "give --eval-every a number of updates, or train for longer"
                )
            said = f"accuracy {value:.4f}  {duration(time.monotonic() - began)}"
            return TrialState.COMPLETE, value, said
        if run.read("status.json").get("status") == "preempted":
            raise UserError(
                f"{run.directory} was stopped from outside: go on with python -m common.tune "
                f"--study {os.path.relpath(self.directory)}"
            )
        reason = run.reason()
        trial.set_user_attr("reason", reason)
        return TrialState.FAIL, None, f"failed: {reason}"

    def check_validation(self, trial: Trial, run: TrialRun) -> None:
        """See that accuracies are of validation data.

        Raises:
            UserError: where they are of test data; the trial counts as failed.
        """
        from optuna.trial import TrialState

        if "validation" in run.read("config.json").get("data", {}).get("sizes", {}):
            return
        self.study.tell(trial, state=TrialState.FAIL)
        raise UserError(
            f"{self.settings.recipe} evaluates on test data, which must not choose: let its data "
            "have a validation split"
        )

    def check_beginning(self, said: str) -> None:
        """Stop a search whose first trials all failed.

        Raises:
            UserError: with what the last of them said.
        """
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        count = min(FIRST_TRIALS, self.settings.trials)
        if len(trials) == count and all(trial.state == TrialState.FAIL for trial in trials):
            which = "the only trial" if count == 1 else f"each of the first {count} trials"
            raise UserError(f"{which} failed; the last {said}")

    def best_command(self) -> str:
        """Return the command that repeats the best trial, with all training data."""
        best = finished_trials(self.study)[0]
        words = [word for dimension in self.dimensions for word in dimension.suggest(best)]
        configuration = self.settings.config_file
        launch = ["--config_file", configuration] if configuration else []
        return shlex.join(
            ["accelerate", "launch", *launch, self.settings.recipe, *words, *self.shared]
        )
