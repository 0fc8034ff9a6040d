"""What a run is given to learn from: samples that make batches, and the data set they are of."""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch.utils.data import IterableDataset, default_collate

from common.data.fingerprint import (
    fingerprint_of_arrays,
    fingerprint_of_samples,
    fingerprint_of_splits,
)
from common.data.order import Blocks, hash_integers
from common.data.sources import DataSource
from common.errors import UserError
from common.flags import spelled, stated

Batch = Any  # a nest of dicts, lists and tuples of tensors


class Work(NamedTuple):
    """What a micro-batch holds."""

    samples: int
    tokens: int = 0  # real ones, without padding
    squared_tokens: int = 0  # sum over samples of the square of their tokens


class Samples:
    """One split. One's own needs `__len__` and `fetch`; the rest is for speed.

    Workers have a copy, as it was when they made their first batch, in all epochs.

    `samples` are int64 [batch], on the host; `epoch` is None in an evaluation.
    """

    seed = 0  # of the run; set by the loader
    num_bytes: int | None = None  # that `place` takes of a device; None: there is no `place`
    lengths: np.ndarray | None = None  # int64 [samples]; batches are of like lengths then
    blocks: Blocks | None = None  # samples that one process should read together, in their order
    is_sized = True  # whether it has `__len__`

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch on the host, in a worker or here; the CPU's generators are seeded for it."""
        raise NotImplementedError

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Do the rest of `fetch` on the device, where `batch` now is."""
        return batch

    def place(self, device: torch.device) -> None:
        """Copy all samples to `device`; on a CPU memory-mapped ones stay so."""
        raise NotImplementedError

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a batch of what was placed, to be cut into smaller ones where no `lengths` are."""
        raise NotImplementedError

    def count(self, samples: torch.Tensor) -> Work:
        if self.lengths is None:
            return Work(len(samples))
        lengths = torch.from_numpy(self.lengths)[samples]
        return Work(len(samples), int(lengths.sum()), int(lengths.square().sum()))

    def example(self, size: int, length: int) -> Batch:
        """Return a batch of shapes alone, on the meta device, in fp32; `length` is that of text."""
        return self.shapes_of(torch.zeros(size, dtype=torch.long))

    def shapes_of(self, samples: torch.Tensor) -> Batch:
        """Return the batch of `samples` as shapes alone, on the meta device, in fp32."""
        batch = self.finish(self.read(samples, None), samples, None)
        return convert_to_fp32(send_to_device(batch, "meta"))

    def values_of(self, samples: torch.Tensor, device: torch.device) -> Batch:
        """Return the batch of `samples` on `device`, in fp32."""
        batch = send_to_device(self.read(samples, None), device)
        return convert_to_fp32(self.finish(batch, samples, None))

    def read(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """`fetch`, and leave the generators of this process, which may train, as they were."""
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            self.seed_generators(epoch, int(samples[0]))
            return self.fetch(samples, epoch)
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

    def fingerprint(self) -> str | None:
        """Return what changes with the samples; None where that can't be known.

        One's own may override it. Some samples are read here, without augmentation.
        """
        if not self.is_sized:
            return None
        return fingerprint_of_samples(
            len(self), lambda number: self.read(torch.tensor([number]), None)
        )

    def seed_generators(self, epoch: int | None, sample: int) -> None:
        seed = hash_integers(self.seed, -1 if epoch is None else epoch, sample)
        torch.default_generator.manual_seed(seed)  # of the CPU alone: `torch.manual_seed` is of all
        np.random.seed(seed % 2**32)
        random.seed(seed)


class DatasetSamples(Samples):
    """A map-style data set of torch or of Hugging Face, read sample by sample.

    Before each the CPU's generators are seeded by seed, epoch and sample: random transforms change
    with the epoch, and not with workers, ranks or resumptions.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Batch] = default_collate):
        self.dataset, self.collate = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        rows = []
        for sample in samples.tolist():
            self.seed_generators(epoch, sample)
            rows.append(self.dataset[sample])
        return self.collate(rows)

    def fingerprint(self) -> str | None:
        """Return the ``fingerprint`` that the data set's author gave it, or that of some rows."""
        stated = getattr(self.dataset, "fingerprint", None)
        if isinstance(stated, str):
            return stated
        rows = DatasetSamples(self.dataset, collate_fn=lambda rows: rows)
        rows.seed = 0  # whatever the run's seed is
        return Samples.fingerprint(rows)


class TensorSamples(Samples):
    """Tensors or arrays by name, [samples, ...]: on the device if they fit; a batch is a gather."""

    def __init__(self, **tensors: torch.Tensor | np.ndarray) -> None:
        sizes = {name: len(values) for name, values in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"tensors of one split need one number of samples each, not {sizes}")
        self.keep(**tensors)

    def keep(self, **arrays: torch.Tensor | np.ndarray) -> None:
        """Take arrays as they are where they lie in a file, so that a worker can open it too."""
        in_file = {name: values for name, values in arrays.items() if isinstance(values, np.memmap)}
        self.arrays = {name: as_tensor(values) for name, values in arrays.items()} | in_file
        self.num_bytes = sum(values.nbytes for values in self.arrays.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: as_tensor(values) for name, values in self.arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        return self.take(self.tensors, samples)

    def place(self, device: torch.device) -> None:
        self.placed = {name: values.to(device) for name, values in self.tensors.items()}

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        return self.finish(self.take(self.placed, samples), samples, epoch)

    def fingerprint(self) -> str | None:
        arrays = getattr(self, "arrays", None)  # what is streamed keeps none
        return None if arrays is None else fingerprint_of_arrays(arrays)

    def take(self, tensors: dict[str, torch.Tensor], samples: torch.Tensor) -> Batch:
        """Make a batch of `tensors`, all on one device."""
        (device,) = {values.device for values in tensors.values()}
        samples = without_waiting(samples, device)
        return {name: values.index_select(0, samples) for name, values in tensors.items()}


def without_waiting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to `device`; on CUDA from pinned memory, as from any other the host would wait."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Wrap an array, perhaps a read-only one, without a copy: nothing writes to data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(values)


@dataclass
class Data:
    """A data set, ready to train on; what describes it is optional."""

    name: str
    splits: dict[str, Any]  # train, validation, test: `Samples` or map-style data sets
    _: KW_ONLY
    class_names: list[str] | None = None
    source: DataSource | None = None
    notes: Sequence[str] = ()  # for the person at the terminal
    reason: str = "the recipe's own data"  # why this one, for the same person
    reads: frozenset[str] = frozenset()  # the flags of role "data" that it was read by
    # Changes when what the splits hold does; where it is not given, the splits are asked.
    fingerprint: str | None = None
    is_evaluated_only: bool = False  # without train, for which the split to evaluate stands

    def __post_init__(self) -> None:
        if self.is_evaluated_only and "train" not in self.splits:
            self.splits = {"train": next(iter(self.splits.values())), **self.splits}
        if "train" not in self.splits or not {"validation", "test"} & set(self.splits):
            found, needs = ", ".join(self.splits) or "(none)", "train, and validation or test"
            raise UserError(f"data set {self.name} has the splits {found}: it needs {needs}")
        self.splits = {name: self.as_samples(name, split) for name, split in self.splits.items()}
        self.unknown_contents: list[str] | None = None  # splits without a fingerprint, once asked
        if self.source is not None:
            self.reason = self.source.reason

    def as_samples(self, name: str, split: Any) -> Samples:
        what = f"data set {self.name}: split {name} is"
        if not isinstance(split, Samples):
            is_mapped = hasattr(split, "__len__") and hasattr(split, "__getitem__")
            if isinstance(split, IterableDataset) or not is_mapped:
                found = f"a {type(split).__name__}, whose samples can't be read by number"
                advice = "give a map-style Dataset, with __len__ and __getitem__, TensorSamples, or"
                raise UserError(f"{what} {found}: {advice} to train on IterableSamples")
            split = DatasetSamples(split)
        if split.is_sized and not len(split):
            raise UserError(f"{what} empty: remove or fill it")
        # Samples that are read in blocks have lengths that nobody knows before.
        if split.lengths is not None and split.blocks is None:
            if not isinstance(split.lengths, np.ndarray):
                split.lengths = np.asarray(split.lengths, dtype=np.int64)
            if split.lengths.shape != (len(split),):
                shape = f"lengths of shape {split.lengths.shape}, and {len(split):,} samples"
                raise UserError(f"data set {self.name}: split {name} has {shape}: give one each")
        return split

    def facts(self) -> dict[str, Any]:
        """Return what `config.json` says of it; the first time, a fingerprint may have to be found.

        ``unknown_contents`` are the splits whose change would go unnoticed.
        """
        if self.fingerprint is None and self.unknown_contents is None:
            found = {name: split.fingerprint() for name, split in self.splits.items()}
            self.fingerprint = fingerprint_of_splits(found)
            self.unknown_contents = [name for name, value in found.items() if value is None]
        sizes = {name: len(split) for name, split in self.splits.items() if split.is_sized}
        if self.is_evaluated_only:
            sizes.pop("train", None)
        facts: dict[str, Any] = {"name": self.name, "reason": self.reason, "sizes": sizes}
        facts["classes"] = None if self.class_names is None else len(self.class_names)
        facts |= {"fingerprint": self.fingerprint, "notes": [*self.notes]}
        facts["unknown_contents"] = self.unknown_contents or None
        return {name: value for name, value in facts.items() if value is not None}


def refuse_unread(config: Any, data: Data) -> None:
    """Raise a `UserError` for a flag that names data, was given, and was not heeded."""
    heeded = {"init_from", *data.reads}
    if "validation" in data.splits:
        heeded.add("validation_share")
    for field in fields(config):
        # Only flags that name data are looked at: a look at any other would count as its use.
        if stated(type(config), field.name)["role"] != "data" or field.name in heeded:
            continue
        value = getattr(config, field.name)
        if value != field.default:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise UserError(
                f"{spelled(field.name)} {shown} changes nothing: data set {data.name} of this "
                "recipe does not read it: leave it out"
            )
