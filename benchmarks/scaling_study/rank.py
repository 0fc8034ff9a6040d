"""One process of a group that `runs.py` starts. It trains on each request.

Each line on standard input is a `TrainingRequest`. Each line on standard output is the
`TrainingAnswer` to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.harness.isolation import isolated
from benchmarks.harness.kernel_time import Interval, interval_of, union_length
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.scaling_study.messages import TrainingAnswer, TrainingRequest
from common.measure.stopwatch import FIRST_UPDATES
from common.profile.verdict import is_kernel

NEVER = 10**6  # updates between two lines of the log


def shares_of_communication(events: Sequence[Any]) -> dict[str, float]:
    """Return the shares of time in which collectives run.

    Args:
        events: of torch's profiler, which has no public type for them.

    Returns:
        `under_way`: share of the time in which at least one collective runs; `alone`: share in
        which a collective runs and no computation does.
    """
    computation, communication = intervals_of(events)
    intervals = computation + communication
    if not intervals:
        return {"under_way": 0.0, "alone": 0.0}
    total = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    alone = union_length(intervals) - union_length(computation)
    return {"under_way": union_length(communication) / total, "alone": alone / total}


def intervals_of(events: Sequence[Any]) -> tuple[list[Interval], list[Interval]]:
    """Return the intervals of computation and those of communication.

    On a GPU, NCCL's kernels communicate and all other kernels compute. On a CPU, gloo's operations
    communicate, and the operations of the training thread compute.
    """
    kernels = [event for event in events if is_kernel(event)]
    if kernels:
        communication = [event for event in kernels if "nccl" in event.name.lower()]
        computation = [event for event in kernels if "nccl" not in event.name.lower()]
    else:
        training_threads = {event.thread for event in events if event.name.startswith("c10d::")}
        communication = [event for event in events if event.name.startswith("gloo:")]
        computation = [
            event
            for event in events
            if event.thread in training_threads and event.name.startswith("aten::")
        ]
    return [*map(interval_of, computation)], [*map(interval_of, communication)]


@contextmanager
def profiled(shares: dict[str, float]) -> Iterator[None]:
    """Profile the body, and put its shares of communication into `shares`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    shares |= shares_of_communication(profile.events())


def answer(request: TrainingRequest) -> TrainingAnswer:
    """Train as the request says, and return the measurements."""
    shares: dict[str, float] = {}
    with isolated(request.threads or torch.get_num_threads()):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        training = train_recipe(
            load_recipe(request.recipe),
            request.updates + FIRST_UPDATES,
            # In the first updates, DDP rebuilds its buckets and memory is measured.
            FIRST_UPDATES,
            profiled(shares) if request.profile else None,
            # Each line of a log needs a collective of its own.
            log_every=NEVER,
            num_threads=request.threads,
            **request.settings,
        )
    assert training.model is not None
    parameters = [parameter.numel() for parameter in training.model.parameters()]
    return TrainingAnswer(training.seconds / request.updates, parameters, shares)


def main() -> None:
    """Answer all requests; what the recipe prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    for line in sys.stdin:
        answers.write(answer(TrainingRequest.from_line(line)).to_line())
        answers.flush()


if __name__ == "__main__":
    main()
