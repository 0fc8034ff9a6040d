"""Training loops with nothing around them, over batches that somebody else makes.

A recipe's loop takes longer by the cost of clipping, the guard against non-finite gradients, the
schedule, counting, logging and the run's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import ACCELERATE_PRECISIONS, AUTOCAST_TYPES
from benchmarks.harness.rounds import FinishedTraining
from benchmarks.peer_loops.textbook import Task

Batch = dict[str, torch.Tensor]
BatchMaker = Callable[[int], Iterator[Batch]]  # from a seed
MAX_GRADIENT_NORM = 1.0  # the recipes' default


@dataclass(frozen=True)
class BareLoop:
    """A loop over the batches of a function.

    Args:
        task: its model, optimizer, schedule and batch size are used; its data set is not.
        batches: makes the batches of a training.
        precision: "fp32", "bf16" or "fp16".
        same_work: clip gradients and step a schedule, as the recipe does. Without it, the loop
            is forward, backward, step and nothing else.
    """

    task: Task
    batches: BatchMaker
    precision: str
    same_work: bool

    def with_accelerate(self, updates: int, seed: int, untimed: int = 0) -> FinishedTraining:
        """Train with Accelerate: `prepare`, `accumulate`, backward, step."""
        cpu = default_device().type == "cpu"
        precision = ACCELERATE_PRECISIONS.get(self.precision, self.precision)
        accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
        set_seed(seed)
        model = self.task.build_model()
        optimizer = self.task.build_optimizer(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        # A new schedule sets the first learning rate, so the bare loop must not have one.
        scheduler = None
        if self.same_work:
            scheduler = accelerator.prepare(self.task.build_schedule(optimizer, untimed + updates))
        model.train()
        losses: list[torch.Tensor] = []
        clock = LoopClock(untimed)
        clock.start()
        for _, batch in zip(range(untimed + updates), self.batches(seed), strict=False):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["images"]), batch["labels"])
                accelerator.backward(loss)
                if self.same_work:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            clock.update()
        return self.finish(clock, updates, losses, accelerator.unwrap_model(model))

    def without_accelerate(self, updates: int, seed: int, untimed: int = 0) -> FinishedTraining:
        """Train with plain PyTorch."""
        set_seed(seed)
        device = default_device()
        model = self.task.build_model().to(device)
        optimizer = self.task.build_optimizer(model)
        scheduler = None
        if self.same_work:
            scheduler = self.task.build_schedule(optimizer, untimed + updates)
        scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        dtype = AUTOCAST_TYPES.get(self.precision)
        model.train()
        losses: list[torch.Tensor] = []
        clock = LoopClock(untimed)
        clock.start()
        for _, batch in zip(range(untimed + updates), self.batches(seed), strict=False):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(batch["images"]), batch["labels"])
            scaler.scale(loss).backward()
            if self.same_work:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            clock.update()
        return self.finish(clock, updates, losses, model)

    def finish(
        self, clock: LoopClock, updates: int, losses: list[torch.Tensor], model: nn.Module
    ) -> FinishedTraining:
        """Stop the clock, then read the losses, which waits for the device."""
        seconds = clock.stop()
        mean_loss = torch.stack(losses).float().mean().item()
        return FinishedTraining(seconds, updates * self.task.batch_size, mean_loss, model)
