"""Memory that a block of code takes, and memory of devices."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from common.measure import memory, process_memory
from common.measure.memory import NO_PEAKS, MemoryTracker
from common.measure.memory import peaks as peaks_of
from common.measure.memory_limits import device_memory

SIZE = 256  # MiB; the heap that earlier tests left has to grow for it


def touched(mebibytes: int) -> torch.Tensor:
    """Return a tensor whose pages have all been written to."""
    return torch.ones(mebibytes * 2**18)


@pytest.fixture
def without_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system on which the peak of a process cannot be reset."""
    monkeypatch.setattr(process_memory, "CLEAR_REFS", Path("/proc/self/no-such-file/clear_refs"))


def test_tracker_measures_a_kept_tensor() -> None:
    """A kept tensor's size is the block's delta and kept memory, and part of the peak."""
    before = process_memory.resident_bytes() / 2**20
    with MemoryTracker("cpu") as tracked:
        tensor = touched(SIZE)
    assert tracked.delta_mib == pytest.approx(SIZE, rel=0.05)
    assert tracked.kept_mib == pytest.approx(SIZE, rel=0.05)
    assert tracked.peak_mib == pytest.approx(before + SIZE, rel=0.05)
    assert len(tensor)


def test_tracker_measures_a_freed_tensor() -> None:
    """A freed tensor counts in the peak and the delta, but not as kept."""
    with MemoryTracker("cpu") as tracked:
        tensor = touched(SIZE)
        tensor.add_(1)
        del tensor
    assert tracked.delta_mib == pytest.approx(SIZE, rel=0.05)
    assert tracked.kept_mib == pytest.approx(0, abs=0.05 * SIZE)


@pytest.mark.usefixtures("without_reset")
def test_tracker_without_reset_sees_only_new_peaks() -> None:
    """A peak below an earlier one cannot be told."""
    highest = peaks_of(torch.device("cpu")).in_use
    more = (highest - process_memory.resident_bytes()) // 2**20 + SIZE
    with MemoryTracker("cpu") as tracked:
        touched(more)
    assert tracked.delta_mib == pytest.approx(more, rel=0.05)
    with MemoryTracker("cpu") as tracked:
        touched(SIZE)
    assert tracked.delta_mib == pytest.approx(max(0.0, tracked.kept_mib), abs=1)


def test_tracker_ignores_earlier_peaks() -> None:
    """The process's own peak still has them."""
    touched(2 * SIZE)
    highest = peaks_of(torch.device("cpu")).in_use
    with MemoryTracker("cpu") as tracked:
        touched(SIZE)
    assert tracked.delta_mib == pytest.approx(SIZE, rel=0.1)
    assert peaks_of(torch.device("cpu")).in_use >= highest


def test_trackers_nest() -> None:
    """An inner block resets the peak, and the outer block still has its own."""
    with MemoryTracker("cpu") as outer:
        touched(SIZE)
        with MemoryTracker("cpu") as inner:
            touched(SIZE)
    assert inner.delta_mib == pytest.approx(SIZE, rel=0.1)
    assert outer.delta_mib == pytest.approx(SIZE, rel=0.05)


def test_tracker_measures_a_block_that_fails() -> None:
    """The error is passed on."""
    tracked = MemoryTracker("cpu")
    tensors = []

    def fail() -> None:
        with tracked:
            tensors.append(touched(SIZE))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert tracked.delta_mib == pytest.approx(SIZE, rel=0.05)
    with MemoryTracker("cpu") as after:
        pass
    assert after.delta_mib == pytest.approx(0, abs=0.05 * SIZE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tracker_uses_the_allocators_figures_on_a_gpu() -> None:
    """The run's peak survives the reset."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(2 * SIZE * 2**18, device=device)
    with MemoryTracker() as tracked:
        kept = torch.empty(SIZE * 2**17, device=device)
        torch.empty(SIZE * 2**17, device=device)
    assert tracked.delta_mib == pytest.approx(SIZE, rel=0.01)
    assert tracked.kept_mib == pytest.approx(SIZE / 2, rel=0.01)
    assert memory.memory_used(device)["memory/peak_allocated_mib"] >= 2 * SIZE
    assert len(kept)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_peaks_of_a_gpu_are_found_by_both_of_its_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker of `cuda` resets the peak, and the metrics of `cuda:0` still have it."""
    peaks = {"now": 700, "reserved": 900}
    monkeypatch.setattr(memory, "EARLIER_PEAKS", defaultdict(lambda: [NO_PEAKS]))
    for function, answer in {
        "current_device": lambda: 0,
        "memory_allocated": lambda device: 100 * 2**20,
        "max_memory_allocated": lambda device: peaks["now"] * 2**20,
        "max_memory_reserved": lambda device: peaks["reserved"] * 2**20,
        "reset_peak_memory_stats": lambda device: peaks.update(now=100, reserved=100),
    }.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    with MemoryTracker(name) as outer:
        peaks["now"] = 300
        with MemoryTracker("cuda:0" if name == "cuda" else "cuda"):
            peaks["now"] = 150
            assert memory.memory_used(torch.device(name))["memory/peak_allocated_mib"] == 700
    assert (outer.peak_mib, outer.delta_mib, outer.kept_mib) == (300, 200, 0)
    for device in (torch.device("cuda"), torch.device("cuda", 0)):
        used = memory.memory_used(device)
        assert used["memory/peak_allocated_mib"] == 700
        assert used["memory/peak_reserved_mib"] == 900


def test_memory_of_the_cpu_is_plausible() -> None:
    """The CPU's memory is that of the machine, or the limit of a container."""
    assert 2**28 < device_memory(torch.device("cpu")) < 2**50
