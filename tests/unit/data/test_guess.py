"""Guesses of columns from their values."""

from __future__ import annotations

from math import nan

import pytest
from datasets import Value

from common.data.guess import guess_label

TEXTS = [
    f"{word} of a film that was seen {number} times" for number, word in enumerate("abcdefghi")
]


@pytest.mark.parametrize("missing", [None, nan, 1.0])
def test_a_column_with_one_value_and_gaps_holds_no_classes(missing: object) -> None:
    """It does not separate classes, so the label is the other column."""
    columns = {
        "text": TEXTS,
        "label": ["good", "bad", "good"] * 3,
        "checked": [1.0, missing, missing] * 3,
    }
    features = {name: Value("string") for name in columns}
    assert guess_label(features, columns.__getitem__) == ["label"]
    columns["checked"] = [1.0, 2.0, missing] * 3
    assert guess_label(features, columns.__getitem__) == ["label", "checked"]
