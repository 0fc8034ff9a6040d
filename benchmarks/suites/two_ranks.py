"""Trains the recipe and a hand-written DDP loop in two processes.

`processes.ddp_suite` launches it. Both contestants take turns in the same two processes and the
same gloo process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.contestants import cached_split, contestant, read_images
from benchmarks.harness.precisions import ACCELERATE_PRECISIONS, AUTOCAST_TYPES
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import Contestant, FinishedTraining, Measurement, Round, Suite
from benchmarks.peer_loops.bare import MAX_GRADIENT_NORM
from benchmarks.peer_loops.textbook import ImageArrays, Task, ready_tensors
from benchmarks.suites.mnist import MLP_WARMUP, adamw, mlp_builder
from benchmarks.suites.processes import measurements_as_json


@dataclass(frozen=True)
class Request:
    """The training that both contestants run, and how often."""

    dataset: str
    batch_size: int  # of each process
    accumulation: int
    precision: str
    tracker: str  # of the recipe
    updates: int
    warmup_updates: int
    rounds: int
    output: str  # file for the measurements


@dataclass(frozen=True)
class HandWrittenLoop:
    """DDP and `no_sync` as their documentation shows them, over tensors in memory.

    Args:
        images: [samples, channels, height, width].
        labels: int64 [samples].
    """

    task: Task
    images: torch.Tensor
    labels: torch.Tensor
    request: Request

    def train(self, updates: int, seed: int, untimed: int) -> FinishedTraining:
        """Train for `untimed` updates, then for `updates` updates that are timed."""
        accumulation = self.request.accumulation
        set_seed(seed)
        model = DistributedDataParallel(self.task.build_model(), gradient_as_bucket_view=True)
        optimizer = self.task.build_optimizer(model)
        scheduler = self.task.build_schedule(optimizer, untimed + updates)
        dtype = AUTOCAST_TYPES.get(self.request.precision)
        model.train()
        total_loss = torch.zeros(())
        clock = LoopClock(untimed)
        clock.start()
        batches = self.batches(seed)
        for _ in range(untimed + updates):
            for micro_batch in range(accumulation):
                batch = next(batches)
                is_last = micro_batch == accumulation - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    with torch.autocast("cpu", dtype, enabled=dtype is not None):
                        loss = F.cross_entropy(model(self.images[batch]), self.labels[batch])
                    (loss / accumulation).backward()
                total_loss += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            clock.update()
        seconds = clock.stop()
        torch.distributed.all_reduce(total_loss)
        micro_batches_per_update = accumulation * torch.distributed.get_world_size()
        samples = updates * micro_batches_per_update * self.request.batch_size
        mean_loss = total_loss.item() / ((untimed + updates) * micro_batches_per_update)
        return FinishedTraining(seconds, samples, mean_loss, model.module)

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """Yield the sample indices of this rank's batches, epoch after epoch, without an end."""
        rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
        batch_size = self.request.batch_size
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.labels), generator=generator)[rank::world_size]
            whole_batches = len(order) // batch_size * batch_size
            yield from reversed(order[:whole_batches].split(batch_size))


def train_the_recipe(request: Request, updates: int, seed: int, untimed: int) -> FinishedTraining:
    """Train the MNIST recipe for `untimed` updates, then for `updates` updates that are timed."""
    return train_recipe(
        load_recipe("mnist_mlp"),
        untimed + updates,
        untimed * request.accumulation,
        dataset=request.dataset,
        batch_size=request.batch_size,
        gradient_accumulation_steps=request.accumulation,
        mixed_precision=ACCELERATE_PRECISIONS.get(request.precision, request.precision),
        warmup_steps=int(MLP_WARMUP * (untimed + updates)),
        tracker=request.tracker,
        seed=seed,
    )


def started_together(compete: Contestant) -> Contestant:
    """Let a contestant begin when both ranks are ready."""

    def wait_and_compete(turn: Round) -> Measurement:
        torch.distributed.barrier()
        return compete(turn)

    return wait_and_compete


def hand_written_loop(request: Request) -> HandWrittenLoop:
    """Return the loop by hand on the recipe's data and model."""
    data = read_images(request.dataset)
    split = cached_split(data, "train")
    arrays = ImageArrays(
        torch.from_numpy(split.images.copy()).permute(0, 3, 1, 2),
        torch.from_numpy(split.labels.copy()),
        data.image_format.mean,
        data.image_format.std,
    )
    dataset = ready_tensors(arrays)
    task = Task(mlp_builder(data), adamw(fused=True), dataset, request.batch_size, MLP_WARMUP)
    images, labels = dataset.tensors
    images = images.to(AUTOCAST_TYPES.get(request.precision, torch.float32))
    return HandWrittenLoop(task, images, labels, request)


def main(request: Request) -> None:
    """Run all rounds, and write the first rank's measurements."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.distributed.init_process_group("gloo")
    by_hand = hand_written_loop(request)
    suite = Suite(
        "ddp",
        "samples/s",
        request.updates,
        workload={},
        contestants={
            "recipe": started_together(contestant(lambda *turn: train_the_recipe(request, *turn))),
            "DDP by hand": started_together(contestant(by_hand.train)),
        },
        comparisons=[],
        warmup_updates=request.warmup_updates,
    )
    suite.run(request.rounds, announce=lambda line: None)
    if torch.distributed.get_rank() == 0:
        measurements = json.dumps(measurements_as_json(suite))
        Path(request.output).write_text(measurements, encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
