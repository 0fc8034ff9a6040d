"""`--profile`: time a few updates, profile a few more, and say what bounds their speed."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say, warn
from common.data.batch import Batch, Work
from common.data.loader import Loader
from common.measure.memory import memory_now
from common.measure.stopwatch import FIRST_UPDATES, Stopwatch
from common.output.standard_streams import without_native_messages
from common.profile import verdict
from common.profile.files import write_profile
from common.profile.phases import Phases
from common.storage.json_files import write_json
from common.system.devices import is_accelerator, profiler_activity, synchronize_stream
from common.track.trackers.tracker import Tracker
from common.training.plan import Plan

Batches = Iterator[tuple[Batch, Work]]  # as `Loader.epoch` yields them


class Window(NamedTuple):
    """The updates to profile, counted from where this process starts or resumes the run.

    The updates between `FIRST_UPDATES` and `warm_up` are timed without the profiler.
    """

    warm_up: int  # the profiler runs after this many updates, but discards what it records
    record: int  # the profiler keeps what it records after this many updates
    end: int  # the profile ends after this many updates


def choose_window(first: int, total: int, interrupts: Callable[[int], bool]) -> Window | None:
    """Choose the updates to profile, if possible without an evaluation or a save among them.

    Args:
        first: the update at which this process starts or resumes the run.
        total: the updates of the whole run.
        interrupts: whether an evaluation or a save follows an update.

    Returns:
        The longest window without an evaluation or a save; else the shortest and earliest window;
        or None if too few updates remain for it.
    """
    for size in (10, 5, 2, 1):  # updates that are timed, and again as many that are profiled
        warm_up_size = 2 if size > 1 else 1
        earliest = FIRST_UPDATES + size
        # The window ends no later than the run. A search over more than 10,000 updates would take
        # too long.
        latest = min(total - first - warm_up_size - size, earliest + 10_000)
        for start in range(earliest, latest + 1):
            window = Window(start, start + warm_up_size, start + warm_up_size + size)
            # What follows the last update of the window does not disturb it, so `end` is left out.
            if not any(interrupts(first + n) for n in range(start + 1, window.end)):
                return window
    # No window is free of evaluations and saves. Take the shortest window, in spite of them.
    window = Window(FIRST_UPDATES + 1, FIRST_UPDATES + 2, FIRST_UPDATES + 3)
    return window if first + window.end <= total else None


@dataclass
class Profiler:
    """Profiles some updates on rank 0. All ranks leave these updates out of ``perf/``.

    The loop belongs to the recipe, so the profiler can't run it. Instead, `measure` is a generator
    that reads like a loop of its own: it sets something up, yields while an update runs, and goes
    on afterwards. `watch` starts it, and `step` resumes it after each update.
    """

    config: TrainingConfig
    folder: Path  # where the files go
    accelerator: Accelerator
    stopwatch: Stopwatch
    plan: Plan
    # A function that calls its argument with the run's tracker, if there is one.
    attach: Callable[[Callable[[Tracker], None]], None]

    # The generator that `measure` returned, which `step` resumes; None until it is started.
    procedure: Generator[None, None, None] | None = None
    is_over: bool = False
    is_timing: bool = False
    placement: str = ""  # where batches are made, "device" or "workers"; known with the first batch
    # The time of each phase in the timed updates.
    phase_milliseconds: Mapping[str, float] = field(default_factory=dict)
    waited: float = 0.0  # seconds for which the timed updates waited for batches
    # The seconds of waiting in which batches were made, and the number of those micro-batches. One
    # wait may make the data of several micro-batches.
    making_seconds: float = 0.0
    batches_made: int = 0

    def __post_init__(self) -> None:
        self.phases = Phases(self.accelerator)

    def watch(self, batches: Batches, loader: Loader, global_step: int) -> Batches:
        """Return the rest of an epoch's batches; while updates are measured, time the waiting.

        The first call chooses the updates, and starts `measure`.

        Args:
            batches: an iterator over the rest of the epoch.
            loader: the loader that the batches come from.
            global_step: the updates that the run has made.
        """
        if not (self.config.profile or self.config.profile_shapes) or self.is_over:
            return batches
        plan = self.plan
        self.placement = loader.placement
        if self.procedure is None:
            window = choose_window(
                global_step,
                plan.total_steps,
                lambda step: plan.evaluates(step) or plan.saves(step),
            )
            if window is None:
                self.is_over = True
                least = FIRST_UPDATES + 3
                warn(f"the run is not profiled, because fewer than {least} updates are left")
                return batches
            self.procedure = self.measure(window, global_step)
            next(self.procedure)  # goes up to the first `yield`, which waits for the first update
        updates_left = plan.updates_per_epoch - global_step % plan.updates_per_epoch
        batches_left = updates_left * self.config.gradient_accumulation_steps
        return self.watched(batches, batches_left, loader.batches_per_gather)

    def watched(self, batches: Batches, batches_left: int, batches_at_once: int) -> Batches:
        """Yield batches, and note how long the loop waited for each.

        Args:
            batches: an iterator over the rest of the epoch.
            batches_left: how many batches the iterator has.
            batches_at_once: how many micro-batches the loader makes in one wait.
        """
        for position in range(batches_left):
            if self.is_over:
                break
            start = time.perf_counter()
            if self.phases.is_on:
                self.phases.enter(verdict.DATA)
            batch = next(batches, None)
            if self.phases.is_on:
                self.phases.enter("forward")
            if batch is None:
                return
            waited = time.perf_counter() - start
            if self.is_timing:
                self.waited += waited
            # If the loader makes many batches at once, only some updates wait. So all waiting since
            # the first update is divided by all batches that were made: the timed updates alone
            # might contain no wait, or a wait for batches that are used after them.
            if self.is_timing or batches_at_once > 1:
                self.making_seconds += waited
                if position % batches_at_once == 0:
                    self.batches_made += min(batches_at_once, batches_left - position)
            yield batch
        yield from batches  # the profile is over, so nothing is timed any more

    def step(self) -> None:
        """Resume the generator of `measure` until its next `yield`; called after each update."""
        if self.procedure is not None:
            next(self.procedure, None)  # does nothing once the generator has ended

    def measure(self, window: Window, first: int) -> Generator[None, None, None]:
        """Time some updates, then profile some. Each `yield` waits for the end of an update.

        Args:
            window: the updates to profile.
            first: the update at which this process starts or resumes the run.
        """
        yield from wait_for_updates(FIRST_UPDATES)
        with self.stopwatch.stopped():  # only stopping adds the time until now to the total
            seconds_before = self.stopwatch.total.seconds
        timed_updates = window.warm_up - FIRST_UPDATES
        self.is_timing = True
        with self.phases.watching():
            yield from wait_for_updates(timed_updates)
            self.is_timing = False
            self.phases.enter(None)
            self.stopwatch.stop()
            self.phase_milliseconds = self.phases.milliseconds()
            timed_seconds = self.stopwatch.total.seconds - seconds_before
            busy_seconds = (timed_seconds - self.waited) / timed_updates
            # `profile` takes one item of this iterator for each update that it waits for.
            updates = wait_for_updates(window.end - window.warm_up)
            if self.accelerator.is_main_process:
                try:
                    yield from self.profile(window, updates, busy_seconds)
                    numbers = f"{first + window.warm_up + 1} to {first + window.end}"
                    say(f"        updates {numbers} are left out of perf/; {self.folder}")
                except Exception as problem:  # a failed profile must not stop the training
                    warn(
                        f"--profile failed ({type(problem).__name__}: {problem}); training goes on"
                    )
            # Wait for the remaining updates: on rank 0 those after an error, on other ranks all.
            yield from updates
        self.is_over = True
        # The other ranks wait for rank 0 here, and not in an update that is timed.
        self.accelerator.wait_for_everyone()
        self.stopwatch.start()

    def profile(
        self, window: Window, updates: Iterator[None], busy_seconds: float
    ) -> Iterator[None]:
        """Profile updates on rank 0, write the files and print the verdict.

        Args:
            window: the updates to profile.
            updates: yields once for each of these updates.
            busy_seconds: the time of an update without the profiler and without waiting for data.
        """
        device = self.accelerator.device
        has_memory_history = device.type == "cuda"
        warm_up_updates = window.record - window.warm_up
        recorded_updates = window.end - window.record
        with ExitStack() as contexts:
            contexts.enter_context(without_native_messages())
            profile = self.torch_profile(warm_up_updates, recorded_updates)
            contexts.enter_context(profile)
            for _ in islice(updates, warm_up_updates):
                yield
                profile.step()
            bytes_before = memory_now(device)
            start = time.perf_counter()
            if has_memory_history:
                record_history = torch.cuda.memory._record_memory_history
                contexts.callback(record_history, enabled=None)
                record_history(max_entries=200_000, stacks="python")
            for _ in islice(updates, recorded_updates - 1):
                yield
                profile.step()
            yield from updates  # waits for the last update, whose time ends with the device's work
            synchronize_stream(device)
            # Profiled updates are slower, unless other programs slowed the timed updates down. So
            # the report gets the shorter of the two times.
            profiled_seconds = (time.perf_counter() - start) / recorded_updates
            profile.step()
            by_shape = self.config.profile_shapes
            slowest = write_profile(self.folder, profile, device, bytes_before, by_shape)
            if has_memory_history:
                torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
            self.report(profile, recorded_updates, min(busy_seconds, profiled_seconds), slowest)

    def torch_profile(self, warm_up_updates: int, recorded_updates: int) -> torch.profiler.profile:
        """Return torch's profiler, set up to record some updates after a warm-up."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        device_activity = profiler_activity(self.accelerator.device)
        if device_activity is not None:
            activities.append(device_activity)
        schedule = torch.profiler.schedule(
            wait=0, warmup=warm_up_updates, active=recorded_updates, repeat=1
        )
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            profile_memory=True,
            record_shapes=self.config.profile_shapes,
            acc_events=True,
        )

    def report(
        self,
        profile: torch.profiler.profile,
        recorded_updates: int,
        busy_seconds: float,
        slowest: list[str],
    ) -> None:
        """Print the verdict, or only the phases if torch can't time the device's kernels."""
        device = self.accelerator.device
        has_kernel_times = profiler_activity(device) is not None
        if is_accelerator(device) and not has_kernel_times:
            self.say_phases(slowest)
            return
        events = profile.events() or []
        if has_kernel_times:
            totals = verdict.gpu_kernel_milliseconds(events)
        else:
            totals = verdict.cpu_kernel_milliseconds(events)
        kernels = {category: total / recorded_updates for category, total in totals.items()}
        self.judge(kernels, busy_seconds, has_kernel_times, slowest)

    def say_phases(self, slowest: list[str]) -> None:
        """Print the time of each phase, for a device whose kernels torch's profiler can't time."""
        device_type = self.accelerator.device.type
        say(f"profile no verdict: torch's profiler can't time the kernels of {device_type}")
        say(f"        {shares_text(self.phase_shares())}")
        say(f"        operations that took the host longest: {', '.join(slowest)}")

    def phase_shares(self) -> dict[str, float]:
        """Return each phase's share of the time of the timed updates."""
        total = max(sum(self.phase_milliseconds.values()), 1e-9)
        return {phase: value / total for phase, value in self.phase_milliseconds.items()}

    def judge(
        self, kernels: dict[str, float], busy_seconds: float, is_gpu: bool, slowest: list[str]
    ) -> None:
        """Print the verdict on the speed, write `verdict.json`, and send both to the tracker.

        Args:
            kernels: the milliseconds of an update's "memory" and "compute" kernels.
            busy_seconds: the time of an update without the profiler and without waiting for data.
            is_gpu: whether kernels run while the loop goes on.
            slowest: the three slowest operations.
        """
        seconds_per_batch = self.making_seconds / max(self.batches_made, 1)
        waiting = self.config.gradient_accumulation_steps * seconds_per_batch
        cost = verdict.cost_of_update(
            kernels, 1000 * busy_seconds, 1000 * waiting, is_asynchronous=is_gpu
        )
        judgement = verdict.judge(
            cost,
            self.config,
            self.accelerator.mixed_precision,
            self.placement,
            self.accelerator.num_processes,
        )
        phases = self.phase_shares()
        contents = {**judgement, "phases": phases, "slowest_operations": slowest}
        write_json(self.folder / "verdict.json", contents)
        say(f"profile {judgement['verdict']}: {judgement['evidence']}. {judgement['advice']}")
        say(f"        {shares_text(phases)}")
        say(f"        slowest operations: {', '.join(slowest)}")
        self.attach(lambda tracker: tracker.log_profile(self.folder, judgement["verdict"]))

    def stop(self) -> None:
        """End the profile, because the run ends; called in any case.

        If `measure` has not finished, its generator is closed. That leaves its `with` blocks, which
        turn torch's profiler off and restore what they changed. An error in doing so must not hide
        how the run ended.
        """
        self.is_over = True
        if self.procedure is not None:
            with suppress(Exception):
                self.procedure.close()


def wait_for_updates(count: int) -> Iterator[None]:
    """Yield once for each of `count` updates."""
    for _ in range(count):
        yield


def shares_text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
