"""A model of an update's time, fitted to measured times, to predict others.

With p devices, n parameters in b buckets, and a link with rate r and delay d:

    compute  = (per_update + per_sample · batch) · crowding, for several processes of a machine
    network  = bytes · (p−1)/p · (1 / (efficiency · r) + 1 / software + 2 · d / window)
             + hops · b · (latency + d)
    update   = compute + max(network − overlap · compute, network · share of the last bucket)

`bytes` and `hops` are those of a ring; see `STRATEGIES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

ASSUMPTIONS = (
    "Each collective is a ring of all devices, and each device has a link of its own in each "
    "direction. Hops grow with the number of devices; NCCL's trees do better from some hundred "
    "devices on. A machine whose devices share a link does worse; one with several links does "
    "better.",
    "Computing takes one time per update and one per sample, the same on all devices: no "
    "stragglers and no wait for data. Processes that share a CPU slow each other by the fitted "
    "factor `crowding`; devices of a cluster don't.",
    "The share of computing that hides communication is the fitted one, whatever the ratio of the "
    "two; the last bucket is never hidden.",
    "Gradients sent as fp16 cost half the bytes and nothing else. FSDP2 gathers and reduces in as "
    "many pieces as DDP has buckets.",
)


@dataclass(frozen=True)
class Traffic:
    """What a ring sends for one update."""

    bytes_per_parameter: int  # times (p−1)/p
    hops: int  # times (p−1)


# An all-reduce is a reduce-scatter and an all-gather. FSDP2 gathers the weights twice, and
# reduces and scatters the gradients.
STRATEGIES = {
    "DDP": Traffic(2 * 4, 2),
    "DDP fp16": Traffic(2 * 2, 2),
    "FSDP2": Traffic(2 * 4 + 4, 3),
    "FSDP2 bf16": Traffic(2 * 2 + 4, 3),  # weights travel in the type of the products
}
FIRST_BUCKET = 2**20  # bytes, the default of DDP
BUCKET = 25 * 2**20  # bytes, the default of DDP


@dataclass(frozen=True)
class Job:
    """The facts of a training that the model depends on."""

    processes: int
    batch: int  # samples per process and update
    parameters: int
    buckets: int = 1
    last_share: float = 1.0  # share of the parameters in the bucket that is sent last
    rate: float = math.inf  # of a link, in bytes per second; infinite in memory
    delay: float = 0.0  # seconds, each way
    strategy: str = "DDP"


def buckets_of(parameters: Sequence[int]) -> tuple[int, float]:
    """Return the number of buckets that DDP sends gradients in, and the share of the last one.

    Args:
        parameters: elements of each fp32 parameter, in the order of the model. Gradients come in
            reverse order.
    """
    sizes = [0]
    limit = FIRST_BUCKET
    for elements in reversed(parameters):
        if sizes[-1] >= limit:
            sizes.append(0)
            limit = BUCKET
        sizes[-1] += 4 * elements
    return len(sizes), sizes[-1] / sum(sizes)


@dataclass(frozen=True)
class StepTime:
    """The model. Times are in seconds, rates in bytes per second."""

    per_update: float
    per_sample: float
    software: float  # rate of copies, sums and the protocol, which slow any link
    efficiency: float  # share of a link's rate that gradients reach
    latency: float  # of a hop, besides the link's delay
    overlap: float  # share of computing that can hide communication
    window: float = math.inf  # bytes that are sent before an answer is awaited
    crowding: float = 1.0  # factor by which other processes of the machine slow computing

    def compute(self, job: Job) -> float:
        """Return the seconds of computing of one update."""
        alone = self.per_update + self.per_sample * job.batch
        return alone * self.crowding if job.processes > 1 else alone

    def network(self, job: Job) -> float:
        """Return the seconds of communication of one update."""
        traffic = STRATEGIES[job.strategy]
        others = job.processes - 1
        volume = traffic.bytes_per_parameter * job.parameters * others / job.processes
        seconds_per_byte = 1 / (self.efficiency * job.rate) + 1 / self.software
        seconds_per_byte += 2 * job.delay / self.window
        seconds_per_hop = self.latency + job.delay
        return volume * seconds_per_byte + traffic.hops * others * job.buckets * seconds_per_hop

    def update(self, job: Job) -> float:
        """Return the seconds of one update, in which computing hides some communication."""
        compute = self.compute(job)
        network = self.network(job)
        return compute + max(network - self.overlap * compute, network * job.last_share)

    def efficiency_of(self, job: Job) -> float:
        """Return the speed of one of the job's devices, relative to a device that is alone."""
        return self.update(replace(job, processes=1)) / self.update(job)


# Where the fit starts. With few measurements, the fitted values stay near these.
START = StepTime(
    per_update=1e-3,
    per_sample=1e-5,
    software=1e9,
    efficiency=0.9,
    latency=1e-4,
    overlap=0.3,
    window=1e6,
    crowding=1.0,
)
STAYING_WEIGHT = 3e-4  # of the distance from the start, against a relative error of 1
SMALLEST_SHARE = 1e-6  # because the fit would divide by a share of 0


def fit(measured: Sequence[tuple[Job, float]]) -> StepTime:
    """Return the model with the least squares of relative errors.

    Args:
        measured: jobs, and the measured seconds of an update of each.
    """
    from scipy.optimize import least_squares

    alone = [(job, seconds) for job, seconds in measured if job.processes == 1] or measured
    start = replace(START, per_sample=min(seconds / job.batch for job, seconds in alone))
    # Shares are fitted between 0 and 1. The logarithms of the other values are fitted.
    is_share = [field.name in ("efficiency", "overlap") for field in fields(StepTime)]
    begin = np.where(is_share, astuple(start), np.log(astuple(start)))
    lower = np.where(is_share, 0.0, begin - 14)
    upper = np.where(is_share, 1.0, begin + 14)

    def model_of(values: np.ndarray) -> StepTime:
        shares = np.maximum(values, SMALLEST_SHARE)
        others = np.exp(np.where(is_share, 0, values))
        return StepTime(*np.where(is_share, shares, others).tolist())

    def errors(values: np.ndarray) -> np.ndarray:
        candidate = model_of(values)
        relative = [candidate.update(job) / seconds - 1 for job, seconds in measured]
        return np.array([*relative, *(STAYING_WEIGHT * (values - begin))])

    return model_of(least_squares(errors, begin, bounds=(lower, upper)).x)


def error(model: StepTime, job: Job, seconds: float) -> float:
    """Return the relative error of a prediction; positive if it is longer than the measurement."""
    return model.update(job) / seconds - 1
