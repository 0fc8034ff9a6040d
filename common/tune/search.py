"""A search: asks Optuna what to try, carries out one trial after another, and can be killed."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import optuna
import psutil
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from common.console import say
from common.errors import UserError
from common.files import read_json_if_there, read_lines
from common.objective import Objective
from common.track.names import STEP, describe, duration
from common.tune.space import Distribution, command_words

POLL_SECONDS = 0.2
# Trials are judged at the same share of their training: evaluations fall on other updates where
# batches have other sizes.
STEPS_PER_EPOCH = 100
# All failed among so many at the beginning: the command is wrong, not what was tried.
FIRST_TRIALS = 3
# A recipe finishes its update and saves within this; then it is killed.
STOP_SECONDS = 120.0
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class SearchSettings:
    """What a search was asked to do, as `search.json` in its directory keeps it."""

    recipe: str
    flags: list[str]  # as given: ranges, choices, and what all trials share
    config_file: str | None = None  # for `accelerate launch`
    trials: int = 20
    prune: bool = True


def open_study(directory: Path, objective: Objective, prune: bool) -> Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    judged = optuna.pruners.MedianPruner(n_warmup_steps=STEPS_PER_EPOCH + 1)  # not by one epoch
    study = optuna.create_study(
        storage=f"sqlite:///{directory / 'study.db'}",
        study_name="search",
        direction="maximize" if objective.mode == "max" else "minimize",
        pruner=judged if prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    before = study.user_attrs.get("objective", str(objective))
    if before != str(objective):
        raise UserError(f"{directory} is a search for {before}, not {objective}: begin another")
    study.set_user_attr("objective", str(objective))
    # The same command tries the same values; one that goes on must not repeat the first ones.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    return study


def finished_trials(study: Study) -> list[FrozenTrial]:
    finished = study.get_trials(states=(TrialState.COMPLETE,))
    more_is_better = study.direction == StudyDirection.MAXIMIZE
    return sorted(finished, key=lambda trial: float(trial.value or 0), reverse=more_is_better)


@dataclass
class TrialRun:
    """A trial's run in a process of its own, watched through its files."""

    command: Sequence[str]  # it names the directory, and goes on with what that holds
    directory: Path  # of the run, absolute: its processes are known by it
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.log = self.directory.with_name(f"{self.directory.name}.log")

    def start(self) -> None:
        """Start the run; it ends, saving itself, when this process does."""
        if left := self.wait_for_processes():
            raise UserError(f"process {left[0].pid} still trains in {self.directory}: end it first")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={"WANDB_RUN_GROUP": self.directory.parent.name, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the search, which passes it on
                preexec_fn=end_with_parent,
            )

    def stop(self) -> None:
        """Let the run save itself and end; kill it if it does not."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        # A launcher may end before the recipe that it launched.
        for left in self.wait_for_processes():
            left.kill()

    def wait_for_processes(self) -> list[psutil.Process]:
        """Wait until nothing runs that names the directory; return what still does."""
        deadline = time.monotonic() + STOP_SECONDS
        while True:
            left = [
                process
                for process in psutil.process_iter(["cmdline", "status"])
                if str(self.directory) in (process.info["cmdline"] or [])
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def read(self, name: str) -> dict[str, Any]:
        return read_json_if_there(self.directory / name) or {}

    def reason(self) -> str:
        """Return why the run failed, in one sentence: its own, or the last that it printed."""
        status = self.read("status.json")
        if status.get("status") == "failed" and status.get("reason"):
            return str(status["reason"])
        code = self.process.returncode if self.process is not None else 0
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        printed = [text for line in lines if (text := line.strip(" │╭╮╰╯─"))]
        errors = [line for line in printed if line.startswith("error: ")]
        said = (errors or printed or ["it printed nothing"])[-1]
        return f"{ended}: {said.removeprefix('error: ')} ({self.log} has all of it)"


def end_with_parent() -> None:
    """Ask Linux to stop this process when the search is gone, even by a kill."""
    if LIBC is not None:
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def trial_name(number: int) -> str:
    return f"trial-{number:03d}"


@dataclass
class Search:
    """Carries out the trials of a study, each a normal run in its own directory."""

    directory: Path  # absolute
    settings: SearchSettings
    space: Mapping[str, Distribution]
    shared: Sequence[str]  # words that all trials have on their command line
    objective: Objective
    study: Study

    def run(self) -> None:
        """Carry out what is left of the search; the trial that runs saves itself on a Ctrl-C."""
        launcher = [sys.executable]
        if self.settings.config_file is not None:
            launcher += ["-m", "accelerate.commands.accelerate_cli", "launch"]
            launcher += ["--config_file", self.settings.config_file]
        for trial in self.trials():
            directory, began = self.directory / trial_name(trial.number), time.monotonic()
            words = command_words(self.space, trial.params)
            given = [*words, *self.shared, "--output-dir", str(directory), "--resume", "auto"]
            # Test data must not choose: where there is no validation split, train gives some.
            for pair in (["--validation-share", "0.1"], ["--keep-checkpoints", "1"]):
                given += [] if pair[0] in given else pair
            run = TrialRun([*launcher, self.settings.recipe, *given], directory)
            try:
                state, value, said = self.watch(trial, run)
            except BaseException:
                run.stop()
                raise
            self.study.tell(trial, value, state)
            took, total = duration(time.monotonic() - began), self.settings.trials
            say(f"{directory.name} of {total}  {shlex.join(words)}  {said}  {took}")
            states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
            count = min(FIRST_TRIALS, total)
            if states == [TrialState.FAIL] * count:
                which = "the only trial" if count == 1 else f"each of the first {count} trials"
                raise UserError(f"{which} failed; the last {said}")

    def trials(self) -> Iterator[Trial]:
        """Yield the trials that a kill left unfinished, then new ones up to their number."""
        for left in self.study.get_trials(states=(TrialState.RUNNING,)):
            if left.params.keys() == self.space.keys():
                yield Trial(self.study, left._trial_id)
            else:  # killed before all of its values were chosen
                self.study.tell(left.number, state=TrialState.FAIL)
        while len(self.study.get_trials(deepcopy=False)) < self.settings.trials:
            yield self.study.ask(dict(self.space))

    def watch(self, trial: Trial, run: TrialRun) -> tuple[TrialState, float | None, str]:
        """Return how a trial's run ended, its best value on validation data, what to say of it."""
        name = f"val/{self.objective.metric}"
        metric = describe(name)
        seen = set(self.study.trials[trial.number].intermediate_values)
        running = run.read("status.json").get("status") != "finished"
        if running:
            run.start()
        while True:
            # Asked first, to miss nothing that was written before.
            running = running and run.process is not None and run.process.poll() is None
            rows = read_lines(run.directory / "metrics.jsonl")
            facts = run.read("config.json")
            if facts and "validation" not in facts["data"]["sizes"]:
                why = f"{self.settings.recipe} evaluates on test data, which must not choose"
                self.refuse(trial, f"{why}: let its data have a validation split")
            for row in rows:
                step = round(row["progress/epoch"] * STEPS_PER_EPOCH)
                if row.get(name) is None or step in seen:
                    continue
                seen.add(step)
                trial.report(row[name], step)
                is_last = row[STEP] >= facts["plan"]["total_steps"]
                if running and not is_last and trial.should_prune():
                    run.stop()
                    said = f"pruned after epoch {row['progress/epoch']:.3g}, {metric.label}"
                    return TrialState.PRUNED, None, f"{said} {metric.text(row[name])}"
            if not running:
                break
            time.sleep(POLL_SECONDS)
        status = run.read("status.json").get("status")
        if status == "preempted":
            again = f"python -m common.tune --study {os.path.relpath(self.directory)}"
            raise UserError(f"{run.directory} was stopped from outside: go on with {again}")
        if status != "finished":
            trial.set_user_attr("reason", reason := run.reason())
            return TrialState.FAIL, None, f"failed: {reason}"
        value = run.read("summary.json").get(self.objective.best_key)
        if value is None:
            ended = f"{run.directory.name} ended before its first evaluation on validation data"
            advice = "give --eval-every a number of updates, or train for longer"
            self.refuse(trial, f"{ended}: {advice}")
        return TrialState.COMPLETE, value, f"{metric.label} {metric.text(value)}"

    def refuse(self, trial: Trial, sentence: str) -> NoReturn:
        self.study.tell(trial, state=TrialState.FAIL)
        raise UserError(sentence)

    def best_command(self) -> str:
        file, recipe = self.settings.config_file, self.settings.recipe
        launch = ["accelerate", "launch", *(["--config_file", file] if file else []), recipe]
        words = command_words(self.space, finished_trials(self.study)[0].params)
        return shlex.join([*launch, *words, *self.shared])
