"""Measures the speed of groups of processes, also over slow links, for `scaling.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks import REPOSITORY
from benchmarks.harness.ports import free_port
from benchmarks.harness.rounds import Contestant, Measurement, Round, Suite
from benchmarks.scaling_study.link import ADDRESSES, DEVICE, Link, LinkError
from benchmarks.scaling_study.messages import TrainingAnswer, TrainingRequest
from benchmarks.scaling_study.options import Options

SETTINGS: dict[str, dict[str, object]] = {
    "mnist_mlp": {"hidden_sizes": (512, 512), "image_size": 16},
    "resnet": {"image_size": 32},
}
PROFILED_UPDATES = 3
LOG_CHARACTERS = 4000  # of the log's end, shown when a process ends early


class ScalingRun(NamedTuple):
    """A training whose speed is measured."""

    processes: int
    batch: int  # per process
    link: str | None = None  # between two namespaces, as "Mbit/s:milliseconds"
    strategy: str = "DDP"
    is_fitted: bool = True  # whether the model is fitted to it, or only checked against it

    @property
    def name(self) -> str:
        """The run in words, for tables."""
        name = f"{self.processes} × {self.batch:,}, {self.strategy}"
        if self.link is None:
            return name
        rate, _, delay = self.link.partition(":")
        return f"{name}, {rate} Mbit/s, {delay} ms"


@dataclass
class Result:
    """The measured speed of a run."""

    samples_per_second: float  # median over the rounds
    rounds: list[float]  # samples/s of each round
    shares: dict[str, float] = field(default_factory=dict)  # of communication, if profiled


@dataclass
class Measured:
    """The results of all runs."""

    link: str  # how the link is slowed, or why there is none
    parameters: list[int] = field(default_factory=list)  # elements of each, in the model's order
    results: dict[ScalingRun, Result] = field(default_factory=dict)


def plan(options: Options, has_link: bool) -> list[ScalingRun]:
    """Return the runs to measure."""
    batch = options.batch
    sizes: set[tuple[int, int]] = set()
    for count in options.processes:
        sizes.add((count, batch))  # weak scaling
        sizes.add((count, batch // count))  # strong scaling
        sizes.add((1, batch // count))  # the time of computing alone
    runs = [ScalingRun(processes, size) for processes, size in sorted(sizes)]
    if has_link:
        unseen = options.check_links
        runs += [ScalingRun(2, batch, link) for link in options.fit_links]
        runs += [ScalingRun(2, batch, link, is_fitted=False) for link in unseen]
        runs += [ScalingRun(2, batch // 2, link, is_fitted=False) for link in unseen[:1]]
        runs += [ScalingRun(2, batch, link, "DDP fp16", is_fitted=False) for link in unseen[:2]]
    return runs


class ProcessGroup:
    """Processes that train together on request, each running `rank.py`."""

    def __init__(self, count: int, link: Link | None = None) -> None:
        """Start `count` processes; with a link, one in each of its namespaces."""
        import torch

        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with this object
        self.processes: list[subprocess.Popen[str]] = []
        on_cpu = not torch.accelerator.is_available()
        self.threads = 1 if on_cpu else None
        variables = shared_variables(count, link, on_cpu)
        for rank in range(count):
            self.processes.append(self.start(rank, count, variables, link))
            if on_cpu:
                bind_to_core(self.processes[-1].pid, rank)

    def start(
        self, rank: int, count: int, variables: dict[str, str], link: Link | None
    ) -> subprocess.Popen[str]:
        """Start the process of one rank."""
        prefix = ["ip", "netns", "exec", link.namespaces[rank]] if link else []
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.scaling_study.rank"],
            cwd=REPOSITORY,
            env={**os.environ, **variables, **rank_variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            encoding="utf-8",
        )

    def train(self, request: TrainingRequest) -> TrainingAnswer:
        """Let all processes train, and return the answer of rank 0.

        Raises:
            SystemExit: when a process has ended; with the end of its log.
        """
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(request.to_line())
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            self.log.seek(0)
            end_of_log = self.log.read()[-LOG_CHARACTERS:]
            raise SystemExit(f"a training process ended early; the end of its log:\n{end_of_log}")
        return TrainingAnswer.from_line(lines[0])

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.communicate()


def shared_variables(count: int, link: Link | None, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that all processes of a group share."""
    variables: dict[str, str] = {}
    if on_cpu:
        # Threads that spin would keep the thread that sends gradients from its core.
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if count > 1:
        variables["WORLD_SIZE"] = str(count)
        variables["LOCAL_WORLD_SIZE"] = str(count)
        variables["MASTER_ADDR"] = ADDRESSES[0] if link else "127.0.0.1"
        variables["MASTER_PORT"] = str(free_port())
        variables["GLOO_SOCKET_IFNAME"] = DEVICE if link else "lo"
        if on_cpu:
            variables["ACCELERATE_USE_CPU"] = "true"
    return variables


