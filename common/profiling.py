"""`--profile`: look closely at a few real updates, and say what bounds their speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.console import say, without_native_messages
from common.kernel_time import DATA
from common.memory import memory_now
from common.profile_window import Window, choose_window
from common.stopwatch import FIRST_UPDATES, Stopwatch, synchronize
from common.wandb_media import attach_profile

if TYPE_CHECKING:
    from common.loader import Loader
    from common.run import Run


class Profile:
    """Profiles some updates of a run; does nothing, and costs nothing, without `--profile`.

    All ranks leave these updates out of ``perf/``; the first one looks.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder: Path = run.directory.path / "profile"
        self.window: Window | None = None
        self.profiler: Any = None
        self.quiet = ExitStack()
        self.updates = 0
        self.seconds = 0.0  # of the timed updates, with their waiting
        self.waited = 0.0  # in the timed updates
        self.recording = 0.0  # seconds of the recorded updates
        # Waiting, and the micro-batches whose data it made: several may be made at once.
        self.making, self.made = 0.0, 0
        self.placement = ""

    def watch(self, batches: Iterator[Any], loader: Loader) -> Iterator[Any]:
        """Return the batches of an epoch; while updates are looked at, with a note of waiting."""
        run = self.run
        if not run.config.profile:
            return batches
        if self.window is None and self.updates == 0:
            self.placement = loader.placement
            self.window = choose_window(run.global_step, run.plan.total_steps, self.interrupts)
            if self.window is None:
                least = FIRST_UPDATES + 3
                say(f"--profile needs {least} updates; this run has fewer, and is not profiled")
        return batches if self.window is None else self.watched(batches, loader)

    def interrupts(self, step: int) -> bool:
        """Whether an evaluation or a checkpoint follows an update."""
        return self.run.plan.evaluates(step) or self.run.plan.saves(step)

    def watched(self, batches: Iterator[Any], loader: Loader) -> Iterator[Any]:
        """Yield batches, and take note of how long each was waited for."""
        run, position = self.run, 0
        per_update = run.config.gradient_accumulation_steps
        per_epoch = run.plan.updates_per_epoch
        left = (per_epoch - run.global_step % per_epoch) * per_update
        at_once = loader.batches_per_gather
        while self.window is not None:
            began = time.perf_counter()
            with torch.profiler.record_function(DATA):
                item = next(batches, None)
            if item is None:
                return
            waited = time.perf_counter() - began
            is_timed = self.window.timed <= self.updates < self.window.warm_up
            self.waited += waited if is_timed else 0.0
            # Where one waiting makes the data of many batches, all of it is shared among them.
            if is_timed or at_once > 1:
                self.making += waited
                self.made += min(at_once, left - position) if position % at_once == 0 else 0
            position += 1
            yield item
        yield from batches

    def step(self) -> None:
        """Take note that an update is done."""
        if self.window is None:
            return
        self.updates += 1
        window, watch = self.window, self.run.meters.stopwatch
        if self.updates == window.timed:
            self.seconds = -seconds_so_far(watch)
        if self.updates == window.warm_up:
            self.seconds += seconds_so_far(watch)
            watch.pause()
            self.start_profiler()
        elif self.updates > window.warm_up:
            if self.updates == window.end:
                synchronize(self.run.device)
            self.guarded(self.advance)
        if self.updates == window.end:
            self.guarded(self.write)
            self.stop()
            # Others wait here for the first rank, not in an update that is counted.
            self.run.accelerator.wait_for_everyone()
            watch.resume()

    def guarded(self, action: Callable[[], None]) -> None:
        """Do something on the first rank; a profile that fails must not stop the training."""
        if self.profiler is None:
            return
        try:
            action()
        except Exception as problem:
            self.profiler = None
            say(f"--profile failed ({type(problem).__name__}: {problem}); training goes on")

    def start_profiler(self) -> None:
        """Turn the profiler on, on the first rank."""
        if not self.run.accelerator.is_main_process:
            return
        assert self.window is not None
        window, activity = self.window, torch.profiler.ProfilerActivity
        is_cuda = self.run.device.type == "cuda"
        self.profiler = torch.profiler.profile(
            activities=[activity.CPU, *([activity.CUDA] if is_cuda else [])],
            schedule=torch.profiler.schedule(
                wait=0,
                warmup=window.record - window.warm_up,
                active=window.end - window.record,
                repeat=1,
            ),
            profile_memory=True,
            acc_events=True,
        )
        self.quiet.enter_context(without_native_messages())
        self.guarded(self.profiler.start)
        self.before = memory_now(self.run.device)

    def advance(self) -> None:
        """Let the profiler's schedule go on by an update."""
        assert self.window is not None
        now = time.perf_counter()
        self.profiler.step()
        is_cuda = self.run.device.type == "cuda"
        if self.updates == self.window.record:
            self.before = memory_now(self.run.device)
            self.recording = -time.perf_counter()  # the profiler's own start is over
            if is_cuda:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        elif self.updates == self.window.end:
            self.recording += now
        if self.updates == self.window.end and is_cuda:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self) -> None:
        """Write the files, and print the verdict."""
        from common.profile_files import write_profile

        assert self.window is not None
        write_profile(self.folder, self.profiler, self.run.device, self.before)
        verdict = self.judge(self.window)
        (self.folder / "verdict.json").write_text(json.dumps(verdict.facts(), indent=2) + "\n")
        first = self.run.global_step - (self.window.end - self.window.warm_up) + 1
        say(f"profile {verdict.text()}")
        left_out = f"updates {first} to {self.run.global_step} are left out of perf/"
        say(f"        {left_out}; {self.folder}")
        attach_profile(self.run, self.folder, verdict.kind)

    def judge(self, window: Window) -> Any:
        """Weigh what was seen."""
        from common import kernel_time, verdict

        run, accumulation = self.run, self.run.config.gradient_accumulation_steps
        is_cuda = run.device.type == "cuda"
        sums = (
            kernel_time.gpu_kernel_milliseconds if is_cuda else kernel_time.cpu_kernel_milliseconds
        )
        profiled = window.end - window.record
        kernels = {k: v / profiled for k, v in sums(self.profiler.events()).items()}
        rest = 1000 * (self.seconds - self.waited) / (window.warm_up - window.timed)
        data = 1000 * accumulation * self.making / max(self.made, 1)
        # Profiled updates take longer, but where other programs had held up the timed ones.
        rest = min(rest, 1000 * self.recording / profiled)
        cost = verdict.cost_of_update(kernels, rest, data, is_asynchronous=is_cuda)
        precision, processes = run.accelerator.mixed_precision, run.accelerator.num_processes
        return verdict.judge(cost, run.config, precision, self.placement, processes)

    def stop(self) -> None:
        """Turn the profiler off."""
        self.window = None
        if self.profiler is not None:
            self.guarded(self.profiler.stop)
            self.profiler = None
        self.quiet.close()


def seconds_so_far(stopwatch: Stopwatch) -> float:
    """Return the time that was spent in training until now; synchronises."""
    stopwatch.stop()
    seconds = stopwatch.train_seconds + stopwatch.current.seconds
    stopwatch.start()
    return seconds
