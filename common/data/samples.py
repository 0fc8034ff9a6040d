"""A data set and its splits, each of which makes batches of its samples.

A recipe passes a `Data` to its run. The splits of a `Data` are `Samples`. If a recipe passes a
map-style data set as a split, `Data` makes `DatasetSamples` of it.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch.utils.data import IterableDataset, default_collate

from common.data.fingerprint import (
    fingerprint_of_arrays,
    fingerprint_of_samples,
    fingerprint_of_splits,
)
from common.data.mistakes import empty_split_error
from common.data.order import Blocks, hash_integers
from common.data.sources import DataSource
from common.errors import UserError
from common.run_directory.records import DataFacts
from common.system.devices import to_device

# A nest of dicts, lists and tuples that holds tensors. The recipe's data set chooses its form, and
# the recipe's model takes it.
Batch = Any
# A function that makes a batch of a list of samples, each as the data set returned it. A recipe's
# own function may state any type of its samples.
Collate = Callable[[list[Any]], Batch]


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose samples are read by index, as those of torch or of Hugging Face."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def lacking_methods(split: object) -> list[str]:
    """Return the methods of a map-style data set that a split lacks."""
    has_length = hasattr(type(split), "__len__")
    # An `IterableDataset` of torch inherits a `__getitem__` that only raises an error.
    has_items = hasattr(type(split), "__getitem__") and not isinstance(split, IterableDataset)
    is_there = {"__len__": has_length, "__getitem__": has_items}
    return [name for name in is_there if not is_there[name]]


class Work(NamedTuple):
    """The size of a micro-batch, from which the speed of training is computed."""

    samples: int
    tokens: int = 0  # without padding
    squared_tokens: int = 0  # sum over samples of the square of their number of tokens


# Batches with their sizes, as `Loader.epoch` yields them.
BatchesWithWork = Iterator[tuple[Batch, Work]]


class Samples:
    """One split of a data set, which makes batches of its samples.

    A subclass must define `__len__` and `fetch`. The other methods have defaults; a subclass
    overrides them to be faster or to say more about its samples. In all methods, `samples` are
    sample indices (int64 [batch], on the host), and `epoch` is the number of the epoch, or None in
    an evaluation.

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
        """Whether samples consist of tokens, so that a model's operations depend on the length."""
        return self.lengths is not None

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch on the host, in a worker or in this process.

        The random generators of the CPU are seeded before the call.
        """
        raise NotImplementedError

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Complete a batch that `fetch` made, after it was copied to the device.

        Work that the device does faster than the host belongs here, such as scaling pixels.
        """
        return batch

    def place(self, device: torch.device) -> None:
        """Copy all samples to `device`; on a CPU, memory-mapped samples stay memory-mapped."""
        raise NotImplementedError

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a finished batch, as `fetch` and then `finish` would, from the placed samples.

        Without `lengths`, the loader may gather several batches at once and split the result. So
        the first dimension of each tensor must be that of the samples.
        """
        raise NotImplementedError

    def work_by_index(self, samples: torch.Tensor) -> Work:
        """Return the size of the batch of `samples`, by their indices alone.

        Samples without `lengths` have no tokens to count.
        """
        if self.lengths is None:
            return Work(len(samples))
        lengths = torch.from_numpy(self.lengths)[samples]
        return Work(len(samples), int(lengths.sum()), int(lengths.square().sum()))

    def work_of(self, batch: Batch, samples: torch.Tensor) -> Work:
        """Return the size of the finished batch of `samples`, from which speed is computed.

        A subclass overrides it if only the batch itself shows its number of tokens.
        """
        return self.work_by_index(samples)

    def example(self, size: int, length: int) -> Batch:
        """Return a batch on the meta device: its tensors have shapes but no values.

        With it, the operations of a model are counted without computing anything. By default, the
        batch has sample 0 `size` times.

        Args:
            size: samples of the batch.
            length: tokens of each sample; only text uses it.
        """
        return self.shapes_of(torch.zeros(size, dtype=torch.long))

    def shapes_of(self, samples: torch.Tensor) -> Batch:
        """Return the batch of `samples` on the meta device, with fp32 instead of fp16 and bf16.

        Its tensors have shapes but no values.
        """
        batch = self.finish(self.read(samples, None), samples, None)
        return convert_to_fp32(send_to_device(batch, "meta"))

    def values_of(self, samples: torch.Tensor, device: torch.device) -> Batch:
        """Return the batch of `samples` on `device`, with fp32 instead of fp16 and bf16.

        It serves to count the operations of models that need values, not shapes alone.
        """
        batch = send_to_device(self.read(samples, None), device)
        return convert_to_fp32(self.finish(batch, samples, None))

    def read(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Call `fetch` with seeded generators, and restore the generators afterwards.

        The first sample of the batch determines the seed, together with the run and the epoch.

        The process that calls this may also train. Its training draws from the same generators,
        and must not depend on which process makes the batches.
        """
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()
        python_state = random.getstate()
        try:
            self.seed_generators(epoch, int(samples[0]))
            return self.fetch(samples, epoch)
        finally:
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)
            random.setstate(python_state)

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
            len(self), lambda number: self.read(torch.tensor([number]), None)
        )

    def seed_generators(self, epoch: int | None, sample: int) -> None:
        """Seed the random generators of the CPU by the run's seed, the epoch and a sample.

        So a transform draws the same numbers for a sample in any process.
        """
        # -1 stands for an evaluation.
        seed = hash_integers(self.seed, -1 if epoch is None else epoch, sample)
        # `torch.manual_seed` would also seed the generators of accelerators, which training uses.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


