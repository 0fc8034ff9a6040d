"""Runs of several processes, each with a simulated device.

The device's collectives refuse tensors of the host.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import Launcher, Runner
from tests.simulated.runs import LIKE_APPLE, on_device

pytestmark = pytest.mark.slow


# FSDP2 needs streams.
@pytest.mark.parametrize(("launcher", "variant"), [("two forks", LIKE_APPLE), ("two shards", "")])
def test_two_processes_make_the_updates_of_one(
    launcher: Launcher, variant: str, runner: Runner, odd_images: Path
) -> None:
    """Two processes with DDP or FSDP2 make the updates of one.

    Each collective therefore got tensors of the device.
    """
    flags: tuple[object, ...] = (
        *("--dataset", odd_images, "--hidden-sizes", 64, 48, "--max-steps", 6, "--dropout", 0),
        *("--mixed-precision", "no", "--tracker", "none", "--log-every", 1),
    )
    words = (*flags, "--batch-size", 8)
    on_two = on_device(runner, "mnist_mlp", *words, variant=variant, launcher=launcher)
    assert on_two.config["environment"]["world_size"] == 2
    sharding = "FSDP2" if launcher == "two shards" else "no"
    assert on_two.config["environment"]["sharding"] == sharding
    on_one = runner.shared("mnist_mlp", *flags, "--batch-size", 16)
    assert on_two.series("train/loss") == pytest.approx(on_one.series("train/loss"), rel=2e-3)
    assert on_two.summary["test/loss"] == pytest.approx(on_one.summary["test/loss"], rel=2e-3)
