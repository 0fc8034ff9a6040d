"""The process's rank, its number of threads, and its network interface."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import psutil
import pytest

from common.system import machine


@pytest.mark.parametrize(
    ("num_threads", "variable", "cores", "processes", "expected"),
    [
        (None, "1", 8, 1, 8),  # a bare launch exports 1
        (None, None, 8, 1, 8),
        (None, "1", 8, 2, 4),
        (None, "3", 8, 2, 3),  # the user's number
        (None, "64", 8, 1, 8),  # a number for a machine with more cores than are usable
        (None, "1", 1, 2, 1),
        (None, "4,2", 8, 1, 4),  # one number per level of nesting
        (None, "", 8, 1, 8),
        (None, "many", 8, 1, 8),
        (5, "3", 8, 2, 5),
        (1, None, 8, 1, 1),
    ],
)
def test_each_core_has_one_thread(
    num_threads: int | None,
    variable: str | None,
    cores: int,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of a machine share its cores, unless the user states a number."""
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert machine.cpu_threads(num_threads) == expected


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher, there is one process, which is the main rank."""
    assert (machine.rank(), machine.world_size(), machine.local_world_size()) == (0, 1, 1)
    assert machine.is_main_rank()
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (machine.rank(), machine.world_size(), machine.local_world_size()) == (3, 4, 2)
    assert not machine.is_main_rank()


def test_only_usable_cores_count() -> None:
    """A process may be restricted to fewer cores."""
    if hasattr(os, "sched_getaffinity"):
        assert machine.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("ranks_here", "named"), [("1", True), ("2", False)])
def test_gloo_uses_the_interface_to_the_other_machine(
    ranks_here: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named if there are several machines, except the loopback or if the user named one."""
    address = SimpleNamespace(address="10.9.8.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "ib0": [address]})
    socket = SimpleNamespace(connect=lambda to: None, getsockname=lambda: ("10.9.8.7", 5))
    monkeypatch.setattr("socket.socket", lambda *kind: contextlib.nullcontext(socket))
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ranks_here})
    machine.name_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("ib0" if named else None)
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    machine.name_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    del os.environ["GLOO_SOCKET_IFNAME"]
    address.address = "127.0.0.1"
    socket.getsockname = lambda: ("127.0.0.1", 5)
    machine.name_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("info", "capability", "expected"),
    [
        ({}, "DEFAULT", "a CPU, DEFAULT"),
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "1", "flags": "avx2"},
            "AVX2",
            "AMD EPYC, family 25, model 1, AVX2",
        ),
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "17", "flags": "avx512_bf16"},
            "AVX512",
            "AMD EPYC, family 25, model 17, AVX512-BF16",
        ),
        # The user restricts torch to other kernels, for example by ATEN_CPU_CAPABILITY.
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "17", "flags": "avx512_bf16"},
            "AVX2",
            "AMD EPYC, family 25, model 17, AVX2",
        ),
        (
            {
                "model name": "Xeon",
                "cpu family": "6",
                "model": "143",
                "flags": "avx512_bf16 amx_bf16",
            },
            "AVX512",
            "Xeon, family 6, model 143, AVX512-BF16 with AMX-BF16",
        ),
    ],
)
def test_processor_kind_names_model_and_instructions(
    info: dict[str, str], capability: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines hide the exact name, and other systems tell no family."""
    monkeypatch.setattr(machine, "cpu_info", lambda: info)
    monkeypatch.setattr(machine.platform, "processor", lambda: "a CPU")
    assert machine.processor_kind(capability) == expected