class DatasetSamples(Samples):
    """A map-style data set of torch or of Hugging Face, read sample by sample.

    Before each sample, the random generators of the CPU are seeded by seed, epoch and sample index.
    So random transforms change with the epoch, but do not depend on workers, ranks or resumes.
    """

    def __init__(self, dataset: MapStyle, collate_fn: Collate = default_collate):
        self.dataset = dataset
        self.collate = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        rows = []
        for sample in samples.tolist():
            self.seed_generators(epoch, sample)
            rows.append(self.dataset[sample])
        return self.collate(rows)

    def fingerprint(self) -> str | None:
        """Return the attribute ``fingerprint`` of the data set if it is a string.

        Otherwise, return a digest of a few samples.
        """
        fingerprint_of_dataset = getattr(self.dataset, "fingerprint", None)
        if isinstance(fingerprint_of_dataset, str):
            return fingerprint_of_dataset
        # The samples are read one by one, and the collate function may not take a single row.
        uncollated = DatasetSamples(self.dataset, collate_fn=lambda rows: rows)
        # The seed is always 0, not that of the run: the digest must be the same for runs with
        # different seeds.
        uncollated.seed = 0
        # Call the method of the base class, because this override would call itself without end.
        return Samples.fingerprint(uncollated)


class StoredSamples(Samples):
    """Samples whose values are all stored in arrays.

    The arrays are placed on the device if they fit, and batches are then made there. A subclass
    must define `__len__` and `take`.
    """

    def __init__(self, **arrays: torch.Tensor | np.ndarray) -> None:
        """Store arrays as tensors, and memory maps as they are.

        A memory map stays one, so that a worker gets its path instead of a copy of its contents.
        """
        self.arrays = {
            name: values if isinstance(values, np.memmap) else as_tensor(values)
            for name, values in arrays.items()
        }
        self.num_bytes = sum(values.nbytes for values in self.arrays.values())
        self.placed: dict[str, torch.Tensor] = {}  # on the device; empty before `place`

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays by name, as tensors on the host, without a copy."""
        return {name: as_tensor(values) for name, values in self.arrays.items()}

    def take(self, tensors: dict[str, torch.Tensor], samples: torch.Tensor) -> Batch:
        """Make a batch of the samples from `tensors`, which must all be on one device.

        Both `fetch` (on the host) and `gather` (on the device) make their batches with it.
        """
        raise NotImplementedError

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        return self.take(self.tensors, samples)

    def place(self, device: torch.device) -> None:
        self.placed = {name: values.to(device) for name, values in self.tensors.items()}

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        return self.finish(self.take(self.placed, samples), samples, epoch)

    def fingerprint(self) -> str | None:
        return fingerprint_of_arrays(self.arrays)


class TensorSamples(StoredSamples):
    """Tensors or arrays by name, each of shape [samples, ...]; a batch has rows of them.

    Raises:
        UserError: the tensors have different numbers of samples.
    """

    def __init__(self, **tensors: torch.Tensor | np.ndarray) -> None:
        sizes = {name: len(values) for name, values in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(
                f"the tensors of one split have different numbers of samples ({sizes})",
                advice="pass tensors with one row per sample, all of the same length",
            )
        super().__init__(**tensors)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, tensors: dict[str, torch.Tensor], samples: torch.Tensor) -> Batch:
        (device,) = {values.device for values in tensors.values()}
        samples = to_device(samples, device)
        return {name: values.index_select(0, samples) for name, values in tensors.items()}


def as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Wrap an array as a tensor without a copy."""
    with warnings.catch_warnings():
        # A memory map may be read-only. That does no harm, because nothing writes to data.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(values)


