"""Edits copies of recipes, for ideas and mistakes that no flag expresses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def edited_once(text: str, edits: Iterable[tuple[str, str]]) -> str:
    """Return a text in which other texts are replaced, each of which it has exactly once.

    Args:
        edits: the texts and their replacements, which are made in this order.

    Raises:
        ValueError: a text to replace does not occur exactly once, because the recipe has changed.
    """
    for old, new in edits:
        count = text.count(old)
        if count != 1:
            raise ValueError(f"the recipe has {old.strip()!r} {count} times instead of once")
        text = text.replace(old, new)
    return text


def edited_text(text: str, edits: Mapping[str, str]) -> str:
    """Return a text in which every occurrence of each key is replaced by its value.

    Raises:
        SystemExit: a text to replace does not occur, because the recipe has changed.
    """
    for old, new in edits.items():
        if old not in text:
            raise SystemExit(
                f"error: the recipe has no {old.strip()!r} to replace: adapt the edits of the plan"
            )
        text = text.replace(old, new)
    return text


@contextmanager
def edited_recipe(recipe: Path, edits: Mapping[str, str]) -> Iterator[Path]:
    """Yield the path of a copy with the edits, of the same name; without edits, the recipe's own.

    Raises:
        SystemExit: a text to replace does not occur.
    """
    if not edits:
        yield recipe
        return
    text = edited_text(recipe.read_text(encoding="utf-8"), edits)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / recipe.name
        copy.write_text(text, encoding="utf-8")
        yield copy
