"""What makes a data set one for classification: its splits, its column of labels, its classes."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from common.data.sources import DataSource
from common.errors import UserError

# How data sets call the splits that are read besides train, and columns of labels.
ROLES = dict.fromkeys(("validation", "valid", "val", "dev", "validation_matched"), "validation")
ROLES["test"] = "test"
LABEL_NAMES = ("label", "labels", "class", "target", "category")
# The flags of role "data" that are heeded between here and `choose_source`.
READS = frozenset({"dataset", "dataset_config", "label_column", "validation_share", "streaming"})
SHARE_HELD_OUT = 0.1  # of train, where there is nothing else to evaluate on


class Labelled:
    """A labelled data set: what its train split says of all, and what is to be said of it."""

    splits: dict[str, Any]  # its rows by role, train first

    def __init__(self, name: str, features: dict[str, Any], label_column: str | None) -> None:
        """Find the column of the labels: named, of type ClassLabel, or called as one."""
        from datasets import ClassLabel, Value

        self.name, self.features, self.notes = name, features, list[str]()
        typed = self.columns_of(ClassLabel)
        called = [column for column in features if column.lower() in LABEL_NAMES]
        found = typed if len(typed) == 1 or len(called) != 1 else called
        fits = self.columns_of(ClassLabel, Value)
        (self.label,) = self.find("--label-column", label_column, found, fits)
        self.is_typed = isinstance(features[self.label], ClassLabel)
        # As GLUE marks rows without one; where labels are mere numbers, -1 is one of them.
        self.unlabelled = {None, "", -1} if self.is_typed else {None, ""}

    def columns_of(self, *kinds: type) -> list[str]:
        return [column for column, kind in self.features.items() if isinstance(kind, kinds)]

    def find(
        self, flag: str, asked: Any, found: list[str], fits: list[str], most: int = 1
    ) -> list[str]:
        """Return the columns that a flag names, one or several, or else those found.

        A `UserError`: there is none, they are too many, or one is not of those that fit by type.
        """
        kinds = {name: type(kind).__name__ for name, kind in self.features.items()}
        kinds |= {n: self.features[n].dtype for n, kind in kinds.items() if kind == "Value"}
        there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        columns = [asked] if isinstance(asked, str) else [*(asked or found)]
        for column in columns:
            if column not in fits:
                held = "another type there" if column in self.features else "no such column"
                raise UserError(f"{flag} {column}: data set {self.name} has {held}: {there}")
        if not 1 <= len(columns) <= most:
            count, few = len(columns) or "no", "one" if most == 1 else f"one to {most}"
            what = f"data set {self.name} has {count} columns for {flag}"
            raise UserError(f"{what}, name {few}: {there}")
        return columns

    def find_classes(self, values: Iterable[Any]) -> None:
        """Take the classes of their type, or else the labels' values, numbers before text."""
        if self.is_typed:
            self.class_names = [*self.features[self.label].names]
            self.classes = [*range(len(self.class_names))]
            return
        where = f"data set {self.name}: column {self.label}"
        found = {value for value in values if value == value} - self.unlabelled  # without NaN
        if any(isinstance(value, float) and not value.is_integer() for value in found):
            raise UserError(f"{where} holds real numbers, no classes: name another: --label-column")
        if not all(isinstance(value, (str, int, float)) for value in found):
            raise UserError(f"{where} holds neither text nor whole numbers")
        self.classes = sorted(found, key=lambda value: (isinstance(value, str), value))
        self.class_names = [str(int(v) if isinstance(v, float) else v) for v in self.classes]

    def hold_out(
        self, source: DataSource, total: int, rows: np.ndarray, what: str = "rows"
    ) -> np.ndarray:
        """Return which of train's rows are to be validation: a share, at even distances.

        It is what the source asks for, or else 10 % if train is the only split; and none where
        there is a split for validation. `rows` may be less than all, the `total`.
        """
        share = source.validation_share or (SHARE_HELD_OUT if len(self.splits) == 1 else 0)
        if not share or "validation" in self.splits:
            return rows[:0]
        count = max(1, round(share * total))
        if count >= len(rows):
            few = f"data set {self.name} has {len(rows)} {what}, too few to hold some out"
            raise UserError(f"{few}: add a validation split")
        self.notes.append(f"held out {count:,} of {total:,} {what} of train for validation")
        return rows[((np.arange(count) + 0.5) * len(rows) / count).astype(int)]

    def facts(self) -> dict[str, Any]:
        return {"splits": [*self.splits], "class_names": self.class_names, "notes": self.notes}


def roles_of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield role and name of the splits that are read; train, or else the first one, first."""
    splits = [*map(str, names)]
    train = "train" if "train" in splits else splits[0]
    yield "train", train
    yield from ((ROLES[name], name) for name in splits if name in ROLES and name != train)
