"""What bounds the speed of training: data, launches, memory traffic or arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.config import TrainingConfig


@dataclass(frozen=True)
class UpdateCost:
    """Where the time of one optimizer update goes, in milliseconds; the parts add up to it."""

    data: float  # waiting for batches
    launch: float  # Python, the framework and launches, while no kernel runs
    memory: float  # element-wise operations, normalisation, reductions, copies, the optimizer
    compute: float  # matrix products, convolutions, attention

    @property
    def total(self) -> float:
        """The whole update."""
        return max(self.data + self.launch + self.memory + self.compute, 1e-9)


@dataclass(frozen=True)
class Verdict:
    """What bounds a run, and what to do about it."""

    kind: str  # data-bound, launch-bound, memory-bound or compute-bound
    evidence: str
    advice: str
    cost: UpdateCost

    def text(self) -> str:
        """Return the verdict in plain words."""
        return f"{self.kind}: {self.evidence}. {self.advice}"

    def facts(self) -> dict[str, Any]:
        """Return what `profile/verdict.json` holds."""
        shares = {name: value / self.cost.total for name, value in asdict(self.cost).items()}
        return {
            "verdict": self.kind,
            "evidence": self.evidence,
            "advice": self.advice,
            "milliseconds_per_update": {**asdict(self.cost), "total": self.cost.total},
            "shares": shares,
        }


def cost_of_update(
    kernels: dict[str, float], rest: float, data: float, *, is_asynchronous: bool
) -> UpdateCost:
    """Split the time of an update.

    Args:
        kernels: milliseconds by kind, from the profiled updates.
        rest: milliseconds of an update that was not profiled, less its waiting for data: the
            profiler itself takes time between kernels, and would be taken for launches.
        data: milliseconds that the loop waits for the data of an update.
        is_asynchronous: whether the device may be busy while the loop waits.
    """
    busy = sum(kernels.values())
    whole = rest + data
    room = whole if is_asynchronous else rest
    if busy > room:  # kernels were slowed by the profiler
        kernels = {kind: value * room / busy for kind, value in kernels.items()}
        busy = room
    idle = max(0.0, whole - busy)
    waiting = min(data, idle)
    return UpdateCost(waiting, idle - waiting, kernels["memory"], kernels["compute"])


def judge(
    cost: UpdateCost, config: TrainingConfig, precision: str, placement: str, processes: int = 1
) -> Verdict:
    """Name the largest part of an update: what a change would gain the most from.

    Args:
        precision: that runs: no, bf16 or fp16.
        placement: where batches are made: device or workers.
    """
    parts = asdict(cost)
    words = {
        "data": "waiting for data",
        "launch": "Python and launches, with no kernel running"
        if processes == 1
        else "Python, launches and waiting for other processes, with no kernel running",
        "memory": "element-wise operations, normalisation and copies",
        "compute": "matrix products and convolutions",
    }
    order = sorted(parts, key=lambda name: -parts[name])
    largest = order[0]
    shown = [f"{words[name]} {parts[name] / cost.total:.0%}" for name in order]
    evidence = f"of {cost.total:,.2f} ms an update, " + ", ".join(shown)
    return Verdict(
        f"{largest}-bound", evidence, advice(largest, config, precision, placement), cost
    )


def advice(largest: str, config: TrainingConfig, precision: str, placement: str) -> str:
    """Return the flag to turn."""
    half = (
        "Turn: --mixed-precision fp16 on a GPU, or bf16 where the processor has instructions for it"
    )
    if largest == "data":
        if placement == "device":
            return (
                "Turn: --data-placement workers --num-workers N, which makes batches in other "
                "processes; or make the transform cheaper"
            )
        return "Turn: --num-workers up, or --data-placement device if the data fits in its memory"
    if largest == "launch":
        batch = f"--batch-size {2 * config.batch_size}, twice the work of each launch"
        return f"Turn: {batch}" + ("" if config.compile else "; or --compile")
    if largest == "memory":
        if precision == "no":
            return f"{half}: half the bytes"
        if not config.compile:
            return "Turn: --compile, which fuses such operations"
        return "No flag is left to turn: fewer or cheaper such operations in the model"
    if precision == "no":
        return half
    return "No flag is left to turn: this is what the hardware is for. Add devices to go faster"
