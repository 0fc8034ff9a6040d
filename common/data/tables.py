"""Read the tables of a labelled data set: its splits, and the labels' numbers.

`datasets` is imported where something is read: a start on cached data never does.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from common.data.builders import load_splits
from common.data.labels import Labelled, roles_of
from common.data.sources import BUILT_IN, DataSource
from common.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


class Tables(Labelled):
    """Labelled splits of a data set as `datasets.Dataset`s."""

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        """Read all splits; rows without a label, and splits of such, are left out."""
        dataset, notes = load(source)
        self.where = f"data set {source.name}: "
        roles = roles_of(dataset, source)
        self.evaluated = roles[0][1] if source.is_whole else None
        self.first = roles[0][0]  # the role of the split that stands for all
        first_split = dataset[roles[0][1]]
        refuse_unlabelled(first_split, self.where, notes)
        super().__init__(
            source.name, first_split.features, label_column, lambda column: first_split[column][:]
        )
        self.notes += notes
        self.splits: dict[str, Dataset] = {}
        self.labels: dict[str, np.ndarray] = {}  # by split: [rows], values, int64 at last
        for role, name in roles:
            if role not in self.splits and self.label in dataset[name].column_names:
                self.add_split(role, dataset[name])
        self.number_labels()
        if not source.is_whole:
            self.check_train()
            self.make_validation(source)
        self.note_majority()

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def add_split(self, role: str, split: "Dataset") -> None:
        """Take the rows of a split that have a label."""
        values = split[self.label][:]
        self.splits[role] = split
        self.labels[role] = np.array(values, dtype=object)
        rows = [
            row
            for row, value in enumerate(values)
            if value not in self.unlabelled and value == value
        ]
        self.keep(role, rows, "label")

    def number_labels(self) -> None:
        """Find the classes, and replace the labels by their numbers."""
        self.find_classes(chain(*self.labels.values()))
        numbers = {value: number for number, value in enumerate(self.classes)}
        for role, labels in self.labels.items():
            if unknown := {*labels} - numbers.keys():
                odd = f"{self.where}column {self.label} of {role} holds {min(unknown)}"
                raise UserError(f"{odd}, and its classes are numbered from 0 to {len(numbers) - 1}")
            self.labels[role] = np.array([numbers[value] for value in labels])

    def check_train(self) -> None:
        """Note the classes that train lacks; a `UserError` where it has one class alone."""
        present = {*self.labels["train"].tolist()}
        unseen = [name for number, name in enumerate(self.class_names) if number not in present]
        if unseen:
            self.notes.append(f"train has no row of {len(unseen)} classes: {', '.join(unseen):.60}")
        if len(present) < 2:
            raise UserError(
                f"{self.where}all rows of train have one label: classification needs two"
            )

    def note_majority(self) -> None:
        """Note what always guessing the most frequent class would reach: the least to beat."""
        majority = np.bincount(self.labels[self.first]).argmax()
        evaluated = "test" if "test" in self.labels else "validation"
        if evaluated in self.labels:
            reached = f"{(self.labels[evaluated] == majority).mean():.1%} of {evaluated}"
            self.notes.append(f"always guessing {self.class_names[majority]}: {reached}")

    def keep(self, split: str, rows: Sequence[int], what: str) -> None:
        """Leave out all other rows of a split, which have no `what`, or all of it if it may."""
        total = len(self.splits[split])
        if not rows and split == self.first:
            advice = "check the data, or name another column"
            raise UserError(f"data set {self.name}: no row of {split} has a {what}: {advice}")
        if lost := total - len(rows):
            self.notes.append(f"{split}: {lost:,} of {total:,} rows have no {what}")
            self.splits[split] = self.splits[split].select(rows)
            self.labels[split] = self.labels[split][rows]
        if not rows:
            del self.splits[split], self.labels[split]

    def make_validation(self, source: DataSource) -> None:
        """Hold a deterministic share of train out where there is need, of each class."""
        train, labels = self.splits["train"], self.labels["train"]
        order = np.random.default_rng(0).permutation(len(labels))
        # The only row of a class is one to learn from.
        several = order[np.bincount(labels)[labels[order]] > 1]
        by_class = several[labels[several].argsort(kind="stable")] if len(several) else order
        is_held = np.isin(np.arange(len(labels)), self.hold_out(source, len(labels), by_class))
        for split, chosen in (("train", ~is_held), ("validation", is_held)):
            if is_held.any():
                self.splits[split] = train.select(np.flatnonzero(chosen))
                self.labels[split] = labels[chosen]


def load(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Return the splits, and what is to be said of them."""
    if source.location in BUILT_IN:
        from common.data import built_in

        return built_in.LOADERS[source.location](), []
    return load_splits(source)


def refuse_unlabelled(split: "Dataset", where: str, notes: list[str]) -> None:
    """Raise a `UserError` where there are images alone."""
    from datasets import Image

    if {*map(type, split.features.values())} == {Image}:
        advice = "; ".join(["put each class into a folder of its name, side by side", *notes])
        raise UserError(f"{where}its images have no labels: {advice}")
