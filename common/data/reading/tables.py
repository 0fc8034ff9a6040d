"""Labelled data sets that are read as a whole, with the labels as class numbers.

Only the functions that read data import `datasets`. So a run whose prepared data are in the cache
never imports it.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from common.data.labelled_data.labels import LabelledData, is_missing_label
from common.data.labelled_data.split_roles import choose_splits
from common.data.mistakes import CORRECT_LABEL, no_values_error, single_class_error
from common.data.prepared_data.cache import PreparedFacts
from common.data.reading.splits import load_splits
from common.data.sources import BUILT_IN, DataSource
from common.errors import UserError
from common.system.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


class Tables(LabelledData):
    """The labelled splits of a data set, each a `datasets.Dataset`, and their labels.

    `prepare_images` and `prepare_text` fill the cache from them.
    """

    def __init__(self, source: DataSource, label_column: str | None) -> None:
        """Read all chosen splits, and hold out a part of train for validation if that is needed.

        Rows without a label are left out, and so are splits that have no row with a label.

        Args:
            label_column: the value of `--label-column`; None: the column is inferred.

        Raises:
            UserError: the data can't be read, or can't be used for classification.
        """
        dataset, notes = read_splits(source)
        self.where = f"data set {source.name}"
        chosen_splits = choose_splits(dataset, source)
        first_role, first_name = chosen_splits[0]
        if source.is_whole:
            self.evaluated_split = first_name
        self.first_role = first_role  # the split with this role determines columns and image sizes
        first_split = dataset[first_name]
        refuse_unlabelled_images(first_split, self.where, notes)
        super().__init__(
            source.name, first_split.features, label_column, lambda column: first_split[column][:]
        )
        self.notes += notes
        self.splits: dict[str, Dataset] = {}
        # The labels of each split, [rows], by role. They are values of the label column until
        # `number_labels` replaces them by class numbers (int64).
        self.labels: dict[str, np.ndarray] = {}
        for role, name in chosen_splits:
            # Of several splits with the same role, the first one that has labels is read.
            if role not in self.splits and self.label_column in dataset[name].column_names:
                self.add_split(role, dataset[name])
        self.number_labels()
        if not source.is_whole:
            self.refuse_single_class()
            self.note_missing_classes()
            self.note_classes_of_one_row()
            self.make_validation(source)

    def __len__(self) -> int:
        """Return the number of rows in all splits, for a message about the work ahead."""
        return sum(map(len, self.splits.values()))

    def add_split(self, role: str, split: "Dataset") -> None:
        """Add the rows of a split that have a label; add no split if there are none.

        Raises:
            UserError: the first split has no row with a label.
        """
        labels = split[self.label_column][:]
        self.splits[role] = split
        self.labels[role] = np.array(labels, dtype=object)
        labelled_rows = [
            row for row, label in enumerate(labels) if not is_missing_label(label, self.is_typed)
        ]
        self.keep(role, labelled_rows, "label")  # removes the split if no row has a label

    def number_labels(self) -> None:
        """Find the classes, and replace each label by the number of its class.

        Raises:
            UserError: a label is not among the classes that the column's type lists.
        """
        self.find_classes(chain(*self.labels.values()))
        numbers = {label: number for number, label in enumerate(self.classes)}
        for role, labels in self.labels.items():
            unknown_labels = set(labels) - numbers.keys()
            if unknown_labels:
                raise UserError(
                    (
                        f"split {role} of {self.where} has the label {min(unknown_labels)} in "
                        f"column {self.label_column}, but the classes of this column are numbered "
                        f"from 0 to {len(numbers) - 1}"
                    ),
                    advice=CORRECT_LABEL,
                )
            self.labels[role] = np.array([numbers[label] for label in labels])

    def refuse_single_class(self) -> None:
        """Raise a `UserError` if all rows of train have one class, so nothing can be learnt."""
        if len(np.unique(self.labels["train"])) < 2:
            raise single_class_error(self.name, "train")

    def note_missing_classes(self) -> None:
        """Note for the user which classes have no rows in train: the model can't learn them."""
        numbers_in_train = set(self.labels["train"].tolist())
        missing = [
            name for number, name in enumerate(self.class_names) if number not in numbers_in_train
        ]
        if missing:
            classes = counted(len(missing), "class", "classes")
            self.notes.append(f"train has no rows of {classes}: {', '.join(missing):.60}")

    def note_classes_of_one_row(self) -> None:
        """Note for the user if most rows of train have a class of their own.

        The label column may then hold names or numbers of the rows, from which nothing is learned.
        """
        class_sizes = np.bincount(self.labels["train"])
        total = len(self.labels["train"])
        alone = int((class_sizes == 1).sum())
        if 2 * alone > total:
            self.notes.append(
                f"{alone:,} of {total:,} rows of train have a class of their own: check that "
                f"{self.label_column} holds the labels, or pass --label-column"
            )

    def facts(self) -> PreparedFacts:
        """Return the facts that the cache keeps, once all rows that lack something are dropped."""
        facts = super().facts()
        facts["notes"] = [*self.majority_notes(), *facts["notes"]]
        return facts

    def majority_notes(self) -> list[str]:
        """Note the accuracy of always guessing the most frequent class, which a model should beat.

        The class is the most frequent one in the first split. The accuracy is that on the test
        split, or else on the validation split. Without either, there is no note.
        """
        majority = np.bincount(self.labels[self.first_role]).argmax()
        role = "test" if "test" in self.labels else "validation"
        if role not in self.labels:
            return []
        accuracy = (self.labels[role] == majority).mean()
        return [f"always guessing {self.class_names[majority]}: {accuracy:.1%} of {role}"]

    def keep(self, role: str, rows: Sequence[int], lacking: str) -> None:
        """Keep only some rows of a split, and note how many others were dropped.

        If no row is kept, the split is removed. The functions that prepare texts and images call
        this, too: they find out which rows lack a text or an image.

        Args:
            role: the split's role, such as "train".
            rows: indices of the rows to keep.
            lacking: what the other rows lack (label, text or image), for the note.

        Raises:
            UserError: no row of the first split is left. The run can't do without this split.
        """
        total = len(self.splits[role])
        if not rows and role == self.first_role:
            raise no_values_error(self.name, role, lacking)
        dropped = total - len(rows)
        if dropped:
            self.notes.append(f"{role}: {dropped:,} of {total:,} rows have no {lacking}")
            self.splits[role] = self.splits[role].select(rows)
            self.labels[role] = self.labels[role][rows]
        if not rows:
            del self.splits[role]
            del self.labels[role]

    def make_validation(self, source: DataSource) -> None:
        """Move some rows of train to a validation split, if the data set needs one.

        The choice is stratified by class, and always the same for the same labels. So an evaluation
        of a model holds out the same rows as the model's training.

        Raises:
            UserError: nothing could be evaluated, or train has too few rows.
        """
        train = self.splits["train"]
        labels = self.labels["train"]
        shuffled_rows = np.random.default_rng(0).permutation(len(labels))
        # If a class has only one row, this row stays in train: without it, the model could not
        # learn the class.
        class_sizes = np.bincount(labels)
        candidates = shuffled_rows[class_sizes[labels[shuffled_rows]] > 1]
        if len(candidates):
            # Sort the rows by class. `choose_held_out` spreads its choice evenly over this order,
            # so each class gives its share.
            candidates = candidates[labels[candidates].argsort(kind="stable")]
        else:
            # Each class has a single row, so the rows of some classes must be held out.
            candidates = shuffled_rows
        held_out = self.choose_held_out(source, len(labels), candidates)
        if len(held_out) == 0:
            return
        is_held_out = np.isin(np.arange(len(labels)), held_out)
        for role, is_in_split in (("train", ~is_held_out), ("validation", is_held_out)):
            self.splits[role] = train.select(np.flatnonzero(is_in_split))
            self.labels[role] = labels[is_in_split]


def read_splits(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Return all splits of a data set, built in or not, and notes for the user.

    Raises:
        UserError: see `load_splits`.
    """
    if source.location in BUILT_IN:
        from common.data.reading import built_in

        return built_in.LOADERS[source.location](), []
    return load_splits(source)


def refuse_unlabelled_images(split: "Dataset", where: str, notes: list[str]) -> None:
    """Raise a `UserError` if all columns are images, so that no column can be the label.

    Args:
        where: the data set, for the message.
        notes: notes on the files, which the message repeats: they may explain why there are no
            labels.
    """
    from datasets import Image

    column_types = {type(feature) for feature in split.features.values()}
    if column_types == {Image}:
        example = "put the images of each class into a folder named after it, such as cat/1.png"
        raise UserError(
            f"the images of {where} have no labels", advice="; ".join([example, *notes])
        )
