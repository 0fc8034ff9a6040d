"""How tests launch recipes and tools on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launch import REPOSITORY, Finished, Runner

LAUNCH = REPOSITORY / "tests" / "simulated" / "launch.py"
LIKE_APPLE = "fused=ignored,no-streams"  # no memory figures, no float64
LIKE_CUDA = "fused=honoured,memory-figures,float64,pinned-memory"


def script_of(recipe: str) -> Path:
    """Return a recipe's file."""
    return REPOSITORY / "recipes" / f"{recipe}.py"


def on_device(
    runner: Runner,
    script: str | Path,
    *flags: object,
    variant: str = "",
    report: Path | str = "-",
    **arguments: Any,
) -> Finished:
    """Run a recipe, another script or a module; `arguments` are those of `Runner.run`."""
    path = script_of(script) if isinstance(script, str) and "." not in script else script
    finished = runner.run(LAUNCH, variant or "fused=ignored", report, path, *flags, **arguments)
    if finished.directory.exists():
        assert finished.config["environment"]["device_type"] == "simulated"
    return finished


def waits(report: Path) -> dict[str, int]:
    """Return how often the host waited for the device, by reason."""
    return json.loads(report.read_text())["waits"]
