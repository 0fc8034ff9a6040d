"""Python fragments in the pages under docs/: they parse, and their imports exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest

from tests.launch import REPOSITORY

# Blocks of "py" are fragments. Those of "python" are whole programs, which another test runs.
FRAGMENTS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted((REPOSITORY / "docs").glob("*.md"))
    for number, block in enumerate(re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", FRAGMENTS)
def test_fragment_parses_and_its_imports_exist(block: str) -> None:
    """Readers copy these lines."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), alias.name
