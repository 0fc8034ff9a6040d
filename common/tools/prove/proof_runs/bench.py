"""The test bench: launches observed runs of a recipe, and keeps their records for all checks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.run_directory.status import read_status
from common.system.platforms.commands import command_line
from common.tools.prove.observation.launch_plan import PlannedInterruption, ProbePlan
from common.tools.prove.proof_runs.launching import (
    LaunchResult,
    launch,
    launch_warm,
    observed_command,
)
from common.tools.prove.proof_runs.recipe_flags import ProofFlags, flag_words, merged, parse_flags
from common.tools.prove.proof_runs.warm_process import WarmProcess
from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun, read_processes
from common.tools.prove.records.run_records import Interruption
from common.tools.recipe import Recipe


@dataclass(frozen=True)
class RunSpec:
    """The specification of an observed run. Checks with equal specifications share one run."""

    name: str  # the name of the run's folder, such as "reference"
    flags: tuple[str, ...] = ()  # flags that replace those of the proof, as words
    processes: int = 1
    # Modules with a function `install(session)`, which the probe calls before the recipe runs. See
    # `common.tools.prove.observation.session.Session`.
    instruments: tuple[str, ...] = ()
    # Whether to write the records of updates and samples that read tensors. Reading a tensor waits
    # for the device, so runs that measure speed, memory or waits, or need only the results, leave
    # these records out.
    reads_tensors: bool = True
    interruptions: tuple[PlannedInterruption, ...] = ()  # one for each launch before the last one
    # The number of processes of the launches after the first one; None: the same number.
    resumed_processes: int | None = None
    environment: tuple[tuple[str, str], ...] = ()  # additional variables of each launch
    # The most samples of each split except the training split; None: as in the reference run.
    evaluation_samples: int | None = None
    # The samples of a batch in evaluations; None: as in training.
    evaluation_batch_size: int | None = None
    # Whether each launch is a fresh interpreter instead of a fork. Forks of the warm process share
    # the seed of Python's hashes, which hides results that depend on the order of a set.
    is_fresh: bool = False


class RunFailedError(Exception):
    """A run of the proof has failed. The check that needs the run fails as well."""


@dataclass
class Bench:
    """Runs a recipe as its user would, but with few samples, and caches the observed runs."""

    recipe: Recipe
    folder: Path  # the absolute path of the folder for all runs
    flags: ProofFlags  # the flags of the reference run
    seed: int  # the seed of all random choices of the proof
    finished: dict[RunSpec, ObservedRun] = field(default_factory=dict)
    # The error messages of failed runs, so that each later check that needs the run fails as well.
    failed: dict[RunSpec, str] = field(default_factory=dict)
    # The process that forks for each launch of one process; None until the first fork is needed.
    warm: WarmProcess | None = None

    @property
    def batch_size(self) -> int:
        """The number of samples in a micro-batch of one process, in the reference run."""
        return self.flags.batch_size

    @property
    def accumulation(self) -> int:
        """The number of micro-batches in an update, in the reference run."""
        return self.flags.accumulation

    @property
    def reference(self) -> ObservedRun:
        """The reference run: uninterrupted, on one process, with the flags of the proof."""
        return self.run(RunSpec("reference"))

    def random_generator(self, name: str) -> random.Random:
        """Return a random generator that depends only on the proof's seed and on a name.

        So its numbers do not depend on which checks run, or in which order.
        """
        return random.Random(f"{self.seed} {name}")

    def run(self, spec: RunSpec) -> ObservedRun:
        """Return the observed run of a specification. Only the first call launches it.

        Raises:
            RunFailedError: a launch has failed, now or in an earlier call. The message says how.
        """
        if spec in self.failed:
            raise RunFailedError(self.failed[spec])
        if spec not in self.finished:
            try:
                self.finished[spec] = self.launch_until_finished(spec)
            except RunFailedError as problem:
                self.failed[spec] = str(problem)
                raise
        return self.finished[spec]

    def launch_until_finished(self, spec: RunSpec) -> ObservedRun:
        """Launch a run, and resume it after each interruption until it finishes.

        Raises:
            RunFailedError: a launch has failed.
        """
        folder = self.new_folder(spec.name)
        directory = folder / "run"
        flags = merged(self.flags.values, parse_flags(spec.flags))
        words = [*flag_words(flags), "--output-dir", str(directory)]
        command = observed_command(self.recipe.path, words, spec.processes)
        processes = spec.processes
        seconds = 0.0
        interruptions = [*spec.interruptions, None]  # the last launch has no interruption
        for number, interruption in enumerate(interruptions):
            plan = self.probe_plan(spec, folder, number, interruption)
            result = self.launch_once(spec, words, processes, plan)
            seconds += result.seconds
            is_interrupted = was_interrupted(read_processes(folder), number)
            if not is_interrupted:  # the run has ended, perhaps before a planned interruption
                require_success(spec, number, result, directory)
                break
            require_resumable(spec, number, result, directory)
            words = ["--resume", str(directory)]
            processes = spec.resumed_processes or spec.processes
        return ObservedRun(
            spec.name, directory, read_processes(folder), seconds, command_line(command)
        )

    def launch_once(
        self, spec: RunSpec, words: list[str], processes: int, plan: ProbePlan
    ) -> LaunchResult:
        """Run one launch of a run to its end, and return how it ended.

        A launch of one process is a fork of the warm process where possible, which saves time.
        """
        log = plan.path / f"launch-{plan.launch}.log"
        # A fork can't get the additional variables: `launch_warm` does not take them.
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

    def probe_plan(
        self, spec: RunSpec, folder: Path, number: int, interruption: PlannedInterruption | None
    ) -> ProbePlan:
        """Return the plan for the probe of one launch.

        Args:
            number: the number of the launch, from 0.
        """
        return ProbePlan(
            folder=str(folder),
            launch=number,
            training_samples=self.flags.training_samples,
            evaluation_samples=spec.evaluation_samples or self.flags.evaluation_samples,
            evaluation_batch_size=spec.evaluation_batch_size,
            reads_tensors=spec.reads_tensors,
            instruments=spec.instruments,
            interruption=interruption,
        )


def was_interrupted(observed_processes: Sequence[ObservedProcess], number: int) -> bool:
    """Whether the probe has interrupted the launch with this number."""
    return any(
        process.launch == number and process.of(Interruption) for process in observed_processes
    )


def require_resumable(spec: RunSpec, number: int, result: LaunchResult, directory: Path) -> None:
    """Raise a `RunFailedError` if a launch that the probe has interrupted can't be resumed.

    The exit status says nothing after an interruption, so the run's own status decides: only
    "failed" is an error. A run may even have finished before its ranks agreed on the SIGTERM, for
    which they look about once a second.

    Args:
        number: the number of the launch, from 0.
        directory: the run directory, whose `status.json` is read.
    """
    status = read_status(directory)
    if status.status == "failed":
        raise RunFailedError(
            f"launch {number + 1} of the run {spec.name} failed when the proof interrupted it: "
            f"{status.reason or result.problem()}"
        )


def require_success(spec: RunSpec, number: int, result: LaunchResult, directory: Path) -> None:
    """Raise a `RunFailedError` if a launch that was not interrupted has failed."""
    if result.status != 0:
        status = read_status(directory)
        # An earlier launch may have written the status, if this one failed before it had a run.
        reason = status.reason if status.status == "failed" else None
        raise RunFailedError(
            f"launch {number + 1} of the run {spec.name} failed: {reason or result.problem()}"
        )