def bind_to_core(process_id: int, rank: int) -> None:
    """Bind a process to one of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process_id, {cores[rank % len(cores)]})


class RunTimer:
    """Times the updates of runs, in process groups that it starts when they are first needed."""

    def __init__(self, recipe: str, link: Link | None) -> None:
        self.recipe = recipe
        self.link = link
        self.groups: dict[tuple[int, bool], ProcessGroup] = {}  # by processes and whether linked

    def train(self, run: ScalingRun, updates: int, profile: bool = False) -> TrainingAnswer:
        """Train a run for `updates` updates that count."""
        key = (run.processes, run.link is not None)
        is_new = key not in self.groups
        if is_new:
            self.groups[key] = ProcessGroup(run.processes, self.link if run.link else None)
        group = self.groups[key]
        if run.link and self.link:
            rate, delay = run.link.split(":")
            self.link.slow(float(rate), float(delay))
        compression = "fp16" if run.strategy == "DDP fp16" else "no"
        request = TrainingRequest(
            recipe=self.recipe,
            updates=updates,
            profile=profile,
            threads=group.threads,
            settings={
                **SETTINGS[self.recipe],
                "batch_size": run.batch,
                "gradient_compression": compression,
                "dataset": "synthetic",
            },
        )
        if is_new:  # the first training prepares the data and loads libraries
            group.train(request)
        return group.train(request)

    def close(self) -> None:
        """End all process groups."""
        for group in self.groups.values():
            group.close()


def measure(options: Options, announce: Callable[[str], None]) -> Measured:
    """Measure all runs in turns, and profile those over memory and over the first unseen link."""
    with ExitStack() as stack:
        link: Link | None = None
        try:
            link = stack.enter_context(Link())
            measured = Measured(link.mechanism)
        except LinkError as problem:
            measured = Measured(f"left out: {problem}")
        announce(f"link between namespaces: {measured.link}")
        timer = RunTimer(options.recipe, link)
        stack.callback(timer.close)
        runs = {run.name: run for run in plan(options, link is not None)}
        contestants = {
            name: contestant_of(run, timer, measured.parameters) for name, run in runs.items()
        }
        suite = Suite("scaling", "samples/s", options.updates, {}, contestants, [])
        suite.run(options.rounds, announce)
        for name, run in runs.items():
            rates = [measurement.value for measurement in suite.measurements[name]]
            median = suite.median(name)
            assert median is not None
            result = Result(median, rates)
            measured.results[run] = result
            if run.processes > 1 and run.link in (None, *options.check_links[:1]):
                announce(f"profiling {name}")
                result.shares = timer.train(run, PROFILED_UPDATES, profile=True).shares
    return measured


def contestant_of(run: ScalingRun, timer: RunTimer, parameters: list[int]) -> Contestant:
    """Make a contestant of a run; it also puts the sizes of the parameters into `parameters`."""

    def compete(turn: Round) -> Measurement:
        answer = timer.train(run, turn.updates)
        parameters[:] = answer.parameters
        return Measurement(run.processes * run.batch / answer.seconds)

    return compete
