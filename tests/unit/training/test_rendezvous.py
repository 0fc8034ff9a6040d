"""Rendezvous after a restart by torchrun: processes meet those of the same attempt only."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous

from benchmarks.harness.ports import free_port
from common.training.launch.rendezvous import rendezvous_url


def test_first_attempt_uses_torchs_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt, and a process without torchrun, use torch's rendezvous."""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert rendezvous_url() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert rendezvous_url() is None


def test_keys_of_an_earlier_attempt_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own store outlives the processes."""
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True)
    agent.set("address", "of a process that is gone")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        url = rendezvous_url()
        assert url is not None
        store, rank, world_size = next(rendezvous(url, timeout=timedelta(seconds=20)))
        assert (rank, world_size) == (0, 1)
        assert not store.check(["address"])
        store.set("address", "of this attempt")
        assert agent.get("address") == b"of a process that is gone"
