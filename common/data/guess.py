"""Guess which columns of a table hold classes or free text, where no type or name tells it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

# A column of more values, or where a value has fewer rows than this on average, is none of classes.
MOST_CLASSES = 50
ROWS_PER_CLASS = 3
NUMBERED = ("id", "idx", "index", "unnamed: 0")  # columns that number the rows

Content = Literal["classes", "text", "image", "numbering", "other"]
ValuesOf = Callable[[str], Sequence[Any]]


def content_of(column: str, feature: Any, values_of: ValuesOf) -> Content:
    """Tell what a column holds by its type and values."""
    from datasets import Image, Value

    if isinstance(feature, Image):
        return "image"
    if column.lower() in NUMBERED:
        return "numbering"
    if not isinstance(feature, Value):
        return "other"
    values = [value for value in values_of(column) if value is not None and value == value]
    distinct = {*values}
    is_text = any(isinstance(value, str) for value in distinct)
    if any(isinstance(value, float) and not value.is_integer() for value in distinct):
        return "other"
    if len(distinct) <= max(2, min(MOST_CLASSES, len(values) // ROWS_PER_CLASS)):
        return "classes"
    if is_text:
        return "text"
    is_numbering = len(distinct) == len(values) and all(isinstance(v, int) for v in distinct)
    return "numbering" if is_numbering else "other"


def guess_label(features: dict[str, Any], values_of: ValuesOf) -> list[str]:
    """Return the columns that may hold the classes: one alone where it is certain enough.

    It is where all others are free text, images or numbers of rows. A column of one value holds no
    classes.
    """
    contents = {name: content_of(name, kind, values_of) for name, kind in features.items()}
    candidates = [
        name
        for name, content in contents.items()
        if content == "classes" and len({*values_of(name)}) > 1
    ]
    rest = {content for name, content in contents.items() if name not in candidates}
    is_certain = rest <= {"text", "image", "numbering"} and rest & {"text", "image"}
    return candidates if is_certain or len(candidates) > 1 else []


def guess_texts(columns: Iterable[str], values_of: ValuesOf) -> list[str]:
    """Return those of some columns of strings that hold free text: sentences, and many of them."""
    texts = []
    for column in columns:
        values = [value for value in values_of(column) if value]
        distinct = {*values}
        has_words = sum(len(value.split()) > 1 for value in distinct) > len(distinct) / 2
        if has_words and len(distinct) > max(2, min(MOST_CLASSES, len(values) // ROWS_PER_CLASS)):
            texts.append(column)
    return texts
