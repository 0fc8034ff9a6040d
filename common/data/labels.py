"""What makes a data set one for classification: its splits, its column of labels, its classes."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from common.data.guess import ValuesOf, guess_label, guess_texts
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
    evaluated: str | None = None  # the one split that is read, where no run trained on the data

    def __init__(
        self,
        name: str,
        features: dict[str, Any],
        label_column: str | None,
        values_of: ValuesOf | None = None,
    ) -> None:
        """Find the column of the labels: named, of type ClassLabel, called as one, or guessed.

        Args:
            features: of `datasets`, by column.
            values_of: gives a column's values where they may be looked at to guess.
        """
        from datasets import ClassLabel, Value

        self.name, self.features, self.notes = name, features, list[str]()
        self.values_of = values_of
        typed = self.columns_of(ClassLabel)
        called = [column for column in features if column.lower() in LABEL_NAMES]
        candidates = typed if len(typed) == 1 or len(called) != 1 else called
        if values_of is not None and label_column is None and not candidates:
            candidates = guess_label(features, values_of)
            if len(candidates) == 1:
                self.notes.append(f"labels from {candidates[0]}, as it alone has few values")
        fits = self.columns_of(ClassLabel, Value)
        (self.label,) = self.find("--label-column", label_column, candidates, fits)
        self.is_typed = isinstance(features[self.label], ClassLabel)
        # As GLUE marks rows without one; where labels are mere numbers, -1 is one of them.
        self.unlabelled = {None, "", -1} if self.is_typed else {None, ""}

    def columns_of(self, *kinds: type) -> list[str]:
        return [column for column, kind in self.features.items() if isinstance(kind, kinds)]

    def find_texts(self, flag: str, named: tuple[str, ...]) -> list[str]:
        """Return the one or two columns of text: named, or all, or of several the free text."""
        from datasets import Value

        strings = [*map(Value, ("string", "large_string", "string_view"))]
        fits = [column for column, feature in self.features.items() if feature in strings]
        candidates = [column for column in fits if column not in (self.label, "id", "idx")]
        if self.values_of is not None and not named and len(candidates) > 2:
            guessed = guess_texts(candidates, self.values_of)
            if 1 <= len(guessed) <= 2:
                candidates = guessed
        return self.find(flag, named, candidates, fits, most=2)

    def find(
        self,
        flag: str,
        named: str | tuple[str, ...] | None,
        candidates: list[str],
        fits: list[str],
        most: int = 1,
    ) -> list[str]:
        """Return the columns that a flag names, one or several, or else the candidates.

        A `UserError`: there is none, they are too many, or one is not of those that fit by type.
        """
        types = {column: type(feature).__name__ for column, feature in self.features.items()}
        for column, type_name in types.items():
            if type_name == "Value":
                types[column] = self.features[column].dtype
        shown = ", ".join(f"{column} ({type_name})" for column, type_name in types.items())
        columns = [named] if isinstance(named, str) else [*(named or candidates)]
        for column in columns:
            if column not in fits:
                problem = "another type there" if column in self.features else "no such column"
                raise UserError(f"{flag} {column}: data set {self.name} has {problem}: {shown}")
        if not 1 <= len(columns) <= most:
            number = "one" if most == 1 else f"one to {most}"
            meant = f" ({', '.join(columns)})" if columns else ""
            count = f"{len(columns) or 'no'} columns for {flag}{meant}"
            raise UserError(f"data set {self.name} has {count}, name {number}: {shown}")
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
        share = source.validation_share
        is_only_split = len(self.splits) == 1
        if share is None:
            share = SHARE_HELD_OUT if is_only_split else 0
        elif share == 0 and is_only_split:
            raise UserError(
                f"--validation-share 0 holds nothing out of train, and data set {self.name} has "
                "no other split to evaluate on: leave the flag out, or add a test split"
            )
        if not share or "validation" in self.splits:
            return rows[:0]
        count = max(1, round(share * total))
        if count >= len(rows):
            few = f"data set {self.name} has {len(rows)} {what}, too few to hold some out"
            raise UserError(f"{few}: add a validation split")
        self.notes.append(f"held out {count:,} of {total:,} {what} of train for validation")
        return rows[((np.arange(count) + 0.5) * len(rows) / count).astype(int)]

    def facts(self) -> dict[str, Any]:
        facts = {"splits": [*self.splits], "class_names": self.class_names, "notes": self.notes}
        return facts if self.evaluated is None else facts | {"evaluated": self.evaluated}


def roles_of(names: Iterable[str], source: DataSource) -> list[tuple[str, str]]:
    """Return role and name of the splits that are read, train first.

    Where the data are evaluated whole, it is one alone: for the test, else for validation, else all
    that there is. A `UserError`: there is nothing to train on.
    """
    splits = [*map(str, names)]
    by_role = {ROLES[name]: name for name in reversed(splits) if name in ROLES}
    others = [name for name in splits if name not in ROLES]
    train = "train" if "train" in splits else next(iter(others), None)
    if source.is_whole:
        for role in ("test", "validation"):
            if role in by_role:
                return [(role, by_role[role])]
        assert train is not None
        return [("test", train)]
    if train is None:
        raise UserError(
            f"data set {source.name} has the split {' and '.join(splits)} alone: training needs "
            "train; --evaluate-only evaluates it"
        )
    return [("train", train), *((ROLES[name], name) for name in splits if name in ROLES)]
