"""`--profile`: look closely at a few real updates, and say what bounds their speed."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say, warn, without_native_messages
from common.data.loader import Loader
from common.devices import is_accelerator, profiler_activity
from common.files import write_json
from common.measure.memory import memory_now
from common.measure.stopwatch import FIRST_UPDATES, Stopwatch, synchronize
from common.profile import verdict
from common.profile.files import write_profile
from common.profile.phases import Phases
from common.track import media
from common.training.plan import Plan


class Window(NamedTuple):
    """Updates, counted from where the run starts or goes on; timed from `FIRST_UPDATES` on."""

    warm_up: int  # after this many the profiler is on, and what it sees is thrown away
    record: int  # after this many it is kept
    end: int  # after this many it is over


def choose_window(first: int, total: int, interrupts: Callable[[int], bool]) -> Window | None:
    """Choose updates from `first` to `total`, uninterrupted where that can be; None if too few."""
    for size in (10, 5, 2, 1):  # updates to time, then to profile
        earliest, warming = FIRST_UPDATES + size, 2 if size > 1 else 1
        latest = min(total - first - warming - size, earliest + 10_000)
        for start in range(earliest, latest + 1):
            window = Window(start, start + warming, start + warming + size)
            if not any(interrupts(first + n) for n in range(start + 1, window.end)):
                return window
    window = Window(FIRST_UPDATES + 1, FIRST_UPDATES + 2, FIRST_UPDATES + 3)
    return window if first + window.end <= total else None


@dataclass
class Profiler:
    """Profiles some updates on the first rank; all ranks leave them out of ``perf/``."""

    config: TrainingConfig
    folder: Path  # where the files go
    accelerator: Accelerator
    stopwatch: Stopwatch
    plan: Plan
    attach: Callable[..., None]  # calls with the W&B run, where there is one

    looking: Generator[None, None, None] | None = None  # goes on with each update
    is_over: bool = False
    is_timing: bool = False
    waited: float = 0.0  # seconds, in the timed updates
    # Waiting, and the micro-batches whose data it made: several may be made at once.
    making: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        self.phases = Phases(self.accelerator)

    def watch(self, batches: Iterator[Any], loader: Loader, global_step: int) -> Iterator[Any]:
        """Return the rest of an epoch's batches; while updates are looked at, time the waiting."""
        if not (self.config.profile or self.config.profile_shapes) or self.is_over:
            return batches
        plan, self.placement = self.plan, loader.placement
        if self.looking is None:
            window = choose_window(
                global_step, plan.total_steps, lambda n: plan.evaluates(n) or plan.saves(n)
            )
            if window is None:
                self.is_over = True
                least = FIRST_UPDATES + 3
                warn(f"--profile needs {least} updates; this run has fewer, and is not profiled")
                return batches
            self.looking = self.look(window, global_step)
            next(self.looking)
        left = plan.updates_per_epoch - global_step % plan.updates_per_epoch
        left *= self.config.gradient_accumulation_steps
        return self.watched(batches, left, loader.batches_per_gather)

    def watched(self, batches: Iterator[Any], left: int, at_once: int) -> Iterator[Any]:
        """Yield the `left` batches, made `at_once`, with notes of how long each was waited for."""
        for position in range(left):
            if self.is_over:
                break
            began = time.perf_counter()
            if self.phases.is_on:
                self.phases.enter(verdict.DATA)
            item = next(batches, None)
            if self.phases.is_on:
                self.phases.enter("forward")
            if item is None:
                return
            waited = time.perf_counter() - began
            self.waited += waited if self.is_timing else 0.0
            # Where one waiting makes the data of many batches, all of it is shared among them.
            if self.is_timing or at_once > 1:
                self.making += waited
                self.made += min(at_once, left - position) if position % at_once == 0 else 0
            yield item
        yield from batches

    def step(self) -> None:
        if self.looking is not None:
            next(self.looking, None)

    def look(self, window: Window, first: int) -> Generator[None, None, None]:
        """Time some updates, then profile some; each `yield` waits for the end of one."""
        yield from [None] * FIRST_UPDATES
        with self.stopwatch.stopped():
            before = self.stopwatch.total.seconds
        self.is_timing, timed = True, window.warm_up - FIRST_UPDATES
        with self.phases.watching():
            yield from [None] * timed
            self.is_timing = False
            self.phases.enter(None)
            self.stopwatch.stop()
            self.spent = self.phases.milliseconds()
            busy = (self.stopwatch.total.seconds - before - self.waited) / timed
            updates = iter([None] * (window.end - window.warm_up))
            if self.accelerator.is_main_process:
                try:
                    yield from self.profile(window, updates, busy)
                    numbers = f"{first + window.warm_up + 1} to {first + window.end}"
                    say(f"        updates {numbers} are left out of perf/; {self.folder}")
                except Exception as problem:  # it must not stop the training
                    warn(
                        f"--profile failed ({type(problem).__name__}: {problem}); training goes on"
                    )
            yield from updates  # of the other ranks, or what an error has left
        self.is_over = True
        # Others wait here for the first rank, not in an update that is counted.
        self.accelerator.wait_for_everyone()
        self.stopwatch.start()

    def profile(self, window: Window, updates: Iterator[None], busy: float) -> Iterator[None]:
        """Profile `updates`, judge and write; others take `busy` seconds without their waiting."""
        device = self.accelerator.device
        has_memory_history = device.type == "cuda"
        device_activity = profiler_activity(device)
        host_activity = torch.profiler.ProfilerActivity.CPU
        warming, active = window.record - window.warm_up, window.end - window.record
        with ExitStack() as opened:
            opened.enter_context(without_native_messages())
            profile = torch.profiler.profile(
                activities=[host_activity, *([device_activity] if device_activity else [])],
                schedule=torch.profiler.schedule(wait=0, warmup=warming, active=active, repeat=1),
                profile_memory=True,
                record_shapes=self.config.profile_shapes,
                acc_events=True,
            )
            opened.enter_context(profile)
            for _ in islice(updates, warming):
                yield
                profile.step()
            bytes_before, began = memory_now(device), time.perf_counter()
            if has_memory_history:
                history = torch.cuda.memory._record_memory_history
                opened.callback(history, enabled=None)
                history(max_entries=200_000, stacks="python")
            for _ in islice(updates, active - 1):
                yield
                profile.step()
            yield from updates
            synchronize(device)
            # Profiled updates take longer, but where other programs had held up the timed ones.
            busy = min(busy, (time.perf_counter() - began) / active)
            profile.step()
            by_shape = self.config.profile_shapes
            slowest = write_profile(self.folder, profile, device, bytes_before, by_shape)
            if has_memory_history:
                torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
            if is_accelerator(device) and device_activity is None:
                self.say_phases(slowest)
                return
            is_gpu = device_activity is not None
            sums = verdict.gpu_kernel_milliseconds if is_gpu else verdict.cpu_kernel_milliseconds
            kernels = {kind: spent / active for kind, spent in sums(profile.events()).items()}
            self.judge(kernels, busy, is_gpu, slowest)

    def say_phases(self, slowest: list[str]) -> None:
        """Say what is known of a device whose kernels torch's profiler can't time."""
        kind = self.accelerator.device.type
        say(f"profile no verdict: torch's profiler can't time the kernels of {kind}")
        say(f"        {shares_text(self.phase_shares())}")
        say(f"        operations that took the host longest: {', '.join(slowest)}")

    def phase_shares(self) -> dict[str, float]:
        """Return each phase's share of the time of the timed updates."""
        whole = max(sum(self.spent.values()), 1e-9)
        return {phase: spent / whole for phase, spent in self.spent.items()}

    def judge(
        self, kernels: dict[str, float], busy: float, is_gpu: bool, slowest: list[str]
    ) -> None:
        """Say and keep what bounds the speed; `kernels`: milliseconds of an update, by kind."""
        waiting = self.config.gradient_accumulation_steps * self.making / max(self.made, 1)
        cost = verdict.cost_of_update(kernels, 1000 * busy, 1000 * waiting, is_asynchronous=is_gpu)
        precision, processes = self.accelerator.mixed_precision, self.accelerator.num_processes
        found = verdict.judge(cost, self.config, precision, self.placement, processes)
        phases = self.phase_shares()
        told = {**found, "phases": phases, "slowest_operations": slowest}
        write_json(self.folder / "verdict.json", told)
        say(f"profile {found['verdict']}: {found['evidence']}. {found['advice']}")
        say(f"        {shares_text(phases)}")
        say(f"        slowest operations: {', '.join(slowest)}")
        self.attach(media.profile, self.folder, found["verdict"])

    def stop(self) -> None:
        self.is_over = True
        if self.looking is not None:
            with suppress(Exception):
                self.looking.close()


def shares_text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
