"""Rank and world size, as launchers state them."""

from __future__ import annotations

import pytest

from common.system.launch_variables import is_main_rank, local_world_size, rank, world_size


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher, there is one process, which is the main rank."""
    assert (rank(), world_size(), local_world_size()) == (0, 1, 1)
    assert is_main_rank()
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (rank(), world_size(), local_world_size()) == (3, 4, 2)
    assert not is_main_rank()
