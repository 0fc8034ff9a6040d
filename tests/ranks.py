"""Several ranks as threads of one process, with collectives that combine their values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch


class Exchange:
    """Lets each rank pass a value and get the values of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size, timeout=60)
        self.values: list[Any] = [None] * world_size

    def all_values(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, once each rank has called this."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class RankAccelerator:
    """The attributes and methods of an Accelerator that measuring needs."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self.process_index = rank
        self.num_processes = world_size
        self.is_main_process = rank == 0
        self.exchange = exchange
        self.exchanges = 0  # how often objects were gathered

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the sum or the mean over ranks; all tensors must have the same shape."""
        tensors = self.exchange.all_values(self.process_index, tensor)
        assert len({value.shape for value in tensors}) == 1
        total = torch.stack(tensors).sum(0)
        return total / self.num_processes if reduction == "mean" else total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks; all tensors must have the same shape."""
        tensors = self.exchange.all_values(self.process_index, tensor)
        assert len({value.shape for value in tensors}) == 1
        return torch.cat(tensors)


def alone() -> Any:
    """Return the Accelerator of the only process of a run."""
    return RankAccelerator(0, 1, Exchange(1))


def gather_from_ranks(accelerator: Any, value: Any) -> list[Any]:
    """Stand for the function of this name in `common.ranks.agreement`."""
    accelerator.exchanges += 1
    return accelerator.exchange.all_values(accelerator.process_index, value)


def on_ranks(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call `work(accelerator)` on each rank at the same time, and return the results by rank."""
    exchange = Exchange(world_size)
    accelerators = [RankAccelerator(rank, world_size, exchange) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, accelerator) for accelerator in accelerators]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors and not all(future.exception() for future in futures):
            raise AssertionError(f"only some ranks failed: {errors}")
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
