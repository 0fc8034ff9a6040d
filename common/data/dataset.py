"""A data set: its splits, its classes and its facts.

A recipe passes a `Data` to its run. The splits of a `Data` are `Samples`. If a recipe passes a
map-style data set as a split, `Data` makes `DatasetSamples` of it.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from common.data.labelled_data.split_roles import SPLIT_ROLES
from common.data.mistakes import empty_split_error
from common.data.samples import (
    Batch,
    Collate,
    Samples,
    collated,
    preserved_generators,
    seed_for_sample,
)
from common.data.sources import DataSource
from common.data.versions.fingerprint import fingerprint_of_samples, fingerprint_of_splits
from common.errors import UserError
from common.run_directory.records import DataFacts


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


class DatasetSamples(Samples):
    """A map-style data set of torch or of Hugging Face, read sample by sample.

    Before each sample, the random generators of the CPU are seeded by seed, epoch and sample index.
    So random transforms change with the epoch, but do not depend on workers, ranks or resumes. In
    an evaluation, a transform draws the same numbers for a sample each time.

    If the data set has a method `set_epoch`, it is called with the number of the epoch before the
    samples of each batch are read, in the process that reads them; in an evaluation, with 0.
    """

    def __init__(self, dataset: MapStyle, collate_fn: Collate = default_collate):
        self.dataset = dataset
        self.collate = collate_fn

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, unless it belongs to the data set.

        Raises:
            UserError: only the data set has this attribute, so setting it here would have no
                effect.
        """
        dataset = self.__dict__.get("dataset")  # a subclass may set attributes before it is there
        if not hasattr(self, name) and hasattr(dataset, name):
            raise UserError(
                f"{name} is an attribute of {type(dataset).__name__}, and the split is a "
                "DatasetSamples with this data set in it, so setting it on the split has no effect",
                advice=(
                    "for a value that depends on the epoch, give the data set a method "
                    "set_epoch(epoch), which is called before its samples are read"
                ),
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch or 0)
        rows = []
        numbers = indices.tolist()
        for index in numbers:
            seed_for_sample(self.seed, epoch, index)
            rows.append(self.dataset[index])
        return collated(self.collate, rows, numbers)

    def fingerprint(self) -> str | None:
        """Return the attribute ``fingerprint`` of the data set if it is a string.

        A recipe can set this attribute if a digest of samples is not possible, for example because
        they are random. Without the attribute, return a digest of a few samples, or None if there
        can be none.
        """
        fingerprint_of_dataset = getattr(self.dataset, "fingerprint", None)
        if isinstance(fingerprint_of_dataset, str):
            return fingerprint_of_dataset
        return fingerprint_of_samples(len(self), self.read_for_fingerprint)

    def read_for_fingerprint(self, index: int) -> list[object]:
        """Return a list with the sample at an index, without the collate function.

        The collate function may fail on a single sample. The seed is always 0, not that of the
        run, because the digest must be the same for runs with different seeds.
        """
        with preserved_generators():
            seed_for_sample(0, None, index)
            return [self.dataset[index]]


@dataclass
class Data:
    """A data set, ready to train on. Only its name and its splits are required.

    Raises:
        UserError: a split is missing, misnamed, empty, or can't be read by index; or its lengths
            are not one number for each sample.
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
        self.refuse_other_names()
        self.splits = {name: self.as_samples(name, split) for name, split in self.splits.items()}
        # Splits without a fingerprint; None until `facts` has computed the fingerprints.
        self.unknown_contents: list[str] | None = None
        if self.source is not None:
            self.reason = self.source.reason

    def refuse_other_names(self) -> None:
        """Raise a `UserError` if validation data are called val, valid or dev.

        A run would take them for a split that only the recipe reads, and would neither choose the
        best model by them nor stop early.
        """
        for name in self.splits:
            role = SPLIT_ROLES.get(name, name)
            if role not in self.splits:
                raise UserError(
                    f"data set {self.name!r} has a split {name!r}, but no split {role!r}",
                    advice=f"rename the split to {role!r}, or give it a name of your own",
                )

    def as_samples(self, name: str, split: object) -> Samples:
        """Check a split, and return it; a map-style data set is wrapped in `DatasetSamples`.

        Raises:
            UserError: the split is empty or can't be read by index, or its ``lengths``, the tokens
                of each sample, have a wrong shape.
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
        if split.is_sized and not self.length_of(name, split):
            advice = "add samples to it"
            if name != "train":  # a run needs this one
                advice += ", or remove it from Data(...)"
            raise empty_split_error(self.name, name, advice)
        # The lengths of samples in blocks, such as row groups of parquet files, are known only when
        # a block is read.
        if split.lengths is not None and split.blocks is None:
            self.check_lengths(name, split)
        return split

    def length_of(self, name: str, split: Samples) -> int:
        """Return the number of samples of a split.

        Raises:
            UserError: ``__len__`` returns a negative number, or no whole one.
        """
        try:
            return len(split)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"__len__ of split {name} of data set {self.name} returns no number of samples "
                f"({error})",
                advice=(
                    "return a whole number from 0; it is negative, for example, if a series is "
                    "shorter than a window of it"
                ),
            ) from error

    def check_lengths(self, name: str, split: Samples) -> None:
        """Make the lengths an array; raise a `UserError` unless each sample has one.

        The order of samples reads this array, to give a batch samples of similar length.
        """
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
