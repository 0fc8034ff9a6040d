"""Reports a profile: prints the verdict on the speed, writes it, and sends it to the tracker."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say
from common.profile import verdict
from common.storage.json_files import write_json
from common.system.devices import is_accelerator, profiler_activity
from common.track.trackers.tracker import Tracker

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent


@dataclass(frozen=True)
class Timing:
    """How long the timed updates took."""

    # The time of an update without the profiler and without waiting for data.
    busy_seconds_per_update: float
    seconds_per_batch: float  # of waiting for one micro-batch
    phase_milliseconds: Mapping[str, float]  # the time of each phase in all timed updates
    placement: str  # where batches are made, "device" or "workers"

    @property
    def phase_shares(self) -> dict[str, float]:
        """Each phase's share of the time of the timed updates."""
        total = max(sum(self.phase_milliseconds.values()), 1e-9)
        return {phase: value / total for phase, value in self.phase_milliseconds.items()}


@dataclass(frozen=True)
class Reporter:
    """Reports the profile of a run: on the screen, in `verdict.json` and at the tracker."""

    config: TrainingConfig
    folder: Path  # where `verdict.json` goes
    accelerator: Accelerator
    send_to_tracker: Callable[[Callable[[Tracker], None]], None]

    def report(
        self,
        events: "Sequence[FunctionEvent]",
        recorded_updates: int,
        timing: Timing,
        slowest: list[str],
    ) -> None:
        """Print the verdict, or only the phases if torch can't time the device's kernels.

        Args:
            events: the events of the finished profile.
            recorded_updates: how many updates the events are from.
            timing: the time of the updates.
            slowest: a text for each of the three slowest operations.
        """
        device = self.accelerator.device
        has_kernel_times = profiler_activity(device) is not None
        if is_accelerator(device) and not has_kernel_times:
            say_phases(device.type, timing, slowest)
            return
        if has_kernel_times:
            totals = verdict.gpu_kernel_milliseconds(events)
        else:
            totals = verdict.cpu_kernel_milliseconds(events)
        kernels = {category: total / recorded_updates for category, total in totals.items()}
        # A device whose kernels torch can time is a GPU, which runs them asynchronously.
        self.publish_verdict(kernels, timing, has_kernel_times, slowest)

    def publish_verdict(
        self,
        kernels: dict[str, float],
        timing: Timing,
        is_asynchronous: bool,
        slowest: list[str],
    ) -> None:
        """Print the verdict on the speed, write `verdict.json`, and send both to the tracker.

        Args:
            kernels: the milliseconds of an update's "memory" and "compute" kernels.
            timing: the time of the updates.
            is_asynchronous: whether kernels run while the loop goes on, as on a GPU.
            slowest: a text for each of the three slowest operations.
        """
        busy_milliseconds = 1000 * timing.busy_seconds_per_update
        batches_per_update = self.config.gradient_accumulation_steps
        waiting_seconds = batches_per_update * timing.seconds_per_batch
        cost = verdict.cost_of_update(
            kernels, busy_milliseconds, 1000 * waiting_seconds, is_asynchronous=is_asynchronous
        )
        judgement = verdict.judge(
            cost,
            self.config,
            self.accelerator.mixed_precision,
            timing.placement,
            self.accelerator.num_processes,
        )
        phases = timing.phase_shares
        contents = {**judgement, "phases": phases, "slowest_operations": slowest}
        write_json(self.folder / "verdict.json", contents)
        say(f"profile {judgement['verdict']}: {judgement['evidence']}. {judgement['advice']}")
        say(f"        {shares_text(phases)}")
        say(f"        slowest operations: {', '.join(slowest)}")
        self.send_to_tracker(lambda tracker: tracker.log_profile(self.folder, judgement["verdict"]))


def say_phases(device_type: str, timing: Timing, slowest: list[str]) -> None:
    """Print the time of each phase, for a device whose kernels torch's profiler can't time."""
    say(f"profile no verdict: torch's profiler can't time the kernels of {device_type}")
    say(f"        {shares_text(timing.phase_shares)}")
    say(f"        operations that took the host longest: {', '.join(slowest)}")


def shares_text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
