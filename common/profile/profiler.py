"""`--profile`: look closely at a few real updates, and say what bounds their speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say, without_native_messages
from common.data.loader import Loader
from common.files import write_json
from common.measure.memory import memory_now
from common.measure.stopwatch import FIRST_UPDATES, Stopwatch, synchronize
from common.profile import verdict
from common.profile.files import write_profile
from common.track import media
from common.training.plan import Plan


class Window(NamedTuple):
    """Updates, counted from where the run starts or goes on; timed from `FIRST_UPDATES` on."""

    warm_up: int  # after this many the profiler is on, and what it sees is thrown away
    record: int  # after this many it is kept
    end: int  # after this many it is over


def choose_window(first: int, total: int, interrupts: Callable[[int], bool]) -> Window | None:
    """Choose which updates to profile, of those from `first` to `total`; None if too few.

    Between them should be none that `interrupts`, by an evaluation or a checkpoint after it,
    unless each does.
    """
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

    is_over: bool = False
    window: Window | None = None  # once it is chosen, until its end
    profile: Any = None  # torch's, on the first rank, while it is on
    opened: ExitStack = field(default_factory=ExitStack)
    updates: int = 0
    timed: float = 0.0  # seconds of the timed updates, without their waiting
    recorded: float = 0.0  # seconds of the recorded updates
    # Waiting, and the micro-batches whose data it made: several may be made at once.
    making: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        self.device = self.accelerator.device
        self.is_cuda = self.device.type == "cuda"

    def watch(self, batches: Iterator[Any], loader: Loader, global_step: int) -> Iterator[Any]:
        """Return the rest of an epoch's batches; while updates are looked at, time the waiting."""
        if not self.config.profile or self.is_over:
            return batches
        plan, self.placement = self.plan, loader.placement
        self.window = self.window or choose_window(
            global_step, plan.total_steps, lambda n: plan.evaluates(n) or plan.saves(n)
        )
        if self.window is None:
            self.is_over = True
            least = FIRST_UPDATES + 3
            say(f"--profile needs {least} updates; this run has fewer, and is not profiled")
            return batches
        left = plan.updates_per_epoch - global_step % plan.updates_per_epoch
        left *= self.config.gradient_accumulation_steps
        return self.watched(batches, left, loader.batches_per_gather)

    def watched(self, batches: Iterator[Any], left: int, at_once: int) -> Iterator[Any]:
        """Yield the `left` batches, made `at_once`, with notes of how long each was waited for."""
        for position in range(left):
            if self.window is None:
                break
            began = time.perf_counter()
            with torch.profiler.record_function(verdict.DATA):
                item = next(batches, None)
            if item is None:
                return
            waited = time.perf_counter() - began
            is_timed = FIRST_UPDATES <= self.updates < self.window.warm_up
            self.timed -= waited if is_timed else 0.0
            # Where one waiting makes the data of many batches, all of it is shared among them.
            if is_timed or at_once > 1:
                self.making += waited
                self.made += min(at_once, left - position) if position % at_once == 0 else 0
            yield item
        yield from batches

    def step(self, global_step: int) -> None:
        if self.window is None:
            return
        self.updates += 1
        if self.updates == FIRST_UPDATES:
            with self.stopwatch.stopped():
                self.timed = -self.stopwatch.train_seconds
        if self.updates == self.window.warm_up:
            self.stopwatch.pause()
            self.timed += self.stopwatch.train_seconds
        with self.surviving():
            if self.updates == self.window.warm_up and self.accelerator.is_main_process:
                self.open(self.window)
            elif self.profile is not None:
                self.advance(self.window, global_step)
        if self.updates == self.window.end:
            self.stop()
            # Others wait here for the first rank, not in an update that is counted.
            self.accelerator.wait_for_everyone()
            self.stopwatch.resume()

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Give up profiling on an error: it must not stop the training."""
        try:
            yield
        except Exception as problem:
            say(f"--profile failed ({type(problem).__name__}: {problem}); training goes on")
            self.profile = None
            with suppress(Exception):
                self.opened.close()

    def open(self, window: Window) -> None:
        activity = torch.profiler.ProfilerActivity
        warming, active = window.record - window.warm_up, window.end - window.record
        self.profile = torch.profiler.profile(
            activities=[activity.CPU, *([activity.CUDA] if self.is_cuda else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=warming, active=active, repeat=1),
            profile_memory=True,
            acc_events=True,
        )
        self.opened.enter_context(without_native_messages())
        self.profile.start()
        self.opened.callback(self.profile.stop)

    def advance(self, window: Window, global_step: int) -> None:
        """Let the profiler's schedule go on by an update; at its end, judge and write."""
        if self.updates == window.end:
            synchronize(self.device)
        now = time.perf_counter()
        self.profile.step()
        if self.updates == window.record:
            self.before = memory_now(self.device)
            self.recorded = -time.perf_counter()  # the profiler's own start is over
            if self.is_cuda:
                history = torch.cuda.memory._record_memory_history
                self.opened.callback(history, enabled=None)
                history(max_entries=200_000, stacks="python")
        if self.updates < window.end:
            return
        self.recorded += now
        write_profile(self.folder, self.profile, self.device, self.before)
        if self.is_cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
        found = self.judge(window)
        write_json(self.folder / "verdict.json", found)
        say(f"profile {found['verdict']}: {found['evidence']}. {found['advice']}")
        first = global_step - window.end + window.warm_up + 1
        say(f"        updates {first} to {global_step} are left out of perf/; {self.folder}")
        self.attach(media.profile, self.folder, found["verdict"])

    def judge(self, window: Window) -> dict[str, Any]:
        sums = verdict.gpu_kernel_milliseconds if self.is_cuda else verdict.cpu_kernel_milliseconds
        profiled, accumulated = window.end - window.record, self.config.gradient_accumulation_steps
        kernels = {k: v / profiled for k, v in sums(self.profile.events()).items()}
        data = 1000 * accumulated * self.making / max(self.made, 1)
        # Profiled updates take longer, but where other programs had held up the timed ones.
        rest = 1000 * min(self.timed / (window.warm_up - FIRST_UPDATES), self.recorded / profiled)
        cost = verdict.cost_of_update(kernels, rest, data, is_asynchronous=self.is_cuda)
        precision, processes = self.accelerator.mixed_precision, self.accelerator.num_processes
        return verdict.judge(cost, self.config, precision, self.placement, processes)

    def stop(self) -> None:
        self.is_over, self.window, self.profile = True, None, None
        with self.surviving():
            self.opened.close()
