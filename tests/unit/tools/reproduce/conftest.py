"""Fixtures for all tests of reproduced runs."""

from __future__ import annotations

import pytest

from common.run_directory import provenance


@pytest.fixture(autouse=True)
def _no_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the tests' own files when a made-up run looks for the packages it imports.

    pytest has imported hundreds of files, and reading them takes seconds.
    """
    monkeypatch.setattr(provenance, "imported_files", set)
