"""Copies to the host hold the state of the moment they began, however late they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints import copies as copies_module
from common.checkpoints.adapters import RandomState
from common.checkpoints.copies import PIECE_BYTES, HostCopies, PinnedMemory
from common.checkpoints.store import Contents
from common.checkpoints.tensors import read_tensors
from common.system.devices import MemoryInfo
from tests.cuda_stand_in import Cuda
from tests.unit.checkpoint_store import checkpoints_in
from tests.unit.manifest_facts import identity_at

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OTHER_GPU = torch.device("cuda", 3)
COPY = torch.Tensor.copy_
EMPTY = torch.empty


class Stream:
    """A stream that runs its work as late as possible: when somebody waits for it."""

    def __init__(self, device: StandIn) -> None:
        self.device = device
        self.late: list[Callable[[], Any]] = []

    def __enter__(self) -> None:
        self.device.active = self

    def __exit__(self, *unused: object) -> None:
        self.device.active = None

    def record_event(self) -> Stream:
        """Return this stream itself, so that waiting for the event waits for all its work."""
        return self

    def wait_event(self, event: Stream) -> None:
        """Note which stream is waited for."""
        self.device.waits.append("training" if event is self.device.training else "copying")

    def synchronize(self) -> None:
        """Run all work that is left."""
        late = self.late
        self.late = []
        for work in late:
            work()


class StandIn:
    """A device with streams and pinned memory, whose tensors lie on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int | None = 2**40
        self.training = Stream(self)
        self.active: Stream | None = None
        self.waits: list[str] = []
        self.pinned: list[int] = []  # bytes of each allocation
        self.used: dict[str, torch.device] = {}  # by name of the thread
        answers: dict[str, Callable[..., Any]] = {
            "has_streams": lambda device: device.type == "cuda",
            "has_pinned_memory": lambda device: device.type == "cuda",
            "current_stream": lambda device: self.training,
            "new_stream": lambda device: Stream(self),
            "memory_info": lambda device: self.memory_info(),
            "use": lambda device: self.used.update({threading.current_thread().name: device}),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(copies_module, name, answer)
        monkeypatch.setattr(
            torch.Tensor, "copy_", lambda *args, **kwargs: self.copy_(*args, **kwargs)
        )
        monkeypatch.setattr(torch, "empty", self.empty)

    def memory_info(self) -> MemoryInfo | None:
        return None if self.free is None else MemoryInfo(self.free, 2**40)

    def copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        """Stand in for `Tensor.copy_`, which runs later on a stream if it does not block."""
        if non_blocking and self.active is not None:
            self.active.late.append(lambda: COPY(target, source))
            return target
        return COPY(target, source)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Stand in for `torch.empty`, and fill pinned memory with another value."""
        tensor = EMPTY(*size, **options)
        if pin_memory:
            self.pinned.append(tensor.nbytes)
            tensor.fill_(77)
        return tensor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a stand-in for a GPU."""
    return StandIn(monkeypatch)


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of several types and layouts, in two files."""
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = {"a": torch.arange(6.0).view(2, 3), "b": images, "none": torch.empty(0)}
    weights["p"] = torch.nn.Parameter(torch.ones(2))
    weights |= {"t": torch.arange(6.0).view(2, 3).t(), "flag": torch.tensor([True, False, True])}
    weights |= {"scalar": torch.tensor(3), "half": torch.ones(3, dtype=torch.float16)}
    return {"weights": weights, "rank": {"random": torch.arange(9, dtype=torch.uint8)}}


def change(files: dict[str, dict[str, torch.Tensor]]) -> None:
    """Change all tensors in place, as further training does."""
    with torch.no_grad():
        for tensors in files.values():
            for value in tensors.values():
                value.logical_not_() if value.dtype is torch.bool else value.add_(1)


def assert_copies(copies: dict[str, dict[str, torch.Tensor]]) -> None:
    """Check that copies are of `state()`, in its types and layouts."""
    for name, tensors in state().items():
        assert copies[name].keys() == tensors.keys()
        for key, value in tensors.items():
            copy = copies[name][key]
            assert torch.equal(copy, value), key
            assert (copy.dtype, copy.stride()) == (value.dtype, value.stride()), key
            assert not copy.requires_grad


@pytest.mark.parametrize("free", [2**40, 8, None])
@pytest.mark.parametrize("target", [CPU, GPU], ids=str)
def test_copies_hold_the_state_at_the_call(
    target: torch.device, free: int | None, device: StandIn
) -> None:
    """Training continues at once, or after the copy if the GPU has no room for a second one."""
    device.free = free
    files = state()
    copies, wait = HostCopies(target).begin(files)
    is_late = target == GPU and free == 2**40
    assert bool(copies["weights"]) != is_late, "the training thread did not leave it to another"
    change(files)
    wait()
    assert_copies(copies)
    assert device.pinned == ([] if target == CPU else [PIECE_BYTES]), "one allocation for all"
    assert device.waits == ([] if target == CPU else ["training"])


def test_pinned_memory_is_reused(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next checkpoint reuses it, even after a save of other tensors in between."""
    monkeypatch.setattr(copies_module, "PIECE_BYTES", 2048)  # room for a single state
    copies_to_host = HostCopies(GPU)
    for number in range(3):
        files = state()
        if number == 1:
            files = {"best": files["weights"]}
        copies, wait = copies_to_host.begin(files)
        wait()
        assert torch.equal(copies[next(iter(files))]["a"], state()["weights"]["a"])
    assert device.pinned == [2048]


def test_pinned_tensors_never_overlap(device: StandIn) -> None:
    """A tensor larger than a piece gets a piece of its own."""
    pinned = PinnedMemory()
    sizes = [PIECE_BYTES // 2, 5, PIECE_BYTES // 2 - 1, 2 * PIECE_BYTES, 7]
    for _ in range(2):
        pinned.use_again()
        places = []
        for size in sizes:
            memory = pinned.empty_like(EMPTY(size, dtype=torch.uint8, device="meta"))
            assert memory.nbytes == size
            places.append((memory.data_ptr(), memory.data_ptr() + size))
        for (_, end), (start, _) in pairwise(sorted(places)):
            assert end <= start
    assert device.pinned == [PIECE_BYTES, PIECE_BYTES, 2 * PIECE_BYTES, PIECE_BYTES]


def test_writer_thread_uses_the_device_of_its_rank(tmp_path: Path, device: StandIn) -> None:
    """A new thread starts on GPU 0, where rank 3 would take memory from rank 0."""
    checkpoints = checkpoints_in(tmp_path, keep=2, device=OTHER_GPU)
    contents = Contents(files={"weights.safetensors": {"w": torch.ones(3)}})
    checkpoints.save(1, contents, identity_at(1))
    checkpoints.wait()
    assert checkpoints.failure is None
    (thread,) = device.used
    assert thread != threading.current_thread().name
    assert device.used[thread] == OTHER_GPU


@pytest.mark.usefixtures("device")
def test_checkpoint_from_a_gpu_is_not_changed_by_later_training(tmp_path: Path) -> None:
    """The writer waits for the copies. Frozen weights are copied once."""
    checkpoints = checkpoints_in(tmp_path, keep=2, device=GPU)
    for step in (1, 2):
        files = state()
        lasting = {"frozen-model.safetensors": {"f": torch.full((3,), 5.0)}}
        named = {f"{name}.safetensors": tensors for name, tensors in files.items()}
        contents = Contents(files=named, lasting_files=lasting, shared={"model": None}, of_rank={})
        checkpoints.save(step, contents, identity_at(step))
        change(files)
        lasting["frozen-model.safetensors"]["f"].zero_()
        checkpoints.wait()
        assert checkpoints.failure is None
        folder = tmp_path / f"step-{step:08d}"
        saved = {name: read_tensors(folder / f"{name}.safetensors") for name in files}
        for name, tensors in state().items():
            for key, value in tensors.items():
                assert torch.equal(saved[name][key], value), key
    assert read_tensors(tmp_path / "frozen-model.safetensors")["f"].tolist() == [5, 5, 5]


def test_generator_of_a_gpu_is_saved_and_restored(cuda: Cuda) -> None:
    """A state from a CPU run has no such generator and leaves it alone."""
    random = RandomState(GPU)
    state = random.state_dict()
    cuda.random.add_(1)
    random.load_state_dict(state)
    assert cuda.random.tolist() == list(range(16))
    on_cpu = RandomState(CPU).state_dict()
    assert "cuda" not in on_cpu
    random.load_state_dict(on_cpu)
    assert cuda.random.tolist() == list(range(16))
