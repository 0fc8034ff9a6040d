"""Checkpoints copy tensors of a GPU, and a run that was killed on it resumes to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.isolation import default_device
from common.checkpoints.store import Contents
from tests.gpu.conftest import HAS_GPU, as_flags
from tests.gpu.launching import Launcher
from tests.jobs import final_weights, newest_step, rows_without_clock
from tests.launch import RECIPES, REPOSITORY
from tests.unit.checkpoint_store import checkpoints_in
from tests.unit.manifest_facts import identity_at

STEPS = 60
TIME_RECORDER = REPOSITORY / "tests" / "record_times.py"
DTYPES = (torch.float32, torch.float16, torch.int64)


def tensors_of_many_shapes(device: torch.device) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and sizes, one of them transposed."""
    sizes = [(64, 64), (1000,), (3, 5, 7), ()] * 100 + [(2048, 2048)] * 8
    tensors = {
        f"{number}": torch.full(size, number, dtype=DTYPES[number % 3], device=device)
        for number, size in enumerate(sizes)
    }
    tensors["transposed"] = torch.arange(6.0, device=device).view(2, 3).t()
    return tensors


def test_checkpoint_holds_values_of_its_moment(tmp_path: Path) -> None:
    """Training may change the tensors while the checkpoint is being written."""
    tensors = tensors_of_many_shapes(default_device())
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    checkpoints = checkpoints_in(tmp_path, keep=2, timeout=60.0, device=default_device())
    assert checkpoints.host_copies.is_asynchronous == HAS_GPU
    pieces: list[torch.Tensor] = []
    for step in (1, 2):
        for name, tensor in tensors.items():
            tensor.copy_(expected[name])
        contents = Contents(files={"model.safetensors": tensors})
        checkpoints.save(step, contents, identity_at(step))
        for tensor in tensors.values():
            tensor.fill_(-1)
        checkpoints.wait()
        assert checkpoints.failure is None
        pinned = checkpoints.host_copies.pinned.pieces
        assert all(piece.is_pinned() for piece in pinned)
        assert bool(pinned) == HAS_GPU, "the copies did not go through pinned memory"
        assert step == 1 or len(pinned) == len(pieces), "the memory was not used again"
        pieces = [*pinned]
        saved = load_file(tmp_path / f"step-{step:08d}" / "model.safetensors")
        assert saved.keys() == expected.keys()
        for name, tensor in saved.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_after_a_kill_ends_in_the_same_bits(
    recipe: str,
    launcher: Launcher,
    small: Callable[[str], dict[str, object]],
    half: str,
    tmp_path: Path,
) -> None:
    """With `--deterministic`, losses, loss scale and weights equal those of an unstopped run."""
    script = REPOSITORY / "recipes" / f"{recipe}.py"
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    settings = {
        **small(recipe),
        "max_steps": STEPS,
        "epochs": 99,
        "checkpoint_every": 5,
        "log_every": 5,
        "mixed_precision": half,
        "tracker": "none",
    }
    flags = [*as_flags(settings), "--deterministic", "--output-dir"]
    launcher.run(script, *flags, whole, directory=whole)
    # Each update of the run that is killed takes 50 ms longer, so that the kill comes in time.
    slow = (tmp_path / "stamps", 0, 0, 0.05, script, *flags, killed)
    output = launcher.kill_after_checkpoint(TIME_RECORDER, *slow, directory=killed, step=20)
    assert newest_step(killed) < STEPS, f"the kill came too late\n{output[-4000:]}"
    launcher.run(script, "--resume", killed, directory=killed)
    assert rows_without_clock(killed) == rows_without_clock(whole)
    assert final_weights(killed) == final_weights(whole)
