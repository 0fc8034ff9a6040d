"""Blocks of code in the pages under docs/, which readers copy."""

from __future__ import annotations

import re
from typing import Any

from tests.launch import REPOSITORY


def page_block(page: str, text: str) -> str:
    """Return the only block of Python code of a page that has this text."""
    blocks = re.findall(
        r"^```py\n(.*?)^```$", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE | re.DOTALL
    )
    (block,) = [block for block in blocks if text in block]
    return block


def names_of_block(page: str, text: str) -> dict[str, Any]:
    """Run the only block of a page that has this text; return the names that it defines."""
    names: dict[str, Any] = {}
    exec(page_block(page, text), names)
    return names
