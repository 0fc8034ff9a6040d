"""One process of a measured job; started by `benchmarks.scaling`, it trains whenever it is asked.

Each line on standard input asks for a training, in JSON; each line on standard output answers it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.harness.isolation import isolated
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from common.measure.stopwatch import FIRST_UPDATES

Span = tuple[float, float]  # beginning and end


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same stretches of time, apart and in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return how long something went on, in any number of spans at once."""
    return sum(end - begin for begin, end in union(spans))


def shares_of_communication(events: Sequence[Any]) -> dict[str, float]:
    """Return the shares of time in which a collective was under way, and alone at that.

    On a GPU the collectives are NCCL's kernels, and all other kernels are computation; on a CPU
    they are gloo's, and computation is what the training thread does in operations.
    """
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    if kernels:
        chosen = [(e, "nccl" in e.name.lower()) for e in kernels]
    else:
        threads = {e.thread for e in events if e.name.startswith("c10d::")}
        own = [e for e in events if e.thread in threads and e.name.startswith("aten::")]
        chosen = [(e, False) for e in own] + [(e, True) for e in events if e.name[:5] == "gloo:"]
    spans = {
        kind: [(e.time_range.start, e.time_range.end) for e, is_sent in chosen if is_sent == kind]
        for kind in (True, False)
    }
    whole = spans[True] + spans[False]
    if not whole:
        return {"under_way": 0.0, "alone": 0.0}
    total = max(end for _, end in whole) - min(begin for begin, _ in whole)
    alone = length(whole) - length(spans[False])
    return {"under_way": length(spans[True]) / total, "alone": alone / total}


@contextmanager
def profiled(found: dict[str, float]) -> Iterator[None]:
    """Put the shares of communication of what is done within into `found`."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    found |= shares_of_communication(profile.events())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Train as asked.

    Args:
        request: `recipe`, `updates` that count, `settings` of its `Config`, whether to `profile`
            and whether to `shard` by FSDP2.

    Returns:
        seconds of an update, `parameters` in elements, one by one, and shares of communication.
    """
    os.environ["ACCELERATE_USE_FSDP"] = str(request["shard"]).lower()
    os.environ["FSDP_VERSION"] = "2"
    found: dict[str, float] = {}
    with isolated(request["settings"].get("num_threads") or torch.get_num_threads()):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        training = train_recipe(
            load_recipe(request["recipe"]),
            request["updates"] + FIRST_UPDATES,
            FIRST_UPDATES,  # buckets are made anew, memory is measured
            profiled(found) if request["profile"] else None,
            # Each line of a log is a collective of its own.
            log_every=10**6,
            **request["settings"],
        )
    assert training.model is not None
    parameters = [parameter.numel() for parameter in training.model.parameters()]
    seconds = training.seconds / request["updates"]
    return {"seconds": seconds, "parameters": parameters, **found}


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
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
