"""Samples that come in an order of their own: an `IterableDataset` that can say where it stands."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import default_collate

from common.data.batch import Batch, Samples
from common.data.order import TrainingOrder
from common.errors import UserError
from common.machine import rank, world_size

SHUFFLED = "BufferShuffledExamplesIterable"  # of `datasets`: a resume would lose what it holds


class IterableSamples(Samples):
    """An `IterableDataset` of torch or of `datasets`, read by one worker; for training alone.

    A dataset of `datasets` is split by `split_dataset_by_node`; any other yields all samples in
    each process, which takes its one of as many in a row as there are processes, and has
    `state_dict` and `load_state_dict`. At its end it begins anew, with `set_epoch` where it has it.
    """

    is_sized = False

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Batch] = default_collate):
        kind, inner = type(dataset).__name__, getattr(dataset, "_ex_iterable", None)
        if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
            raise UserError(f"a {kind} without state_dict and load_state_dict can't be resumed")
        self.is_split = inner is not None  # one of `datasets`
        while inner is not None:
            if type(inner).__name__ == SHUFFLED:
                found = f"a {kind} with a shuffle buffer can't be resumed exactly"
                advice = "shuffle the shards, or read parquet files with --streaming"
                raise UserError(f"{found}: {advice}")
            inner = getattr(inner, "ex_iterable", None)
        if self.is_split:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank(), world_size())
        self.dataset, self.collate = dataset, collate_fn
        self.position: dict[str, Any] = {"epoch": 0, "dataset": None}  # after the last batch
        self.rows: Iterator[Any] | None = None  # in the process that reads

    def read_rows(self) -> Iterator[Any]:
        """Yield this rank's samples without end, from its position."""
        if self.position["dataset"] is not None:
            self.dataset.load_state_dict(self.position["dataset"])
        every = world_size()
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.position["epoch"])
            rows = iter(self.dataset)
            if not self.is_split:
                parts = zip(*[rows] * every, strict=False)  # without the last, incomplete one
                rows = (part[rank()] for part in parts)
            count = 0
            for row in rows:
                count += 1
                yield row
            if not count and self.position["dataset"] is None:
                raise UserError("an IterableDataset has no sample for a process", every_rank=True)
            self.position = {"epoch": self.position["epoch"] + 1, "dataset": None}

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        self.rows = self.rows or self.read_rows()
        made = self.collate([*islice(self.rows, len(samples))])
        position = self.position | {"dataset": self.dataset.state_dict()}
        return {"batch": made, "position": position}

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        self.position = batch["position"]
        return batch["batch"]

    def go_on_after(self, batch: Batch | None) -> None:
        """Have this process read what follows the last batch of a worker, if there was one."""
        if batch is not None:
            self.position = batch["position"]
        self.rows = None

    def example(self, size: int, length: int) -> Batch:
        before = self.dataset.state_dict()
        row = next(iter(self.dataset))
        self.dataset.load_state_dict(before)
        return send_to_device(self.collate([row] * size), "meta")

    def state_dict(self) -> dict[str, Any]:
        return self.position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = dict(state)

    def load_from_ranks(self, states: list[Any]) -> None:
        what = "the position in an IterableDataset is of each process"
        raise UserError(f"{what}: resume on {len(states)}")


@dataclass(frozen=True)
class IterableOrder(TrainingOrder):
    """As many batches as the run has; which samples they are of, the data set knows."""

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor:
        first, count = first_update * self.accumulation, self.updates_per_epoch * self.accumulation
        numbers = torch.arange(first, count)[:, None] * self.world_size + self.rank  # seeds
        return numbers.expand(-1, self.batch_size)
