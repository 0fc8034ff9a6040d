"""fp16's loss scale, waits for the device, compilation and the meters, on a real GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.harness.guarded import without_waiting
from benchmarks.harness.isolation import default_device, isolated
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import FinishedTraining
from common.measure.memory import MEBIBYTE, MemoryTracker
from common.measure.power import PowerMeter
from common.system.processor import cpu_threads
from tests.gpu.conftest import DEVICE_TYPE, HAS_GPU, as_flags
from tests.gpu.launching import Launcher
from tests.launch import RECIPES, REPOSITORY
from tests.loss_scale import SCRIPT, WILD, assert_overflows_only_skip

Small = Callable[[str], dict[str, object]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_overflow_is_skipped_and_halves_the_scale(
    recipe: str, launcher: Launcher, small: Small, tmp_path: Path
) -> None:
    """The scale doubles after four updates without one, and losses stay near those of fp32."""
    flags = [*as_flags(small(recipe)), "--max-steps", 12, "--epochs", 9, "--log-every", 1]
    flags += ["--tracker", "none", "--gradient-accumulation-steps", 2, "--output-dir"]
    path = REPOSITORY / "recipes" / f"{recipe}.py"
    half = tmp_path / "half"
    full = tmp_path / "full"
    words = (*WILD, path, *flags, half, "--mixed-precision", "fp16")
    run = launcher.run(SCRIPT, *words, directory=half)
    assert run.config["environment"]["mixed_precision"] == "fp16"
    expected = launcher.run(path, *flags, full, "--mixed-precision", "no", directory=full)
    assert_overflows_only_skip(run, expected)
    first = expected.series("train/loss")[1]
    assert run.series("train/loss")[1] == pytest.approx(first, rel=0.02)


def trained(recipe: str, updates: int, settled: int, **settings: object) -> FinishedTraining:
    """Train in this process; after `settled` updates, a wait for the device is an error."""
    module = load_recipe(recipe)
    with isolated(cpu_threads()), without_waiting(module, settled):
        training = train_recipe(module, updates, **settings)
    assert training.model is not None
    parameters = training.model.parameters()
    assert {parameter.device.type for parameter in parameters} == {DEVICE_TYPE}
    return training


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loop_waits_for_the_device_nowhere_but_to_log(
    recipe: str, small: Small, half: str
) -> None:
    """The loop does not wait for batches, nor in forward, backward, clipping or the update."""
    updates = 24 if HAS_GPU else 4
    settings = {**small(recipe), "mixed_precision": half, "log_every": 10}
    assert math.isfinite(trained(recipe, updates, 5, **settings).train_loss)


def test_a_wait_is_an_error_under_that_guard() -> None:
    """The guard of the test above can fail."""
    if not HAS_GPU:
        pytest.skip("a CPU does not wait")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_it_learns_the_same(small: Small, half: str) -> None:
    """The losses with and without `--compile` agree."""
    settings = {**small("mnist_mlp"), "mixed_precision": half}
    losses = [trained("mnist_mlp", 30, 20, compile=c, **settings).train_loss for c in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_memory_and_power_are_measured(small: Small, half: str) -> None:
    """A block's memory is exact to the byte, and a run measures the memory and power of the GPU."""
    with MemoryTracker() as memory:
        block = torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device=default_device())
        del block
    assert memory.delta_mib == pytest.approx(64, rel=0 if HAS_GPU else 0.2)
    assert bool(PowerMeter(default_device()).readings()) == HAS_GPU
    summary = trained("mnist_mlp", 8, 5, **small("mnist_mlp"), mixed_precision=half).summary
    peak = summary.get("memory/peak_allocated_mib", 0)
    assert (peak > 5) == HAS_GPU, peak  # the MLP's weights, gradients and AdamW's state take more
