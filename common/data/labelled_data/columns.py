"""The columns of a table: which hold the labels or the texts, and the error if that is unclear."""

from collections.abc import Mapping

from common.data.labelled_data.guess import (
    NUMBERING_NAMES,
    Feature,
    ValuesOf,
    guess_label,
    guess_texts,
)
from common.errors import UserError

LABEL_NAMES = ("label", "labels", "class", "target", "category")  # usual names of the label column
# For messages: what a column must hold so that a flag may name it, and data with such columns.
CONTENT_OF_COLUMNS = {
    "--label-column": "text or numbers",
    "--text-columns": "strings",
    "--image-column": "images",
}
DATA_WITH_COLUMNS = {
    "--label-column": "data with a column of labels",
    "--text-columns": "a table with a column of text",
    "--image-column": (
        "a folder of images (with a folder for each class, or with a metadata.csv that has the "
        "columns file_name and label) or parquet files with images"
    ),
}
NUMBERS_ADVICE = "to train on columns of numbers, copy examples/regression.py"


class Columns:
    """The columns of a data set, to find those of the labels, the texts and the images.

    All splits have the same columns.
    """

    def __init__(
        self, name: str, features: Mapping[str, Feature], values_of: ValuesOf | None
    ) -> None:
        """Note the columns.

        Args:
            name: the data set's name, for messages.
            features: the type of each column.
            values_of: reads a column, for a guess by its values; None: nothing is guessed by
                values, as for streamed data.
        """
        self.name = name
        self.features = features
        self.values_of = values_of

    def find_label(self, label_column: str | None) -> tuple[str, bool]:
        """Return the label column, and whether it is a guess by the values of the columns.

        The caller tells the user of such a guess.

        Args:
            label_column: the value of `--label-column`; None: the column is inferred.

        Raises:
            UserError: no column or several columns may hold the labels, or the named column does
                not exist or holds neither text nor numbers.
        """
        from datasets import ClassLabel, Value

        candidates = self.label_candidates()
        is_guessed = False
        if self.values_of is not None and label_column is None and not candidates:
            candidates = guess_label(self.features, self.values_of)
            is_guessed = len(candidates) == 1
        suitable = self.of_types(ClassLabel, Value)
        (chosen,) = self.choose("--label-column", label_column, candidates, suitable)
        return chosen, is_guessed

    def label_candidates(self) -> list[str]:
        """Return the columns that may hold the labels, by their types or by their names.

        A single column of type ClassLabel is certain. Otherwise, a single usual name decides. If
        neither is there, all columns of type ClassLabel are returned: none or several.
        """
        from datasets import ClassLabel

        with_class_type = self.of_types(ClassLabel)
        with_usual_name = [column for column in self.features if column.lower() in LABEL_NAMES]
        if len(with_class_type) != 1 and len(with_usual_name) == 1:
            return with_usual_name
        return with_class_type

    def of_types(self, *types: type) -> list[str]:
        """Return the columns that have one of these types of `datasets`."""
        return [column for column, feature in self.features.items() if isinstance(feature, types)]

    def find_texts(self, flag: str, text_columns: tuple[str, ...], label_column: str) -> list[str]:
        """Return the one or two columns of text: a sample is a text or a pair of texts.

        If the flag names no column, all columns of strings are taken, except the label column and
        row numbers. If there are more than two of these, only those that hold free text are taken.

        Args:
            flag: the flag's spelling, for messages.
            text_columns: the value of the flag; empty: the columns are inferred.
            label_column: the column of the labels.

        Raises:
            UserError: there is no such column or more than two, or a named column does not exist,
                holds no strings, is the label column, or is named twice.
        """
        self.refuse_label_as_text(flag, text_columns, label_column)
        if len({*text_columns}) < len(text_columns):
            raise UserError(
                f"{flag} names a column twice: {', '.join(text_columns)}",
                advice="name each column once",
            )
        suitable = [
            column
            for column, feature in self.features.items()
            if is_text(feature) and column != label_column
        ]
        candidates = [column for column in suitable if column.lower() not in NUMBERING_NAMES]
        if self.values_of is not None and not text_columns and len(candidates) > 2:
            guessed = guess_texts(candidates, self.values_of)
            # With any other number, `choose` refuses all candidates and names them.
            if 1 <= len(guessed) <= 2:
                candidates = guessed
        return self.choose(flag, text_columns, candidates, suitable, at_most=2)

    def refuse_label_as_text(
        self, flag: str, text_columns: tuple[str, ...], label_column: str
    ) -> None:
        """Raise a `UserError` if a named column of text is the label column."""
        if label_column in text_columns:
            raise UserError(
                f"{flag} names {label_column}, which is the label column of data set {self.name}, "
                "so the model would read the label",
                advice=f"name columns of text with {flag}, or the labels with --label-column",
            )

    def choose(
        self,
        flag: str,
        flag_value: str | tuple[str, ...] | None,
        candidates: list[str],
        suitable: list[str],
        at_most: int = 1,
    ) -> list[str]:
        """Return the columns that a flag names, or the candidates if the flag is not set.

        Args:
            flag: the flag's spelling, for messages.
            flag_value: the value of the flag; None or an empty tuple: it is not set.
            candidates: the columns to choose if the flag is not set.
            suitable: the columns whose type the flag allows.
            at_most: how many columns may be chosen.

        Raises:
            UserError: a named column is not suitable, or there are too many columns or none.
        """
        columns = [flag_value] if isinstance(flag_value, str) else list(flag_value or candidates)
        for column in columns:
            if column not in suitable:
                is_named = bool(flag_value)
                raise self.unsuitable_column_error(flag, column, suitable, is_named)
        if not 1 <= len(columns) <= at_most:
            column_names = f" ({', '.join(columns)})" if columns else ""
            if flag_value:
                problem = f"{flag} names {len(columns)} columns{column_names}, which is too many"
            else:
                likely = f"{len(columns)} likely columns" if columns else "no likely column"
                problem = f"data set {self.name} has {likely} for {flag}{column_names}"
            needed = "one column" if at_most == 1 else f"one column or up to {at_most}"
            lead_in = f"name {needed} with {flag}; the possible columns are"
            raise UserError(problem, advice=self.advice_to_choose(flag, suitable, lead_in))
        return columns

    def unsuitable_column_error(
        self, flag: str, column: str, suitable: list[str], is_named: bool
    ) -> UserError:
        """Return the error for a column that is missing or has an unsuitable type.

        Args:
            is_named: whether the flag names the column; otherwise the column was inferred.
        """
        problem = f"data set {self.name} has no column {column}"
        if column in self.features:
            problem = (
                f"column {column} of data set {self.name} is of type {self.type_name(column)}, "
                f"and {'the flag' if is_named else flag} needs {CONTENT_OF_COLUMNS[flag]}"
            )
        if is_named:
            problem = f"{flag} {column} can't be used, because {problem}"
        return UserError(
            problem, advice=self.advice_to_choose(flag, suitable, "choose one of the columns")
        )

    def advice_to_choose(self, flag: str, suitable: list[str], lead_in: str) -> str:
        """Return the advice to name a suitable column, or to pass other data if there is none.

        Args:
            lead_in: the text before the names of the possible columns.
        """
        nested = [column for column in self.features if self.is_nested(column)]
        if not suitable:
            advice = f"pass {DATA_WITH_COLUMNS[flag]} as --dataset"
            if flag == "--text-columns":
                advice += f"; {NUMBERS_ADVICE}"
        else:
            names = [f"{column} ({self.type_name(column)})" for column in suitable]
            advice = f"{lead_in} {', '.join(names)}"
        if nested:
            advice += (
                "; fields of objects and lists are not read, so make columns of those in "
                f"{', '.join(nested)} if you need them"
            )
        return advice

    def is_nested(self, column: str) -> bool:
        """Whether the values of a column are objects, or lists of values."""
        from datasets import LargeList, List

        return isinstance(self.features[column], (dict, list, List, LargeList))

    def type_name(self, column: str) -> str:
        """Return the name of a column's type, for a message."""
        from datasets import Value

        feature = self.features[column]
        if isinstance(feature, Value):
            return feature.dtype
        type_name = type(feature).__name__
        return "Json, for values of different types" if type_name == "Json" else type_name


def is_text(feature: Feature) -> bool:
    """Whether a column has one of the types of strings."""
    from datasets import Value

    dtypes = ("string", "large_string", "string_view")
    return isinstance(feature, Value) and feature.dtype in dtypes
