"""Training samples that come in an order of their own, from a resumable `IterableDataset`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypedDict

import torch
from accelerate.utils import send_to_device
from torch.utils.data import default_collate

from common.data.batch import Batch, Collate, Samples
from common.data.order import TrainingOrder
from common.errors import UserError
from common.sentences import counted
from common.system.machine import rank, world_size

# The class by which `datasets` shuffles in a buffer. A resume would lose the samples in the buffer.
SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"


class ResumableDataset(Protocol):
    """An `IterableDataset` that can go on from an earlier position. Its rows may be anything."""

    def __iter__(self) -> Iterator[object]: ...

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: Any, /) -> object: ...  # takes what `state_dict` returned


class Position(TypedDict):
    """How far an `IterableDataset` has been read."""

    epoch: int
    dataset: object  # its state_dict(); None at the beginning of an epoch


class IterableSamples(Samples):
    """An `IterableDataset` of torch or of `datasets`, for training alone.

    It must have `state_dict` and `load_state_dict`, so that a run can be resumed. At its end, it
    starts again, after a call of `set_epoch` if it has this method.

    Each process reads a part of the samples. A data set of `datasets` is split by
    `split_dataset_by_node`. Any other yields all samples in each process, and process r of n keeps
    the samples r, r + n, r + 2n …

    At most one worker reads, because there is one position.
    """

    is_sized = False

    def __init__(self, dataset: ResumableDataset, collate_fn: Collate = default_collate):
        """Prepare to read this process's part of a data set.

        Raises:
            UserError: the data set can't be resumed exactly.
        """
        type_name = type(dataset).__name__
        if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
            raise UserError(
                f"a data set of class {type_name} can't be resumed, because it does not have both "
                "state_dict and load_state_dict",
                advice="add both methods to the class, or pass a map-style data set",
            )
        layer = getattr(dataset, "_ex_iterable", None)
        self.is_split = layer is not None  # only data sets of `datasets` have this attribute
        # Each operation on such a data set wraps the layer below.
        while layer is not None:
            if type(layer).__name__ == SHUFFLE_BUFFER:
                raise UserError(
                    f"a data set of class {type_name} with a shuffle buffer can't be resumed "
                    "exactly",
                    advice=(
                        "leave out .shuffle(...) and list the files in a random order instead, or "
                        "read parquet files with --streaming"
                    ),
                )
            layer = getattr(layer, "ex_iterable", None)
        if self.is_split:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank(), world_size())
        self.dataset = dataset
        self.collate = collate_fn
        # The position after the last batch that was made (in a worker) or trained on (here).
        self.position: Position = {"epoch": 0, "dataset": None}
        self.rows: Iterator[object] | None = None  # only in the process that reads

    def read_rows(self) -> Iterator[object]:
        """Yield this rank's samples without end, from `position`.

        Raises:
            UserError: an epoch has no sample for this rank.
        """
        if self.position["dataset"] is not None:
            self.dataset.load_state_dict(self.position["dataset"])
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.position["epoch"])
            rows = iter(self.dataset)
            if not self.is_split:
                rows = own_rows(rows)
            count = 0
            for row in rows:
                count += 1
                yield row
            # An epoch that was resumed at its end has no samples left, which is not a mistake.
            if not count and self.position["dataset"] is None:
                raise UserError(
                    "this process got no sample of an epoch from an IterableDataset",
                    advice=(
                        "return a new iterator from its __iter__ each time, and give it at least "
                        "one sample for each process"
                    ),
                    every_rank=True,
                )
            self.position = {"epoch": self.position["epoch"] + 1, "dataset": None}

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Read as many samples as `samples` has; the values of `samples` have no meaning here.

        The position travels with the batch, because a worker reads ahead of training.
        """
        if self.rows is None:
            self.rows = self.read_rows()
        batch = self.collate(list(islice(self.rows, len(samples))))
        position = self.position | {"dataset": self.dataset.state_dict()}
        return {"batch": batch, "position": position}

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Note the position after this batch for the next checkpoint, and return the batch."""
        self.position = batch["position"]
        return batch["batch"]

    def go_on_after(self, batch: Batch | None) -> None:
        """Have this process go on reading where a worker stopped that has ended.

        The samples after the last batch that the worker sent are read again. If it sent none,
        reading goes on from the position of training.

        Args:
            batch: the last batch of the worker, as `fetch` returned it; None if there was none.
        """
        if batch is not None:
            self.position = batch["position"]
        self.rows = None

    def example(self, size: int, length: int) -> Batch:
        """Return the shapes of a batch on the meta device, which holds no values.

        The batch is made of copies of one sample. The position of the data set is restored
        afterwards.

        Args:
            size: samples of the batch.
            length: not used: rows have the length that the data set gives them.
        """
        before = self.dataset.state_dict()
        row = next(iter(self.dataset))
        self.dataset.load_state_dict(before)
        return send_to_device(self.collate([row] * size), "meta")

    def state_dict(self) -> Position:
        return self.position

    def load_state_dict(self, state: Position) -> None:
        self.position = {"epoch": state["epoch"], "dataset": state["dataset"]}

    def load_from_ranks(self, states: Sequence[Position]) -> None:
        """Refuse a resume on another number of processes.

        A resume calls this instead of `load_state_dict` if the number of processes has changed.

        Args:
            states: the positions of all ranks of the interrupted run.

        Raises:
            UserError: always, because the positions can't be divided among other processes.
        """
        processes = counted(len(states), "process", "processes")
        raise UserError(
            f"the run trained with {processes}, and can't be resumed with another number, because "
            "each process saved a position of its own in an IterableDataset",
            advice=f"resume the run with {processes}",
        )


def own_rows(rows: Iterator[object]) -> Iterator[object]:
    """Yield this rank's share of the samples that all ranks read.

    The last samples are dropped if they are not enough for all ranks.
    """
    # `zip` takes each group from one and the same iterator: the next `world_size` samples.
    groups = zip(*[rows] * world_size(), strict=False)
    return (group[rank()] for group in groups)


@dataclass(frozen=True)
class IterableOrder(TrainingOrder):
    """How many batches a run takes from an `IterableDataset`, which chooses the samples itself."""

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor:
        """Return a row for each micro-batch since `first_update`: int64 [rows, batch_size].

        The values are not sample indices. They differ between batches and ranks, because the first
        value of a row seeds the random generators for its batch.
        """
        first = first_update * self.accumulation
        count = self.updates_per_epoch * self.accumulation
        numbers = torch.arange(first, count)[:, None] * self.world_size + self.rank
        return numbers.expand(-1, self.batch_size)
