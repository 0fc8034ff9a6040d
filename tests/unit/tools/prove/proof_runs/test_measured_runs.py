"""The flags of the runs that measure memory and speed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from common.command_line.parsing import parse_config
from common.tools.prove.proof_runs.bench import RunSpec
from common.tools.prove.proof_runs.measured_runs import MIN_UPDATES, eventful_run
from examples.averaged import Config


def test_eventful_run_of_a_recipe_that_stops_early_makes_all_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`examples/averaged.py` stops early by default."""
    specs: list[RunSpec] = []

    class Bench:
        def run(self, spec: RunSpec) -> None:
            specs.append(spec)

    bench: Any = Bench()
    eventful_run(bench)
    assert Config().early_stopping is not None
    monkeypatch.setattr(sys, "argv", ["averaged.py", *specs[0].flags])
    config = parse_config(Config, "")
    assert config.early_stopping is None
    assert config.max_steps == MIN_UPDATES
