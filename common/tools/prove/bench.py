"""The test bench: launches observed runs of a recipe, and keeps what they wrote for all checks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.run_directory.directory import read_status
from common.system.platforms import command_line
from common.tools.prove.flags import ProofFlags, flags_of, merged, words_of
from common.tools.prove.launching import Ended, launch, launch_warm, observed_command
from common.tools.prove.observation import (
    Interrupted,
    ObservedLaunch,
    ObservedRun,
    read_launches,
)
from common.tools.prove.observed import Manner
from common.tools.prove.plan import PlannedInterruption, ProbePlan
from common.tools.prove.warm import WarmProcess
from common.tools.recipe import Recipe


@dataclass(frozen=True)
class Interruption:
    """Where a launch is interrupted: at the first chance from update `step` on."""

    manner: Manner
    step: int
    # Of an evaluation or a save: which share of its batches or files has passed, from 0 to 1.
    share: float = 0.5


@dataclass(frozen=True)
class RunSpec:
    """An observed run that a check asks for. Equal specifications share one run."""

    name: str  # of its folder, such as "reference"
    flags: tuple[str, ...] = ()  # words that take the place of the proof's own flags
    processes: int = 1
    # Modules with a function `install(session)`, which the probe calls before the recipe runs. See
    # `common.tools.prove.session.Session`.
    instruments: tuple[str, ...] = ()
    # Whether the usual observers run. They read every tensor, so they wait for the device.
    is_observed: bool = True
    interruptions: tuple[Interruption, ...] = ()  # one for each launch before the last one
    # The number of processes of the launches after the first one; None: the same number.
    resumed_processes: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    # Of each split other than the training split, at most; None: as many as in the reference run.
    evaluation_samples: int | None = None
    # Whether each launch is a fresh interpreter, with a seed of hashes of its own.
    is_fresh: bool = False


class RunFailedError(Exception):
    """A run of the proof did not end as it should. The check that asked for it fails."""


@dataclass
class Bench:
    """Runs a recipe as its user would, with few samples, and caches the observed runs.

    Checks read its fields, and call `run`.
    """

    recipe: Recipe
    folder: Path  # of the whole proof, absolute
    flags: ProofFlags  # of the reference run
    seed: int  # of the draws
    finished: dict[RunSpec, ObservedRun] = field(default_factory=dict)
    failed: dict[RunSpec, str] = field(default_factory=dict)  # the messages, to raise them again
    warm: WarmProcess | None = None  # forks for launches of one process, once it is started

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch of one process, in the reference run."""
        return self.flags.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of an update, in the reference run."""
        return self.flags.accumulation

    @property
    def reference(self) -> ObservedRun:
        """The uninterrupted run on one process, with the flags of the proof."""
        return self.run(RunSpec("reference"))

    def draws(self, name: str) -> random.Random:
        """Return a random generator for a check, which depends on the proof's seed alone."""
        return random.Random(f"{self.seed} {name}")

    def run(self, spec: RunSpec) -> ObservedRun:
        """Return the observed run of a specification; launch it unless that was done before.

        Raises:
            RunFailedError: a launch did not end as it should. The message has the last lines.
        """
        if spec in self.failed:
            raise RunFailedError(self.failed[spec])
        if spec not in self.finished:
            try:
                self.finished[spec] = self.launch_all(spec)
            except RunFailedError as problem:
                self.failed[spec] = str(problem)
                raise
        return self.finished[spec]

    def launch_all(self, spec: RunSpec) -> ObservedRun:
        """Launch a run, and resume it after each interruption until it finishes."""
        folder = self.new_folder(spec.name)
        directory = folder / "run"
        flags = merged(self.flags.flags, flags_of(spec.flags))
        words = [*words_of(flags), "--output-dir", str(directory)]
        command = observed_command(self.recipe.path, words, spec.processes)
        processes = spec.processes
        seconds = 0.0
        for number, interruption in enumerate([*spec.interruptions, None]):
            plan = self.plan(spec, folder, number, interruption)
            ended = self.launch_one(spec, words, processes, plan)
            seconds += ended.seconds
            is_interrupted = was_interrupted(read_launches(folder), number)
            insist_on_end(spec, number, ended, directory, is_interrupted)
            if not is_interrupted:
                break
            words = ["--resume", str(directory)]
            processes = spec.resumed_processes or spec.processes
        return ObservedRun(
            spec.name, directory, read_launches(folder), seconds, command_line(command)
        )

    def launch_one(self, spec: RunSpec, words: list[str], processes: int, plan: ProbePlan) -> Ended:
        """Run one launch of a run to its end, and return how it ended."""
        log = plan.path / f"launch-{plan.launch}.log"
        may_be_forked = processes == 1 and not spec.environment and not spec.is_fresh
        if may_be_forked and WarmProcess.is_possible():
            if self.warm is None:
                self.warm = WarmProcess(self.recipe.path)
            return launch_warm(self.warm, self.recipe.path, words, plan, log)
        command = observed_command(self.recipe.path, words, processes)
        return launch(command, plan, log, dict(spec.environment))

    def close(self) -> None:
        """End the process that forks for launches."""
        if self.warm is not None:
            self.warm.close()
            self.warm = None

    def new_folder(self, name: str) -> Path:
        """Create a folder for an observed run; runs with the same name get numbers."""
        folder = self.folder / name
        number = 1
        while folder.exists():
            number += 1
            folder = self.folder / f"{name}-{number}"
        folder.mkdir(parents=True)
        return folder

    def plan(
        self, spec: RunSpec, folder: Path, number: int, interruption: Interruption | None
    ) -> ProbePlan:
        """Return what the probe of a launch has to do."""
        planned = None
        if interruption is not None:
            planned = PlannedInterruption(
                manner=interruption.manner, step=interruption.step, share=interruption.share
            )
        return ProbePlan(
            folder=str(folder),
            launch=number,
            training_samples=self.flags.training_samples,
            evaluation_samples=spec.evaluation_samples or self.flags.evaluation_samples,
            is_observed=spec.is_observed,
            instruments=spec.instruments,
            interruption=planned,
        )


