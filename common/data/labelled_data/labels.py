"""The splits, the column of labels and the classes of a data set for classification.

`Tables` (data sets read as a whole) and `ParquetTables` (streamed ones) share `LabelledData`.
"""

from collections.abc import Iterable, Mapping, Sized

import numpy as np

from common.data.labelled_data.columns import Columns
from common.data.labelled_data.guess import Feature, ValuesOf, is_missing
from common.data.prepared_data.cache import PreparedFacts
from common.data.sources import DataSource
from common.errors import UserError

# Flags of role "data" that have an effect on every labelled data set.
LABELLED_DATA_FLAGS = frozenset(
    {"dataset", "dataset_config", "label_column", "validation_share", "streaming"}
)
# What to do if a column holds no classes. It may be the only column that could be the label.
CLASSES_ADVICE = "name a column of classes with --label-column, or pass other data with --dataset"
DEFAULT_VALIDATION_SHARE = 0.1  # the share of train, if train is the only split

LabelValue = str | int | float | None  # a value in the label column; None if it is missing


class LabelledData:
    """The label column and the classes of a data set, which are the same in all splits.

    The columns of the first split (train, if the run trains) determine the label column. The
    classes follow from the column's type, or else from the labels of all splits. A subclass reads
    the splits.
    """

    name: str  # the data set's name, for messages
    # The splits by role (train, validation, test), train first. A subclass puts its objects here.
    # It need not have train if a split is evaluated as a whole.
    splits: Mapping[str, Sized]
    notes: list[str]  # printed for the user
    label_column: str
    is_typed: bool  # whether the label column has the type ClassLabel, which lists the classes
    class_names: list[str]
    classes: list[LabelValue]  # the value of each class in the label column
    # The split that is evaluated as a whole, because the model was not trained on the data.
    evaluated_split: str | None = None
    held_out_count = 0  # rows or row groups of train that became the validation split

    def __init__(
        self,
        name: str,
        features: Mapping[str, Feature],
        label_column: str | None,
        values_of: ValuesOf | None = None,
    ) -> None:
        """Find the label column.

        It is the column that `--label-column` names. Without the flag, it is the only column of
        type ClassLabel, or else the only column with a usual name, or else a guess by the values.

        Args:
            name: the data set's name, for messages.
            features: the type of each column.
            label_column: the value of `--label-column`; None: the column is inferred.
            values_of: reads a column, for a guess by its values; None: nothing is guessed by
                values, as for streamed data.

        Raises:
            UserError: no column or several columns may hold the labels, or the named column does
                not exist or holds neither text nor numbers.
        """
        from datasets import ClassLabel

        self.name = name
        self.notes = []
        self.classes = []
        self.class_names = []
        self.columns = Columns(name, features, values_of)
        self.label_column, is_guessed = self.columns.find_label(label_column)
        if is_guessed:
            self.notes.append(f"labels from {self.label_column}, the only column with few values")
        self.is_typed = isinstance(features[self.label_column], ClassLabel)

    def find_classes(self, labels: Iterable[LabelValue]) -> None:
        """Set `classes` and `class_names`.

        The index of a class in these lists is its number, which the samples have as their label.

        The column's type may list the classes. Otherwise they are the distinct labels in sorted
        order, numbers before text. Missing labels do not count.

        Args:
            labels: the label column of all splits; not read if the column's type lists the classes.

        Raises:
            UserError: the column holds numbers that are not whole, or neither text nor numbers.
        """
        from datasets import ClassLabel

        label_type = self.columns.features[self.label_column]
        if isinstance(label_type, ClassLabel):
            self.class_names = list(label_type.names)
            self.classes = self.values_of_classes()
            return
        where = f"column {self.label_column} of data set {self.name}"
        distinct = {label for label in labels if not is_missing_label(label, self.is_typed)}
        fractions = [
            label for label in distinct if isinstance(label, float) and not label.is_integer()
        ]
        if fractions:
            raise UserError(
                f"{where} contains numbers that are not whole, such as {min(fractions):g}, which "
                "can't be classes",
                advice=CLASSES_ADVICE,
            )
        if not all(isinstance(label, (str, int, float)) for label in distinct):
            raise UserError(
                f"{where} contains values such as lists or bytes, which can't be classes",
                advice=CLASSES_ADVICE,
            )
        self.classes = sorted(distinct, key=lambda label: (isinstance(label, str), label))
        self.class_names = [
            str(int(label) if isinstance(label, float) else label) for label in self.classes
        ]

    def values_of_classes(self) -> list[LabelValue]:
        """Return the value of each class in a column of type ClassLabel: the class's number.

        A subclass overrides this, because its files may have the names of the classes instead.
        """
        return list(range(len(self.class_names)))

    def share_to_hold_out(self, source: DataSource) -> float:
        """Return the share of train that becomes the validation split, from 0 to 1.

        The share is 0 if the data set has a validation split already; a note then says that
        `--validation-share` has no effect. Otherwise it is the value of that flag. Without the
        flag, it is `DEFAULT_VALIDATION_SHARE` if train is the only split, and 0 if there is a test
        split.

        Raises:
            UserError: the flag is 0 and train is the only split, so nothing could be evaluated.
        """
        share = source.validation_share
        is_only_split = len(self.splits) == 1
        if share == 0 and is_only_split:
            raise UserError(
                (
                    f"--validation-share 0 leaves nothing to evaluate on, because data set "
                    f"{self.name} has no validation or test split with labels"
                ),
                advice=(
                    "leave --validation-share out, so that a part of the train split is held out, "
                    "or add a validation or test split that has labels"
                ),
            )
        if "validation" in self.splits:
            if share:
                self.notes.append(
                    "nothing is held out by --validation-share: there is a validation split"
                )
            return 0
        if share is None:
            return DEFAULT_VALIDATION_SHARE if is_only_split else 0
        return share

    def choose_held_out(
        self, source: DataSource, total: int, candidates: np.ndarray, unit: str = "rows"
    ) -> np.ndarray:
        """Choose the rows of train that become the validation split, and note how many.

        The choice follows from the arguments alone. So an evaluation of the model on the same data
        holds out the same rows as its training.

        Args:
            total: the number of rows in train; `share_to_hold_out` gives the share of them.
            candidates: int64, the indices of rows that may be held out; the choice is spread evenly
                over them, in this order. If they are sorted by class, each class gives its share.
            unit: what an index stands for, for messages.

        Returns:
            int64, the chosen indices; empty if none are held out.

        Raises:
            UserError: nothing could be evaluated, or no candidate would stay in train.
        """
        share = self.share_to_hold_out(source)
        if not share:
            return candidates[:0]
        count = max(1, round(share * total))
        if count >= len(candidates):
            raise self.holdout_error(count, total, len(candidates), unit)
        self.held_out_count = count
        self.notes.append(f"held out {count:,} of {total:,} {unit} of train for validation")
        # The candidates are cut into `count` equal parts, and the middle of each part is chosen.
        positions = (np.arange(count) + 0.5) * len(candidates) / count
        return candidates[positions.astype(int)]

    def holdout_error(self, count: int, total: int, candidates: int, unit: str) -> UserError:
        """Return the error for a train split from which `count` rows or row groups can't be taken.

        Args:
            total: how many rows or row groups train has.
            candidates: how many of them may be held out.
            unit: what is counted: rows or row groups.
        """
        reason = f"at least one of these {unit} must stay in train"
        remedies = []
        if unit != "rows":
            remedies.append("write the parquet files with more row groups, or pass --no-streaming")
        elif candidates < total:
            reason = (
                f"only {candidates:,} rows belong to a class with more than one row, and some of "
                "them must stay in train"
            )
            remedies.append(f"check --label-column (it is {self.label_column})")
        else:
            remedies.append("add rows")
        if count > 1:
            remedies.append("pass a smaller --validation-share")
        remedies.append("add a split named validation")
        return UserError(
            f"{count:,} of the {total:,} {unit} of train in data set {self.name} can't be held out "
            f"for validation, because {reason}",
            advice=", or ".join(remedies),
        )

    def facts(self) -> PreparedFacts:
        """Return the facts that the cache keeps about the data set."""
        facts: PreparedFacts = {
            "splits": list(self.splits),
            "class_names": self.class_names,
            "notes": self.notes,
            "held_out": self.held_out_count,
        }
        if self.evaluated_split is not None:
            facts["evaluated"] = self.evaluated_split
        return facts


def is_missing_label(label: LabelValue, is_typed: bool) -> bool:
    """Whether a value in the label column means that its row has no label.

    Args:
        is_typed: whether the column has the type ClassLabel. In such a column, -1 means that there
            is no label, as in GLUE. In a column of plain numbers, -1 may be a class.
    """
    return is_missing(label) or label == "" or (is_typed and label == -1)
