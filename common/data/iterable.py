"""Training samples from a resumable `IterableDataset`, which itself chooses their order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypedDict

import torch
from accelerate.utils import send_to_device
from torch.utils.data import default_collate

from common.data.order import TrainingOrder
from common.data.samples import Batch, Collate, Samples, collated
from common.errors import UserError
from common.system.launch_variables import rank, world_size
from common.system.wording import counted

# The class with which `datasets` shuffles in a buffer. It is refused, because a resume would lose
# the samples in the buffer.
SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"


class ResumableDataset(Protocol):
    """An `IterableDataset` that can go on from an earlier position. Its rows may have any type."""

    def __iter__(self) -> Iterator[object]: ...

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: Any, /) -> object: ...  # takes what `state_dict` returned


class Position(TypedDict):
    """How far an `IterableDataset` has been read; part of a checkpoint."""

    epoch: int
    dataset: object  # its state_dict(); None at the beginning of an epoch


class IterableSamples(Samples):
    """An `IterableDataset` of torch or of `datasets`, for training alone.

    The data set must have `state_dict` and `load_state_dict`, so that a run can be resumed. At its
    end, the data set is read again from its beginning. If it has `set_epoch`, this method is
    called before each reading.

    Each process reads a part of the samples. A data set of `datasets` is split by
    `split_dataset_by_node`. Any other data set yields all samples in each process, and process r of
    n keeps the samples r, r + n, r + 2n …

    At most one worker per process reads, because the process has only one position.
    """

    is_sized = False

    def __init__(self, dataset: ResumableDataset, collate_fn: Collate = default_collate):
        """Prepare to read this process's part of a data set.

        Raises:
            UserError: the data set can't be resumed exactly, because it lacks the two methods or
                shuffles in a buffer.
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
        # Each operation on such a data set, such as map, wraps the layer below in another one. So
        # the shuffle buffer may be in any layer.
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
        # In a worker, the epoch that is being read, and the position from which reading began. In
        # the training process, the position after the last batch on which it trained.
        self.position: Position = {"epoch": 0, "dataset": None}
        self.rows: Iterator[object] | None = None  # None in a process that has not read

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
            # An epoch without samples is not a mistake if it was resumed at its end.
            if not count and self.position["dataset"] is None:
                raise UserError(
                    "this process got no sample from an IterableDataset in a whole epoch",
                    advice=(
                        "let its __iter__ return a new iterator each time, and let it yield at "
                        "least one sample for each process"
                    ),
                    every_rank=True,
                )
            self.position = {"epoch": self.position["epoch"] + 1, "dataset": None}

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Read as many samples as there are `indices`, whose values have no meaning here.

        A worker reads ahead of training. So the position after the batch travels with the batch.

        Returns:
            The batch of the collate function as "batch", and the position as "position".
        """
        if self.rows is None:
            self.rows = self.read_rows()
        batch = collated(self.collate, list(islice(self.rows, len(indices))), None)
        position = self.position | {"dataset": self.dataset.state_dict()}
        return {"batch": batch, "position": position}

    def finish(self, batch: Batch, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Note the position after this batch for the next checkpoint, and return the batch itself.

        Args:
            batch: the result of `fetch`.
        """
        self.position = batch["position"]
        return batch["batch"]

    def go_on_after(self, batch: Batch | None) -> None:
        """Have this process go on reading instead of its worker, which was killed.

        The worker is killed if the run is asked to stop while this process waits for a batch.

        This process reads from the end of the last batch that the worker sent, so no sample is
        lost. If the worker sent none, this process reads from the position of training.

        Args:
            batch: the last batch of the worker, as `fetch` returned it; None if it sent none.
        """
        if batch is not None:
            self.position = batch["position"]
        self.rows = None

    def example(self, size: int, length: int) -> Batch:
        """Return the shapes of a batch on the meta device, which holds no values.

        It serves to count the operations of a model. The batch is made of copies of one sample. The
        position of the data set is restored afterwards, so that training misses no sample.

        Args:
            size: samples of the batch.
            length: not used, because the data set determines the length of its samples.
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
        """Refuse a resume with another number of processes.

        If the number of processes has changed, a resume calls this instead of `load_state_dict`.

        Args:
            states: the positions of all ranks of the interrupted run.

        Raises:
            UserError: always, because the positions of these ranks can't be turned into positions
                of another number of ranks.
        """
        processes = counted(len(states), "process", "processes")
        raise UserError(
            f"the run trained with {processes}, and can't be resumed with another number, because "
            "each process saved its own position in an IterableDataset",
            advice=f"resume the run with {processes}",
        )


def own_rows(rows: Iterator[object]) -> Iterator[object]:
    """Yield this rank's share of the samples. Every rank reads them all.

    The last samples are dropped if they are fewer than the ranks, so that all ranks get the same
    number.
    """
    while True:
        group = list(islice(rows, world_size()))
        if len(group) < world_size():
            return
        yield group[rank()]


@dataclass(frozen=True)
class IterableOrder(TrainingOrder):
    """How many batches a run takes from an `IterableDataset`, which chooses the samples itself."""

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor:
        """Return a row for each micro-batch from `first_update` on: int64 [rows, batch_size].

        The values are not sample indices, because the data set chooses its samples itself. Only the
        length of a row and its first value are used. The length says how many samples to read. The
        value seeds the random generators for the batch, so it differs between batches and ranks.
        """
        first = first_update * self.accumulation
        end = self.updates_per_epoch * self.accumulation
        numbers = torch.arange(first, end)[:, None] * self.world_size + self.rank
        return numbers.expand(-1, self.batch_size)