def was_interrupted(launches: tuple[ObservedLaunch, ...], number: int) -> bool:
    """Whether the probe has interrupted a launch, by its number."""
    return any(launch.launch == number and launch.of(Interrupted) for launch in launches)


def insist_on_end(
    spec: RunSpec, number: int, ended: Ended, directory: Path, is_interrupted: bool
) -> None:
    """Raise a `RunFailedError` if a launch ended otherwise than the probe made it end."""
    if is_interrupted:
        status = read_status(directory)
        if status.status != "failed":
            return
        raise RunFailedError(
            f"launch {number + 1} of the run {spec.name} was interrupted and failed: "
            f"{status.reason or ended.problem()}"
        )
    if ended.status != 0:
        raise RunFailedError(
            f"launch {number + 1} of the run {spec.name} failed: {ended.problem()}"
        )


@dataclass(frozen=True)
class Verdict:
    """The answer of a check."""

    passed: bool | None  # None: the check does not apply to this recipe
    compared: str  # what was compared, with numbers, such as "40 updates, 14 rows, 6 tensors"
    causes: tuple[str, ...] = ()  # what is wrong, and where; the likeliest cause first
    advice: str = ""  # what to change in the recipe


@dataclass(frozen=True)
class Cause:
    """What is wrong, and what to change in the recipe."""

    sentence: str
    advice: str


def failed(compared: str, causes: Sequence[Cause], differences: Sequence[str] = ()) -> Verdict:
    """Return the verdict of a check that fails, with the advice for its first cause.

    Args:
        compared: see `Verdict`.
        causes: the likeliest first; equal sentences are named once.
        differences: of the results, in words, whose cause may be unknown.
    """
    sentences = [*(cause.sentence for cause in causes), *differences]
    advice = causes[0].advice if causes else ""
    return Verdict(False, compared, tuple(dict.fromkeys(sentences)), advice)


def skipped(reason: str) -> Verdict:
    """Return the verdict of a check that can't compare the runs of this recipe."""
    return Verdict(None, f"{reason}: not comparable, skipped")


@dataclass(frozen=True)
class Check:
    """A question about a recipe."""

    name: str  # for `--checks`
    question: str  # one sentence that says what is compared with what
    answer: Callable[[Bench], Verdict]
    # Whether the check runs only if `--checks` names it, such as one that needs several GPUs.
    is_optional: bool = False
