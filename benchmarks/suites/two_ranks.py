"""The recipe and a hand-written DDP loop in two processes; started by torchrun, see `ddp`.

Both contestants run in the same two processes and the same gloo process group, in turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.contestants import contestant, read_images
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import Contestant, Measurement, Round, Suite, Training
from benchmarks.peer_loops.textbook import (
    ACCELERATE_PRECISIONS,
    AUTOCAST_TYPES,
    ImageArrays,
    Task,
    ready_tensors,
)
from benchmarks.suites.mnist import MLP_WARMUP, adamw, mlp_builder
from benchmarks.suites.processes import measurements_as_json


def train_by_hand(
    task: Task,
    images: torch.Tensor,
    labels: torch.Tensor,
    request: dict[str, Any],
    steps: int,
    seed: int,
    untimed: int,
) -> Training:
    """Train with DDP and `no_sync`, as its documentation shows, over tensors in memory."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation, batch_size = request["accumulation"], request["batch_size"]
    set_seed(seed)
    model = DistributedDataParallel(task.build_model(), gradient_as_bucket_view=True)
    optimizer = task.build_optimizer(model)
    scheduler = task.build_schedule(optimizer, untimed + steps)
    dtype = AUTOCAST_TYPES.get(request["precision"])
    model.train()
    total_loss = torch.zeros(())
    clock = LoopClock(untimed)
    clock.start()
    generator = torch.Generator().manual_seed(seed)
    waiting: list[torch.Tensor] = []
    for _ in range(untimed + steps):
        for micro_batch in range(accumulation):
            if not waiting:
                order = torch.randperm(len(labels), generator=generator)[rank::world_size]
                whole = len(order) // batch_size * batch_size
                waiting = list(order[:whole].split(batch_size))
            chosen = waiting.pop()
            is_last = micro_batch == accumulation - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
                (loss / accumulation).backward()
            total_loss += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.update()
    seconds = clock.stop()
    torch.distributed.all_reduce(total_loss)
    micro_batches = steps * accumulation * world_size
    mean_loss = total_loss.item() / ((untimed + steps) * accumulation * world_size)
    return Training(seconds, micro_batches * batch_size, mean_loss, model.module)


def started_together(compete: Contestant) -> Contestant:
    """Let a contestant begin when both ranks are there."""

    def wait_and_compete(asked: Round) -> Measurement:
        torch.distributed.barrier()
        return compete(asked)

    return wait_and_compete


def main(request: dict[str, Any]) -> None:
    """Run all rounds, and write the first rank's measurements."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.distributed.init_process_group("gloo")
    data = read_images(request["dataset"])
    arrays = ready_tensors(
        ImageArrays(
            torch.from_numpy(data.splits["train"].images.copy()).permute(0, 3, 1, 2),
            torch.from_numpy(data.splits["train"].labels.copy()),
            data.mean,
            data.std,
        )
    )
    images, labels = arrays.tensors
    task = Task(mlp_builder(data), adamw(fused=True), arrays, request["batch_size"], MLP_WARMUP)
    images = images.to(AUTOCAST_TYPES.get(request["precision"], torch.float32))

    def recipe(steps: int, seed: int, untimed: int) -> Training:
        return train_recipe(
            load_recipe("mnist_mlp"),
            untimed + steps,
            untimed * request["accumulation"],
            dataset=request["dataset"],
            batch_size=request["batch_size"],
            gradient_accumulation_steps=request["accumulation"],
            mixed_precision=ACCELERATE_PRECISIONS.get(request["precision"], request["precision"]),
            warmup_steps=int(MLP_WARMUP * (untimed + steps)),
            tracker=request["tracker"],
            seed=seed,
        )

    def by_hand(steps: int, seed: int, untimed: int) -> Training:
        return train_by_hand(task, images, labels, request, steps, seed, untimed)

    suite = Suite(
        "ddp",
        "samples/s",
        request["steps"],
        workload={},
        contestants={
            "recipe": started_together(contestant(recipe)),
            "DDP by hand": started_together(contestant(by_hand)),
        },
        comparisons=[],
        warmup_steps=request["warmup_steps"],
    )
    suite.run(request["rounds"], announce=lambda line: None)
    if torch.distributed.get_rank() == 0:
        Path(request["output"]).write_text(
            json.dumps(measurements_as_json(suite)), encoding="utf-8"
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
