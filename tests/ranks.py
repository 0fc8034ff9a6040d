"""Several ranks in threads of one process, whose collectives combine what each gives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch


class Exchange:
    """A place where ranks leave a value each, and from which each takes all of them."""

    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size, timeout=60)
        self.values: list[Any] = [None] * world_size

    def all_values(self, rank: int, value: Any) -> list[Any]:
        """Return the value of each rank, once all have given theirs."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class RankAccelerator:
    """What measuring needs of an Accelerator."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self.process_index, self.num_processes = rank, world_size
        self.is_main_process = rank == 0
        self.exchange = exchange
        self.exchanges = 0  # of objects

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the sum or the mean over ranks; all must give tensors of one shape."""
        tensors = self.exchange.all_values(self.process_index, tensor)
        assert len({value.shape for value in tensors}) == 1
        total = torch.stack(tensors).sum(0)
        return total / self.num_processes if reduction == "mean" else total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks; all must give tensors of one shape."""
        tensors = self.exchange.all_values(self.process_index, tensor)
        assert len({value.shape for value in tensors}) == 1
        return torch.cat(tensors)


def gather_from_ranks(accelerator: Any, value: Any) -> list[Any]:
    """Stand for the function of this name in `common.agreement`."""
    accelerator.exchanges += 1
    return accelerator.exchange.all_values(accelerator.process_index, value)


def on_ranks(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call `work(accelerator)` on each rank at the same time, and return what each returns."""
    exchange = Exchange(world_size)
    accelerators = [RankAccelerator(rank, world_size, exchange) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, accelerator) for accelerator in accelerators]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors and not all(future.exception() for future in futures):
            raise AssertionError(f"not all ranks ended alike: {errors}")
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
