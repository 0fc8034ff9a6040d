"""Fragments of Python in the pages under docs/: they parse, and what they import is there."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest

from tests.launch import REPOSITORY

# Fragments stand in blocks of "py"; those of "python" are whole programs, which are run.
FRAGMENTS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted((REPOSITORY / "docs").glob("*.md"))
    for number, block in enumerate(re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", FRAGMENTS)
def test_fragment_parses_and_imports_what_is_there(block: str) -> None:
    """A reader copies these lines."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), alias.name
