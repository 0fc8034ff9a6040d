"""A model of how long an update takes, fitted to measured ones, to predict others.

With p devices, n parameters in b buckets, and a link with rate r and delay d:

    compute  = (per_update + per_sample · batch) · crowding, for several processes of a machine
    network  = bytes · (p−1)/p · (1 / (efficiency · r) + 1 / software + 2 · d / window)
             + hops · b · (latency + d)
    update   = compute + max(network − overlap · compute, network · share of the last bucket)

`bytes` and `hops` are those of a ring, see `STRATEGIES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

ASSUMPTIONS = (
    "Each collective is a ring of all devices, each with a link of its own in each direction: "
    "hops grow with the devices (NCCL's trees do better from some hundred devices on), and a "
    "machine whose devices share a link, or that has several, does worse or better.",
    "Computing takes a time for each update and one for each sample, the same on all devices: no "
    "stragglers, no wait for data. Processes that share a CPU slow each other by the factor fitted "
    "as crowding; devices of a cluster don't.",
    "The share of computing behind which communication hides is the fitted one, at any ratio of "
    "the two; the last bucket hides behind nothing.",
    "Gradients sent as fp16 cost half the bytes and nothing else; FSDP2 gathers and reduces in as "
    "many pieces as DDP has buckets.",
)
# Bytes that each parameter sends, times (p−1)/p, and hops, times (p−1): an all-reduce is a
# reduce-scatter and an all-gather; FSDP2 gathers weights twice, and reduces and scatters gradients.
STRATEGIES = {
    "DDP": (2 * 4, 2),
    "DDP fp16": (2 * 2, 2),
    "FSDP2": (2 * 4 + 4, 3),
    "FSDP2 bf16": (2 * 2 + 4, 3),  # weights travel in the type they are multiplied in
}
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes, DDP's own


@dataclass(frozen=True)
class Job:
    """What a training is, as far as the model is concerned."""

    processes: int
    batch: int  # samples per process and update
    parameters: int
    buckets: int = 1
    last_share: float = 1.0  # of the parameters in the bucket that is sent last
    rate: float = math.inf  # bytes per second of a link; none but the software's in memory
    delay: float = 0.0  # seconds, each way
    strategy: str = "DDP"


def buckets_of(parameters: Sequence[int]) -> tuple[int, float]:
    """Return how many buckets DDP sends gradients in, and the share in the last one.

    Args:
        parameters: elements of each in fp32, in the order of the model; gradients come in reverse.
    """
    sizes, limit = [0], FIRST_BUCKET
    for elements in reversed(parameters):
        if sizes[-1] >= limit:
            sizes, limit = [*sizes, 0], BUCKET
        sizes[-1] += 4 * elements
    return len(sizes), sizes[-1] / sum(sizes)


@dataclass(frozen=True)
class StepTime:
    """The model; times in seconds, rates in bytes per second."""

    per_update: float
    per_sample: float
    software: float  # rate of copies, sums and the protocol, in the way of any link
    efficiency: float  # share of a link's rate that gradients get
    latency: float  # of a hop, besides the link's delay
    overlap: float  # share of computing that communication can hide behind
    window: float = math.inf  # bytes on their way until an answer is waited for
    crowding: float = 1.0  # by how much longer computing takes beside others of the machine

    def compute(self, job: Job) -> float:
        alone = self.per_update + self.per_sample * job.batch
        return alone * self.crowding if job.processes > 1 else alone

    def network(self, job: Job) -> float:
        others, (size, hops) = job.processes - 1, STRATEGIES[job.strategy]
        volume = size * job.parameters * others / job.processes
        seconds_per_byte = 1 / (self.efficiency * job.rate) + 1 / self.software
        seconds_per_byte += 2 * job.delay / self.window
        return volume * seconds_per_byte + hops * others * job.buckets * (self.latency + job.delay)

    def update(self, job: Job) -> float:
        compute, network = self.compute(job), self.network(job)
        return compute + max(network - self.overlap * compute, network * job.last_share)

    def efficiency_of(self, job: Job) -> float:
        """Return the speed of one of the job's devices, relative to a device that is alone."""
        return self.update(replace(job, processes=1)) / self.update(job)


# Where the fit starts, and how little may be known: with few measurements it stays near.
START = StepTime(1e-3, 1e-5, 1e9, 0.9, 1e-4, 0.3, 1e6, 1.0)
DOUBT = 3e-4  # weight of staying, against a relative error of 1


def fit(measured: Sequence[tuple[Job, float]]) -> StepTime:
    """Return the model with the least squares of relative errors, of jobs and seconds of each."""
    from scipy.optimize import least_squares

    alone = [(job, seconds) for job, seconds in measured if job.processes == 1] or measured
    start = replace(START, per_sample=min(seconds / job.batch for job, seconds in alone))
    shares = [field.name in ("efficiency", "overlap") for field in fields(StepTime)]
    # Shares lie between 0 and 1; of the others the logarithm is fitted.
    begin = np.where(shares, astuple(start), np.log(astuple(start)))
    bounds = np.where(shares, 0.0, begin - 14), np.where(shares, 1.0, begin + 14)

    def model(values: np.ndarray) -> StepTime:
        return StepTime(*np.where(shares, values, np.exp(np.where(shares, 0, values))).tolist())

    def errors(values: np.ndarray) -> np.ndarray:
        candidate = model(np.where(shares, np.maximum(values, 1e-6), values))
        relative = [candidate.update(job) / seconds - 1 for job, seconds in measured]
        return np.array([*relative, *(DOUBT * (values - begin))])

    found = least_squares(errors, begin, bounds=bounds)
    return model(np.where(shares, np.maximum(found.x, 1e-6), found.x))


def error(model: StepTime, job: Job, seconds: float) -> float:
    """Return by how much a prediction is too long, relative to what was measured."""
    return model.update(job) / seconds - 1
