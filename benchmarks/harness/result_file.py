"""Reads and writes files of results. This module imports no library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Content = TypeVar("Content")


def read_results(file: Path, parse: Callable[[Any], Content]) -> Content | None:
    """Return what `parse` makes of the JSON value in a file; None if there is no such file.

    Raises:
        SystemExit: the file holds something else.
    """
    if not file.exists():
        return None
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as problem:
        raise SystemExit(
            f"error: {file} is no file of results ({problem!r}): pass another --output"
        ) from None


def write_results(file: Path, content: object) -> None:
    """Write a JSON file, completely or not at all, so that a kill loses no earlier results."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
