"""Memory limits of nested control groups, versions 1 and 2: the smallest one counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.measure import memory_limits, process_memory

MIB = 2**20


def write_limits(root: Path, path: str, name: str, limits: list[int | None]) -> None:
    """Write the limit of each level, where None is no limit."""
    folder = root
    for part, limit in zip(["", *path.strip("/").split("/")], limits, strict=False):
        folder = folder / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("max\n" if limit is None else f"{limit}\n")


@given(
    st.lists(st.none() | st.integers(1, 10**6), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_smallest_limit_of_all_levels_counts(
    tmp_path_factory: pytest.TempPathFactory,
    mebibytes: list[int | None],
    is_version_1: bool,
    is_hybrid: bool,
) -> None:
    """Slurm and systemd nest the process's group in others."""
    folder = tmp_path_factory.mktemp("groups")
    limits = [None if size is None else size * MIB for size in mebibytes]
    path = "/slurm/uid_1000/job_7"
    if is_version_1:
        lines = f"9:cpu,cpuacct:/other\n4:memory:{path}\n1:name=systemd:/x\n"
        write_limits(folder / "memory", path, "memory.limit_in_bytes", limits)
    else:
        lines = f"0::{path}\n"
        write_limits(folder / ("unified" if is_hybrid else ""), path, "memory.max", limits)
    (folder / "cgroup").write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_limits, "OWN_CGROUPS", folder / "cgroup")
        patch.setattr(memory_limits, "CGROUPS", folder)
        patch.setattr(memory_limits, "total_memory", lambda: 500_000 * MIB)
        device_memory = memory_limits.device_memory(torch.device("cpu"))
    known = [limit for limit in limits if limit is not None]
    assert device_memory == min([500_000 * MIB, *known])


def test_container_sees_its_limit_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths outside the container do not exist inside it."""
    (tmp_path / "cgroup").write_text("0::/../../system.slice/docker-1.scope\n")
    (tmp_path / "memory.max").write_text(f"{7 * MIB}\n")
    monkeypatch.setattr(memory_limits, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "CGROUPS", tmp_path)
    assert memory_limits.container_limits() == [7 * MIB]


def test_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other system calls give the figures."""

    def fail() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(memory_limits.psutil, "virtual_memory", fail)
    monkeypatch.setattr(process_memory, "own_process", lambda: None)
    monkeypatch.setattr(memory_limits, "OWN_CGROUPS", Path("/none/cgroup"))
    assert memory_limits.device_memory(torch.device("cpu")) > 10 * MIB
    assert process_memory.resident_bytes() > 10 * MIB
    assert process_memory.own_data_bytes() == 0
