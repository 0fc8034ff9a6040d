"""Guesses of columns from their values."""

from __future__ import annotations

from math import nan

import pytest
from datasets import Value

from common.data.labelled_data.guess import guess_label

TEXTS = [
    f"{word} of a film that was seen {number} times" for number, word in enumerate("abcdefghi")
]


@pytest.mark.parametrize("other", [None, nan, 1.0])
def test_a_column_with_a_single_value_holds_no_classes(other: object) -> None:
    """It does not separate classes, even with gaps, so the label is the remaining column."""
    columns = {
        "text": TEXTS,
        "label": ["good", "bad", "good"] * 3,
        "checked": [1.0, other, other] * 3,
    }
    features = {name: Value("string") for name in columns}
    assert guess_label(features, columns.__getitem__) == ["label"]
    columns["checked"] = [1.0, 2.0, other] * 3
    assert guess_label(features, columns.__getitem__) == ["label", "checked"]
