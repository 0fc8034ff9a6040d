"""A small part of the search of `python -m tests.fuzz`, with the same inputs each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import search
from tests.fuzz.targets import TARGETS

SLOW = ("tables", "damaged_tables", "images", "caches")  # which `datasets` reads, or Pillow decodes


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_success_or_a_sentence(target: str, tmp_path: Path, thorough: bool) -> None:
    """Each target succeeds or ends with one sentence, on every input."""
    count = (4 if target in SLOW else 12) * (3 if thorough else 1)
    assert search(target, count, seed=0, folder=tmp_path) >= count / 2
