"""The CPU time that other programs use while a run trains."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
import torch

from common.measure import machine_load
from common.measure.machine_load import CpuTimes, MachineLoad, other_cpu_fraction, own_seconds

SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


def ranks(*rows: tuple[float, float, float, float]) -> torch.Tensor:
    """Return the times of ranks: elapsed, total, busy and own seconds."""
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("times", "ranks_per_machine", "fraction"),
    [
        (ranks((10, 40, 10, 10)), 1, 0.0),
        (ranks((10, 40, 20, 10)), 1, 0.25),
        (ranks((10, 40, 9, 10)), 1, 0.0),  # counters are not exact
        (ranks((10, 40, 25, 10), (10, 40, 25, 5)), 2, 0.25),
        # Two machines: the first has 10 s of other programs in 40, the second none.
        (ranks((10, 40, 20, 5), (10, 40, 20, 5), (10, 40, 8, 4), (10, 40, 8, 4)), 2, 0.25),
    ],
)
def test_share_of_other_programs(
    times: torch.Tensor, ranks_per_machine: int, fraction: float
) -> None:
    """All ranks of a machine belong to the job, and the busiest machine counts."""
    assert other_cpu_fraction(times, ranks_per_machine) == pytest.approx(fraction)


@pytest.mark.parametrize(
    "times", [(0.1, 0.4, 0.4, 0.1), (10, 0, 0, 3), (10, 4, 4, 3), (0, 0, 0, 0)]
)
def test_unknown_load_is_no_load_of_zero(times: tuple[float, float, float, float]) -> None:
    """Very short runs can't tell, and some containers count nothing."""
    assert other_cpu_fraction(ranks(times), 1) is None


def test_missing_counters_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is left out."""

    def refuse() -> None:
        raise PermissionError("/proc/stat")

    load = MachineLoad()
    load.start()
    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert other_cpu_fraction(ranks(tuple(load.times().values())), 1) is None  # type: ignore[arg-type]


def test_child_processes_are_this_job() -> None:
    """A child that computes counts as own time, while it runs and after its end."""
    before = own_seconds()
    with subprocess.Popen([sys.executable, "-c", SPIN]) as child:
        while psutil.Process(child.pid).cpu_times().user < 0.3:
            time.sleep(0.02)
        during = own_seconds()
        child.kill()
    assert during - before > 0.25
    assert own_seconds() - before > 0.25


def test_resumed_run_adds_up_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between the attempts does not count. Counting begins once."""
    readings = [CpuTimes(100, 400, 50, 10), CpuTimes(110, 440, 90, 20)]
    readings += [CpuTimes(1000, 9000, 5000, 1), CpuTimes(1002, 9008, 5004, 2)]
    monkeypatch.setattr(machine_load.CpuTimes, "now", lambda: readings.pop(0))
    first = MachineLoad()
    assert first.times() == CpuTimes()
    first.start()
    first.start()
    state = first.state_dict()
    assert CpuTimes.of_state(state) == CpuTimes(10, 40, 40, 10)
    second = MachineLoad()
    second.load_state_dict(state)
    assert second.times() == CpuTimes(10, 40, 40, 10)
    second.start()
    assert second.times() == CpuTimes(12, 48, 44, 11)
