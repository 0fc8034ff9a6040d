"""Guesses which columns of a table hold the classes or free text.

Such guesses are needed for tables like plain CSV files, in which neither the types nor the names of
the columns show what they hold.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

# A column holds classes if it has few distinct values, and several rows for each on average.
MAX_CLASSES = 50
ROWS_PER_CLASS = 3  # the least average
NUMBERING_NAMES = ("id", "idx", "index", "unnamed: 0")  # names of columns that number the rows

Content = Literal["classes", "text", "image", "numbering", "other"]
Feature = object  # the type of a column in `datasets`: Value, ClassLabel, Image …
ValuesOf = Callable[[str], Sequence[object]]  # returns all values of a column, by its name


def guess_content(column: str, feature: Feature, values_of: ValuesOf) -> Content:
    """Guess what a column holds from its type, its name and its values.

    A column of images is recognised by its type, and a column of row numbers may be recognised by
    its name. A column of any other type than plain values, such as lists, is "other". For plain
    values, the values decide, and missing values do not count:

    - Numbers that are not whole are "other".
    - Few distinct values are "classes", whether they are numbers, strings or other plain values.
    - Many distinct strings are "text".
    - Integers that differ in all rows are "numbering".
    - Anything else is "other".
    """
    from datasets import Image, Value

    if isinstance(feature, Image):
        return "image"
    if column.lower() in NUMBERING_NAMES:
        return "numbering"
    if not isinstance(feature, Value):
        return "other"
    values = present(values_of(column))
    distinct = set(values)
    if any(isinstance(value, float) and not value.is_integer() for value in distinct):
        return "other"
    if len(distinct) <= most_classes(len(values)):
        return "classes"
    if any(isinstance(value, str) for value in distinct):
        return "text"
    is_unique = len(distinct) == len(values)
    if is_unique and all(isinstance(value, int) for value in distinct):
        return "numbering"
    return "other"


def present(values: Sequence[object]) -> list[object]:
    """Return the values that are not missing."""
    return [value for value in values if not is_missing(value)]


def is_missing(value: object) -> bool:
    """Whether a cell of a table has no value: whether it is None or NaN."""
    # NaN is the only value that differs from itself.
    return value is None or value != value


def most_classes(num_rows: int) -> int:
    """Return how many distinct values a column of classes may have at most.

    Args:
        num_rows: the rows of the table in which the column has a value.
    """
    return max(2, min(MAX_CLASSES, num_rows // ROWS_PER_CLASS))


def guess_label(features: Mapping[str, Feature], values_of: ValuesOf) -> list[str]:
    """Return the columns that may hold the classes.

    If there is only one such column, it is returned only if the guess is safe: at least one other
    column must hold text or images, and the rest may only hold row numbers or a single value.
    Several columns are always returned, so that the caller can tell the user to choose among them.

    A column with a single value, besides missing ones, does not separate classes. So it is left
    out.
    """
    contents = {
        column: guess_content(column, feature, values_of) for column, feature in features.items()
    }
    useful_contents = {
        column: content
        for column, content in contents.items()
        if content != "classes" or len(set(present(values_of(column)))) > 1
    }
    candidates = [column for column, content in useful_contents.items() if content == "classes"]
    other_contents = {*useful_contents.values()} - {"classes"}
    has_inputs = bool(other_contents & {"text", "image"})
    is_safe = has_inputs and other_contents <= {"text", "image", "numbering"}
    return candidates if is_safe or len(candidates) > 1 else []


def guess_texts(columns: Iterable[str], values_of: ValuesOf) -> list[str]:
    """Return the columns that hold free text.

    Most distinct values of such a column have several words, and there are too many of them to be
    classes.

    Args:
        columns: the names of columns of strings.
    """
    texts = []
    for column in columns:
        values = [value for value in values_of(column) if isinstance(value, str) and value]
        distinct = set(values)
        num_with_several_words = sum(len(value.split()) > 1 for value in distinct)
        are_sentences = num_with_several_words > len(distinct) / 2
        if are_sentences and len(distinct) > most_classes(len(values)):
            texts.append(column)
    return texts
