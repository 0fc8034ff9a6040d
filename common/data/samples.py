"""The samples of one split of a data set, which make the batches of this split."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch.utils.data import default_collate

from common.data.mistakes import (
    batch_error,
    different_sizes_error,
    no_value_error,
    type_error_of_sample,
)
from common.data.order import Blocks, hash_integers
from common.data.versions.fingerprint import fingerprint_of_samples

# Tensors in nested dicts, lists or tuples, in whatever form the data set returns and the model
# takes.
Batch = Any
# A function that makes a batch of a list of samples, each as the data set returned it. A recipe's
# own function may state any type of its samples.
Collate = Callable[[list[Any]], Batch]


class Work(NamedTuple):
    """The size of a micro-batch, from which the speed of training is computed."""

    samples: int
    tokens: int = 0  # without padding
    # Sum over samples of the square of their number of tokens. Attention's operations grow with it.
    squared_tokens: int = 0


# Batches with their sizes, as `Loader.epoch` yields them.
BatchesWithWork = Iterator[tuple[Batch, Work]]


class Samples:
    """One split of a data set, which makes batches of its samples.

    There are two ways to make a batch, which give the same values:

    - A worker or this process calls `read` on the host, which seeds the generators and calls
      `fetch`. The batch is copied to the device, and `finish` completes it there.
    - If the samples fit into the device's memory, `place` copies all of them there, once. Then
      `gather` makes each batch on the device.

    A subclass must define `__len__` and `fetch`. The other methods have defaults; a subclass
    overrides them to be faster or to say more about its samples. In all methods, `indices` (int64
    [batch], on the host) says which samples of the split make up the batch, and `epoch` is the
    number of the epoch, or None in an evaluation.

    Each worker has a copy of the split, made before its first batch. It keeps this copy for all
    epochs, so a later change of the split in the training process has no effect on the batches of
    workers.
    """

    seed = 0  # the seed of the run; the loader sets it
    num_bytes: int | None = None  # device memory that `place` takes; None: `place` is not defined
    # int64 [samples], the tokens of each sample. If they are set, a batch has samples of similar
    # length, unless `blocks` is set as well.
    lengths: np.ndarray | None = None
    blocks: Blocks | None = None  # samples that one process should read together, in this order
    is_sized = True  # whether `__len__` is defined

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def has_tokens(self) -> bool:
        """Whether samples consist of tokens, so that a model's operations depend on the length.

        Texts override it, because streamed ones have tokens but no `lengths` that are known.
        """
        return self.lengths is not None

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch on the host, in a worker or in this process.

        The random generators of the CPU are seeded before the call.
        """
        raise NotImplementedError

    def finish(self, batch: Batch, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Complete a batch that `fetch` made, after it was copied to the device.

        Work that the device does faster than the host belongs here, such as scaling pixels.
        """
        return batch

    def place(self, device: torch.device) -> None:
        """Copy all samples to `device`; on a CPU, memory-mapped samples stay memory-mapped."""
        raise NotImplementedError

    def gather(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Make a finished batch, as `fetch` and then `finish` would, from the placed samples.

        Without `lengths`, the loader may gather several batches at once and split the result. So
        the first dimension of each tensor must be that of the samples.
        """
        raise NotImplementedError

    def refuse_changes(self) -> None:
        """Raise a `UserError` if the samples have changed since the first call of this method.

        By default, changes are not noticed.
        """

    def work_by_index(self, indices: torch.Tensor) -> Work:
        """Return the size of the batch of `indices`, by the indices alone.

        Unlike `work_of`, this method needs no finished batch, so `fetch` may call it.

        Samples without `lengths` have no tokens to count.
        """
        if self.lengths is None:
            return Work(len(indices))
        lengths = torch.from_numpy(self.lengths)[indices]
        return Work(len(indices), int(lengths.sum()), int(lengths.square().sum()))

    def work_of(self, batch: Batch, indices: torch.Tensor) -> Work:
        """Return the size of a finished batch, from which speed is computed.

        A subclass overrides it if only the batch itself shows its number of tokens.
        """
        return self.work_by_index(indices)

    def example(self, size: int, length: int) -> Batch:
        """Return a batch on the meta device: its tensors have shapes but no values.

        It serves to count the operations of a model without computing anything. By default, the
        batch has sample 0 `size` times.

        Args:
            size: samples of the batch.
            length: tokens of each sample; only text uses it.
        """
        return self.shapes_of(torch.zeros(size, dtype=torch.long))

    def shapes_of(self, indices: torch.Tensor) -> Batch:
        """Return the batch of `indices` on the meta device, with fp32 instead of fp16 and bf16.

        Its tensors have shapes but no values. It serves to count the operations of a model, whose
        weights are usually in fp32.
        """
        batch = self.finish(self.read(indices, None), indices, None)
        return convert_to_fp32(send_to_device(batch, "meta"))

    def values_of(self, indices: torch.Tensor, device: torch.device) -> Batch:
        """Return the batch of `indices` on `device`, with fp32 instead of fp16 and bf16.

        It serves to count the operations of models that need values, not shapes alone.
        """
        batch = send_to_device(self.read(indices, None), device)
        return convert_to_fp32(self.finish(batch, indices, None))

    def read(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Call `fetch` with seeded generators, and restore the generators afterwards.

        The first index of the batch determines the seed, together with the run and the epoch.

        The process that calls this may also train. Its training draws from the same generators,
        and must not depend on which process makes the batches.
        """
        with preserved_generators():
            seed_for_sample(self.seed, epoch, int(indices[0]))
            return self.fetch(indices, epoch)

    def fingerprint(self) -> str | None:
        """Return a digest that changes with the samples; None if no digest can be made.

        There is none for an `IterableDataset`, or if the samples can't be read or differ between
        two readings.

        A resumed run compares the digest with that of the first start, to notice that its data have
        changed. By default, it is a digest of a few samples, read as in an evaluation. A subclass
        may override it.
        """
        if not self.is_sized:
            return None
        return fingerprint_of_samples(
            len(self), lambda index: self.read(torch.tensor([index]), None)
        )


def collated(collate: Collate, rows: list[Any], indices: Sequence[int] | None) -> Batch:
    """Return the batch that a collate function makes of samples.

    Args:
        indices: the indices of the samples; None if they have none.

    Raises:
        UserError: the collate function is torch's, and the samples have different sizes, or one
            has a value that can't be in a batch. Or it is another one, and returns None, or
            tensors that can't be copied to a device.
    """
    if collate is not default_collate:
        batch = collate(rows)
        error = batch_error(batch)
        if error is not None:
            raise error
        return batch
    try:
        return default_collate(rows)
    except Exception:
        error = (
            different_sizes_error(rows, indices)
            or no_value_error(rows, indices)
            or type_error_of_sample(rows, indices)
        )
        if error is None:
            raise
    raise error


@contextmanager
def preserved_generators() -> Iterator[None]:
    """At the end of the block, restore the random generators of the CPU."""
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_for_sample(run_seed: int, epoch: int | None, index: int) -> None:
    """Seed the random generators of the CPU by the run's seed, the epoch and a sample.

    So a transform draws the same numbers for a sample in any process.

    Args:
        epoch: the number of the epoch; None in an evaluation.
        index: the index of the sample; of the first one, if a batch is made at once.
    """
    seed_cpu_generators(hash_integers(run_seed, -1 if epoch is None else epoch, index))


def seed_cpu_generators(seed: int) -> None:
    """Seed the random generators of the CPU: torch's, NumPy's and Python's."""
    # `torch.manual_seed` would also seed the generators of accelerators, which training uses.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes no larger seed
    random.seed(seed)
