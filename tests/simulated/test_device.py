"""The simulated device itself: what it can do, and what it lacks."""

from __future__ import annotations

from tests.launch import Runner
from tests.simulated.runs import LAUNCH


def test_behaviour(runner: Runner) -> None:
    """Each check of `behaviour.py`, in a process of its own: torch can't forget a device."""
    words = ("fused=ignored", "-", "tests.simulated.behaviour")
    finished = runner.run(LAUNCH, *words, output_directory=False)
    assert len(finished.output.splitlines()) == 10
