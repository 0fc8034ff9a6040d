"""What is saved is what was there then, however late the copies are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.checkpoints.copies import begun
from common.checkpoints.kinds import RandomState
from common.checkpoints.store import Checkpoints, Contents
from common.checkpoints.tensors import read_tensors
from tests.cuda_stand_in import Cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of several types and layouts, in two files."""
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = {"a": torch.arange(6.0).view(2, 3), "b": images, "none": torch.empty(0)}
    weights["p"] = torch.nn.Parameter(torch.ones(2))
    return {"weights": weights, "rank": {"random": torch.arange(9, dtype=torch.uint8)}}


@pytest.mark.parametrize("free", [2**30, 8])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_copies_are_of_the_state_when_they_were_begun(
    device: torch.device, free: int, cuda: Cuda
) -> None:
    """Training goes on at once; where a GPU has no room for a copy, once they are made."""
    cuda.free = free
    files = state()
    copies, wait = begun(files, device)
    with torch.no_grad():
        for tensors in files.values():
            for value in tensors.values():
                value.add_(1)
    is_late = device == GPU and free == 2**30
    assert torch.equal(copies["weights"]["a"], state()["weights"]["a"]) != is_late
    wait()
    for name, tensors in state().items():
        for key, value in tensors.items():
            copy = copies[name][key]
            assert torch.equal(copy, value), key
            assert (copy.dtype, copy.stride()) == (value.dtype, value.stride())
            assert not copy.requires_grad
    expected = 0 if device == CPU else sum(map(len, files.values()))
    assert len([event for event in cuda.events if event[0] == "pinned"]) == expected


def test_copying_waits_for_what_training_has_still_to_do(cuda: Cuda) -> None:
    """The side stream follows that of training, and writing follows the side stream."""
    files = state()
    _, wait = begun(files, GPU)
    waits = [number for event, number in cuda.events if event == "waited"]
    assert waits == [0]
    wait()
    waits = [number for event, number in cuda.events if event == "waited"]
    assert waits == [0, 1]


def test_checkpoint_of_a_gpu_holds_what_training_has_since_changed(
    tmp_path: Path, cuda: Cuda
) -> None:
    """The writer waits for the copies; what never changes is copied once."""
    checkpoints = Checkpoints(tmp_path, 0, 1, keep=2, patience=5, device=GPU)
    for step in (1, 2):
        files, once = state(), {"frozen-model.safetensors": {"f": torch.full((3,), 5.0)}}
        named = {f"{name}.safetensors": tensors for name, tensors in files.items()}
        contents = Contents(files=named, once=once, shared={"model": None}, of_rank={})
        checkpoints.save(step, contents, {})
        files["weights"]["a"].zero_()
        once["frozen-model.safetensors"]["f"].zero_()
        checkpoints.wait()
        assert checkpoints.failure is None
        folder = tmp_path / f"step-{step:08d}"
        saved = read_tensors(folder / "weights.safetensors")
        assert torch.equal(saved["a"], state()["weights"]["a"])
    assert read_tensors(tmp_path / "frozen-model.safetensors")["f"].tolist() == [5, 5, 5]


def test_generator_of_a_gpu_is_kept(cuda: Cuda) -> None:
    """Asked and set for the device that the run is on; a checkpoint of a CPU has none."""
    random = RandomState(GPU)
    state = random.state_dict()
    cuda.random.add_(1)
    random.load_state_dict(state)
    assert cuda.random.tolist() == list(range(16))
    on_cpu = RandomState(CPU).state_dict()
    assert "cuda" not in on_cpu
    random.load_state_dict(on_cpu)
    assert cuda.random.tolist() == list(range(16))
