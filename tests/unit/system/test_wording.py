"""Counts and lists have the words of a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.system.wording import counted, listed


@given(st.integers(0, 10**6))
def test_noun_is_in_the_singular_for_one_only(count: int) -> None:
    number, noun = counted(count, "process", "processes").split()
    assert int(number.replace(",", "")) == count
    assert noun == ("process" if count == 1 else "processes")
    assert counted(count, "run") == f"{number} {'run' if count == 1 else 'runs'}"


@pytest.mark.parametrize(("length", "is_shortened"), [(199, False), (200, False), (201, True)])
def test_long_item_ends_in_an_ellipsis(length: int, is_shortened: bool) -> None:
    """An item that fits does not."""
    phrase = listed(["x" * length, "y"])
    assert phrase == f"{'x' * min(length, 200)}{'…' if is_shortened else ''}, y"


def test_long_list_says_how_many_items_are_left_out() -> None:
    """Up to five items are listed."""
    assert listed([*"abcde"]) == "a, b, c, d, e"
    assert listed([*"abcdefg"]) == "a, b, c, d, e, and 2 more"
