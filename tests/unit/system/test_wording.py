"""Counts and lists have the words of a sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.system.wording import counted


@given(st.integers(0, 10**6))
def test_noun_is_in_the_singular_for_one_only(count: int) -> None:
    number, noun = counted(count, "process", "processes").split()
    assert int(number.replace(",", "")) == count
    assert noun == ("process" if count == 1 else "processes")
    assert counted(count, "run") == f"{number} {'run' if count == 1 else 'runs'}"
