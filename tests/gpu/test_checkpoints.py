"""A checkpoint's copy of what lies on a GPU, and a run that is killed there and goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.isolation import default_device
from common.checkpoints.store import Checkpoints, Contents
from tests.gpu.conftest import Launch, as_flags, environment
from tests.jobs import final_weights, learned, newest_step
from tests.launch import RECIPES, REPOSITORY

STEPS = 60


def test_a_checkpoint_holds_what_was_there_when_it_was_made(tmp_path: Path) -> None:
    """Whatever training does to the tensors while they are on their way to the disk."""
    sizes = [(64, 64), (1000,), (3, 5, 7), ()] * 100 + [(2048, 2048)] * 8
    kinds = (torch.float32, torch.float16, torch.int64)
    made = {
        f"{number}": torch.full(size, number, dtype=kinds[number % 3], device=default_device())
        for number, size in enumerate(sizes)
    }
    made["transposed"] = torch.arange(6.0, device=default_device()).view(2, 3).t()
    expected = {name: tensor.cpu().clone() for name, tensor in made.items()}
    checkpoints = Checkpoints(tmp_path, 0, 1, 2, 60.0)
    checkpoints.save(1, Contents(files={"model.safetensors": made}), {})
    for tensor in made.values():
        tensor.fill_(-1)
    checkpoints.wait()
    assert checkpoints.failure is None
    held = load_file(tmp_path / "step-00000001" / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_after_a_kill_ends_in_the_same_bits(
    recipe: str,
    launch: Launch,
    small: Callable[[str], dict[str, object]],
    half: str,
    tmp_path: Path,
) -> None:
    """With `--deterministic`: losses, loss scale and weights."""
    script, whole, killed = REPOSITORY / "recipes" / f"{recipe}.py", tmp_path / "a", tmp_path / "b"
    settings = {**small(recipe), "max_steps": STEPS, "checkpoint_every": 5, "log_every": 5}
    settings |= {"epochs": 99, "mixed_precision": half, "tracker": "none"}
    flags = [*as_flags(settings), "--deterministic", "--output-dir"]
    launch(script, *flags, whole, directory=whole)
    slow = [REPOSITORY / "tests" / "stamped.py", tmp_path / "stamps", 0, 0, 0.05]
    words = [sys.executable, *map(str, (*slow, script, *flags, killed))]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        try:
            ends = time.monotonic() + 120
            while newest_step(killed) < 20 and process.poll() is None and time.monotonic() < ends:
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        assert 20 <= newest_step(killed) < STEPS, log.read()[-4000:]
    launch(script, "--resume", killed, directory=killed)
    assert learned(killed) == learned(whole)
    assert final_weights(killed) == final_weights(whole)
