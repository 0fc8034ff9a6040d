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
from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.failures.sentences import cause_text
from common.measure.memory import memory_now
from common.measure.stopwatch import FIRST_UPDATES, Stopwatch
from common.output.standard_streams import without_native_messages
from common.profile.files import write_profile
from common.profile.phases import Phases
from common.profile.report import Reporter, Timing
from common.profile.waits import WaitMeter
from common.system.devices import profiler_activity, synchronize_stream
from common.track.trackers.tracker import Tracker
from common.training.plan import Plan


class Window(NamedTuple):
    """The numbers of updates after which each part of a measurement begins.

    First, updates are timed without the profiler. Then it runs, and slows updates down. Updates are
    counted from where this process starts or resumes.
    """

    timing_start: int
    warm_up_start: int  # from here on the profiler runs, but discards what it records
    record_start: int  # from here on the profiler keeps what it records
    end: int  # the profile ends after this many updates


def choose_window(start_step: int, total: int, interrupts: Callable[[int], bool]) -> Window | None:
    """Choose the updates to time and profile, if possible without evaluations and saves.

    Args:
        start_step: the update at which this process starts or resumes the run.
        total: the updates of the whole run.
        interrupts: whether an evaluation or a save follows an update.

    Returns:
        The longest window without an evaluation or a save; else the shortest and earliest window;
        or None if too few updates remain for it.
    """
    for size in (10, 5, 2, 1):  # updates that are timed, and again as many that are profiled
        warm_up_size = 2 if size > 1 else 1
        # The window ends no later than the run. A search over more than 10,000 updates would take
        # too long.
        latest = min(total - start_step - 2 * size - warm_up_size, FIRST_UPDATES + 10_000)
        for timing_start in range(FIRST_UPDATES, latest + 1):
            warm_up_start = timing_start + size
            record_start = warm_up_start + warm_up_size
            window = Window(timing_start, warm_up_start, record_start, record_start + size)
            # An evaluation after the last update before the window would disturb it: it is made
            # when the loop has its next batch. What follows the window's own last update would not.
            if not any(interrupts(start_step + n) for n in range(window.timing_start, window.end)):
                return window
    # No window is free of evaluations and saves. Take the shortest window, in spite of them.
    shortest = Window(FIRST_UPDATES, FIRST_UPDATES + 1, FIRST_UPDATES + 2, FIRST_UPDATES + 3)
    return shortest if start_step + shortest.end <= total else None


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
    send_to_tracker: Callable[[Callable[[Tracker], None]], None]

    # The generator that `measure` returned, which `step` resumes; None until it is started.
    measurement: Generator[None, None, None] | None = None
    placement: str = ""  # where batches are made, "device" or "workers"; known with the first batch
    # The time of each phase in the timed updates.
    phase_milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.phases = Phases(self.accelerator)
        self.meter = WaitMeter(self.phases)
        self.reporter = Reporter(self.config, self.folder, self.accelerator, self.send_to_tracker)

    def watch(self, batches: BatchesWithWork, loader: Loader, global_step: int) -> BatchesWithWork:
        """Return the rest of an epoch's batches.

        While updates are measured, the time for which the loop waits for each batch is measured.
        The first call chooses the updates, and starts `measure`.

        Args:
            batches: an iterator over the rest of the epoch.
            loader: the loader that the batches come from.
            global_step: the updates that the run has made.
        """
        if not (self.config.profile or self.config.profile_shapes) or self.meter.is_over:
            return batches
        plan = self.plan
        self.placement = loader.placement
        if self.measurement is None:
            window = choose_window(
                global_step,
                plan.total_steps,
                lambda step: plan.evaluates(step) or plan.saves(step),
            )
            if window is None:
                self.meter.finish()
                least = FIRST_UPDATES + 3  # the end of the shortest window
                warn(
                    f"the run is not profiled, because fewer than {least} updates are left: start "
                    "a new run with more updates (--epochs or --max-steps)"
                )
                return batches
            self.measurement = self.measure(window, global_step)
            next(self.measurement)  # goes up to the first `yield`, which waits for the first update
        updates_left = plan.updates_per_epoch - global_step % plan.updates_per_epoch
        batches_left = updates_left * self.config.gradient_accumulation_steps
        return self.meter.metered(batches, batches_left, loader.batches_per_gather)

    def step(self) -> None:
        """Resume the generator of `measure` until its next `yield`; called after each update."""
        if self.measurement is not None:
            next(self.measurement, None)  # does nothing once the generator has ended

    def measure(self, window: Window, start_step: int) -> Generator[None, None, None]:
        """Time some updates, then profile some. Each `yield` waits for the end of an update.

        Args:
            window: the updates to time and to profile.
            start_step: the update at which this process starts or resumes the run.
        """
        yield from wait_for_updates(window.timing_start)
        timed_updates = window.warm_up_start - window.timing_start
        timed_seconds = yield from self.time_updates(timed_updates)
        busy_seconds_per_update = (timed_seconds - self.meter.waited) / timed_updates
        with self.stopwatch.stopped():
            with self.phases.watching():
                yield from self.profile_on_main_rank(window, start_step, busy_seconds_per_update)
            self.meter.finish()
            # The other ranks wait for rank 0 here, and not in an update that is timed.
            self.accelerator.wait_for_everyone()

    def time_updates(self, count: int) -> Generator[None, None, float]:
        """Time updates without the profiler. Each `yield` waits for the end of an update.

        Args:
            count: how many updates to time.

        Returns:
            The seconds of all these updates, including those of waiting for batches.
        """
        with self.stopwatch.stopped():  # `total` counts only up to the last stop
            seconds_before = self.stopwatch.total.seconds
        with self.phases.watching(), self.meter.timing():
            yield from wait_for_updates(count)
        with self.stopwatch.stopped():  # the device has finished its work, so phases have times
            self.phase_milliseconds = self.phases.milliseconds()
            return self.stopwatch.total.seconds - seconds_before

    def profile_on_main_rank(
        self, window: Window, start_step: int, busy_seconds_per_update: float
    ) -> Iterator[None]:
        """Wait for the updates of the window; on rank 0, profile them. An error only warns.

        Args:
            window: the updates to profile.
            start_step: the update at which this process starts or resumes the run.
            busy_seconds_per_update: see `Timing`.
        """
        # `profile` takes one item of this iterator for each update that it waits for.
        updates = wait_for_updates(window.end - window.warm_up_start)
        if self.accelerator.is_main_process:
            try:
                yield from self.profile(window, updates, busy_seconds_per_update)
                update_range = (
                    f"{start_step + window.warm_up_start + 1} to {start_step + window.end}"
                )
                say(f"        updates {update_range} are left out of perf/; {self.folder}")
            except Exception as problem:  # a failed profile must not stop the training
                warn(f"--profile failed ({cause_text(problem)}); training goes on")
        # Wait for the remaining updates: on rank 0 those after an error, on other ranks all.
        yield from updates

    def profile(
        self, window: Window, updates: Iterator[None], busy_seconds_per_update: float
    ) -> Iterator[None]:
        """Profile updates on rank 0, write the files and print the verdict.

        Args:
            window: the updates to profile.
            updates: yields once for each of these updates.
            busy_seconds_per_update: see `Timing`.
        """
        device = self.accelerator.device
        warm_up_updates = window.record_start - window.warm_up_start
        recorded_updates = window.end - window.record_start
        with ExitStack() as contexts:
            contexts.enter_context(without_native_messages())
            profile = self.torch_profile(warm_up_updates, recorded_updates)
            contexts.enter_context(profile)
            for _ in islice(updates, warm_up_updates):
                yield
                profile.step()
            bytes_before = memory_now(device)
            start = time.perf_counter()
            if has_memory_history(device):
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
            profiled_seconds_per_update = (time.perf_counter() - start) / recorded_updates
            profile.step()
            shorter_time = min(busy_seconds_per_update, profiled_seconds_per_update)
            self.write_and_report(profile, bytes_before, recorded_updates, shorter_time)

    def write_and_report(
        self,
        profile: torch.profiler.profile,
        bytes_before: int,
        recorded_updates: int,
        busy_seconds_per_update: float,
    ) -> None:
        """Write the files of a finished profile, and print the verdict.

        Args:
            profile: the finished profile.
            bytes_before: the bytes that tensors on the device took before the recorded updates.
            recorded_updates: how many updates the profile has.
            busy_seconds_per_update: see `Timing`.
        """
        device = self.accelerator.device
        by_shape = self.config.profile_shapes
        slowest = write_profile(self.folder, profile, device, bytes_before, by_shape)
        if has_memory_history(device):
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
        timing = Timing(
            busy_seconds_per_update=busy_seconds_per_update,
            seconds_per_batch=self.meter.seconds_per_batch,
            phase_milliseconds=self.phase_milliseconds,
            placement=self.placement,
        )
        self.reporter.report(profile.events() or [], recorded_updates, timing, slowest)

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

    def stop(self) -> None:
        """End the profile, because the run ends; called in any case.

        If `measure` has not finished, its generator is closed. That leaves its `with` blocks, which
        turn torch's profiler off and restore what they changed. An error in doing so must not hide
        how the run ended.
        """
        self.meter.finish()
        if self.measurement is not None:
            with suppress(Exception):
                self.measurement.close()


def has_memory_history(device: torch.device) -> bool:
    """Whether torch can record the history of a device's allocations."""
    return device.type == "cuda"


def wait_for_updates(count: int) -> Iterator[None]:
    """Yield `count` times; `Profiler.step` resumes the generator after each update."""
    for _ in range(count):
        yield
