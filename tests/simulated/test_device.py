"""The simulated device itself: what it can do, and what it lacks."""

from __future__ import annotations

from tests.launch import Runner
from tests.simulated.runs import LAUNCH


def test_behaviour(runner: Runner) -> None:
    """The device passes all checks of `behaviour.py`.

    They run in a process of their own, because torch can't remove a device from a process.
    """
    words = ("fused=ignored", "-", "tests.simulated.behaviour")
    finished = runner.run(LAUNCH, *words, output_directory=False)
    assert len(finished.output.splitlines()) == 10
