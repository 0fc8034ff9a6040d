"""The check of messages for classes of our own exceptions finds them, and accepts all others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from common.errors import UserError
from common.failures.sentences import reading
from tests.own_errors import require_no_own_class

OWN = "raise ValueError('its pixels are negative')"
OPERATION = "{}['pixels']"
LIBRARY = "import json; json.loads('{')"


def refusal_by(statement: str, folder: Path) -> UserError:
    """Return the error for a user if a statement in a file of the folder fails."""
    path = folder / "own.py"
    path.write_text(f"def fail():\n    {statement}\n")
    with pytest.raises(UserError) as refused, reading("image a.png", "replace it"):
        runpy.run_path(str(path))["fail"]()
    return refused.value


def test_own_class_in_a_message_is_found(tmp_path: Path) -> None:
    """The user needs no such name, because our code could have said what is wrong."""
    error = refusal_by(OWN, tmp_path)
    assert "(ValueError: its pixels are negative)" in error.message
    with pytest.raises(AssertionError, match="ValueError"):
        require_no_own_class(error, tmp_path)
    require_no_own_class(error, tmp_path / "another")


@pytest.mark.parametrize("statement", [OPERATION, LIBRARY])
def test_class_of_another_error_is_accepted(statement: str, tmp_path: Path) -> None:
    """Python and libraries say what is wrong only together with the class."""
    error = refusal_by(statement, tmp_path)
    assert "Error: " in error.message
    require_no_own_class(error, tmp_path)
