"""Which process this is, and how many threads it should use."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import psutil
import pytest

from common.system import machine


@pytest.mark.parametrize(
    ("asked", "variable", "cores", "processes", "expected"),
    [
        (None, "1", 8, 1, 8),  # what a bare launch exports
        (None, None, 8, 1, 8),
        (None, "1", 8, 2, 4),
        (None, "3", 8, 2, 3),  # the user's
        (None, "64", 8, 1, 8),  # of a machine whose other cores are not to be used
        (None, "1", 1, 2, 1),
        (None, "4,2", 8, 1, 4),  # one number a level of nesting
        (None, "", 8, 1, 8),
        (None, "many", 8, 1, 8),
        (5, "3", 8, 2, 5),
        (1, None, 8, 1, 1),
    ],
)
def test_each_core_has_one_thread(
    asked: int | None,
    variable: str | None,
    cores: int,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of a machine share out its cores, unless the user says how many threads."""
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert machine.cpu_threads(asked) == expected


def test_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher there is one process, and it speaks."""
    assert (machine.rank(), machine.world_size(), machine.local_world_size()) == (0, 1, 1)
    assert machine.is_main_rank()
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (machine.rank(), machine.world_size(), machine.local_world_size()) == (3, 4, 2)
    assert not machine.is_main_rank()


def test_cores_are_those_that_may_be_used() -> None:
    """A process that is held to fewer cores counts these alone."""
    if hasattr(os, "sched_getaffinity"):
        assert machine.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("ranks_here", "named"), [("1", True), ("2", False)])
def test_machines_talk_over_the_interface_they_meet_on(
    ranks_here: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named for gloo where there are several, unless it is the loopback or named already."""
    address = SimpleNamespace(address="10.9.8.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "ib0": [address]})
    asked = SimpleNamespace(connect=lambda to: None, getsockname=lambda: ("10.9.8.7", 5))
    monkeypatch.setattr("socket.socket", lambda *kind: contextlib.nullcontext(asked))
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ranks_here})
    machine.name_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("ib0" if named else None)
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    machine.name_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    del os.environ["GLOO_SOCKET_IFNAME"]
    address.address = "127.0.0.1"
    asked.getsockname = lambda: ("127.0.0.1", 5)
    machine.name_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