@dataclass
class Data:
    """A data set, ready to train on. Only its name and its splits are required.

    Raises:
        UserError: a split is missing, empty, or can't be read by index; or its lengths are not one
            number for each sample.
    """

    name: str
    # The splits train, validation and test. They may be given as `MapStyle` data sets, and become
    # `Samples`.
    splits: dict[str, Any]
    _: KW_ONLY
    class_names: list[str] | None = None
    source: DataSource | None = None
    notes: Sequence[str] = ()  # printed for the user
    reason: str = "the recipe's own data"  # why the run uses this data set, printed as well
    reads: frozenset[str] = frozenset()  # the flags of role "data" that have an effect on it
    # A digest that changes with the contents; None: `facts` computes it from the splits.
    fingerprint: str | None = None
    # Whether the run only evaluates. There need not be a training split then: another split takes
    # its place.
    is_evaluated_only: bool = False

    def __post_init__(self) -> None:
        if self.is_evaluated_only and "train" not in self.splits:
            # A run makes a training loader in any case. This split stands in for the missing one,
            # and nothing trains on it.
            self.splits = {"train": next(iter(self.splits.values())), **self.splits}
        if "train" not in self.splits or not {"validation", "test"} & set(self.splits):
            split_names = ", ".join(map(repr, self.splits)) or "(none)"
            raise UserError(
                f"data set {self.name!r} has the splits {split_names}, but a run needs 'train', "
                "and at least one of 'validation' and 'test'",
                advice="pass splits with these names to Data(NAME, splits)",
            )
        self.splits = {name: self.as_samples(name, split) for name, split in self.splits.items()}
        # Splits without a fingerprint; None until `facts` has computed the fingerprints.
        self.unknown_contents: list[str] | None = None
        if self.source is not None:
            self.reason = self.source.reason

    def as_samples(self, name: str, split: object) -> Samples:
        """Check a split, and return it as `Samples`, also if it is a map-style data set.

        Raises:
            UserError: the split is empty, can't be read by index, or has lengths of a wrong shape.
        """
        if not isinstance(split, Samples):
            lacking = lacking_methods(split)
            # The second condition is there for the type checker.
            if lacking or not isinstance(split, MapStyle):
                raise UserError(
                    (
                        f"split {name} of data set {self.name} is of type {type(split).__name__}, "
                        f"which lacks {' and '.join(lacking)}"
                    ),
                    advice=(
                        "pass a map-style Dataset with __len__ and __getitem__, TensorSamples, "
                        "or, for training only, IterableSamples"
                    ),
                )
            split = DatasetSamples(split)
        if split.is_sized and not len(split):
            advice = "add samples to it"
            if name != "train":  # a run needs this one
                advice += ", or remove it from Data(...)"
            raise empty_split_error(self.name, name, advice)
        # The lengths of samples in blocks are known only when a block is read.
        if split.lengths is not None and split.blocks is None:
            self.check_lengths(name, split)
        return split

    def check_lengths(self, name: str, split: Samples) -> None:
        """Make the lengths an array; raise a `UserError` unless each sample has one."""
        if not isinstance(split.lengths, np.ndarray):
            split.lengths = np.asarray(split.lengths, dtype=np.int64)
        if split.lengths.shape != (len(split),):
            raise UserError(
                (
                    f"the split {name!r} of data set {self.name!r} has {len(split)} samples, but "
                    f"lengths of the shape {split.lengths.shape}"
                ),
                advice="pass one length for each sample",
            )

    def facts(self) -> DataFacts:
        """Return the entry of this data set in `config.json`.

        The first call may read some samples to compute the fingerprint. ``unknown_contents`` lists
        the splits without one: a resumed run can't notice that these have changed.
        """
        if self.fingerprint is None and self.unknown_contents is None:
            fingerprints = {name: split.fingerprint() for name, split in self.splits.items()}
            self.fingerprint = fingerprint_of_splits(fingerprints)
            self.unknown_contents = [name for name, value in fingerprints.items() if value is None]
        sizes = {name: len(split) for name, split in self.splits.items() if split.is_sized}
        if self.is_evaluated_only:
            # "train" is only a second name of another split: see `__post_init__`.
            sizes.pop("train", None)
        facts = {
            "name": self.name,
            "reason": self.reason,
            "sizes": sizes,
            "classes": None if self.class_names is None else len(self.class_names),
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
            "unknown_contents": self.unknown_contents or None,
        }
        known_facts = {name: value for name, value in facts.items() if value is not None}
        return DataFacts.model_validate(known_facts)
