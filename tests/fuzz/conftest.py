"""A fixture of the tests that train in their own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.small_run import prepared


@pytest.fixture
def quick_runs() -> Iterator[None]:
    """Make runs in the test's process quick; see `prepared`."""
    with prepared():
        yield
