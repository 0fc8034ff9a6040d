"""The sweep for W&B's own agent, as far as an account is not needed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from common.config import parse_config
from tests.launch import REPOSITORY

SWEEP = yaml.safe_load((REPOSITORY / "sweep.yaml").read_text())


def test_recipe_accepts_the_sweeps_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that W&B's agent builds is valid at both ends of each range."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    assert (REPOSITORY / SWEEP["program"]).is_file()
    config_class = import_module(f"recipes.{Path(SWEEP['program']).stem}").Config
    for least in (True, False):
        values = {}
        for name, parameter in SWEEP["parameters"].items():
            ends = [parameter[key] for key in ("min", "value", "max") if key in parameter]
            choices = parameter.get("values") or ends
            values[name] = {"value": choices[0 if least else -1]}
        parts = create_sweep_command_args({"args": values})
        replaced = {"${env}": ["/usr/bin/env"], "${program}": [SWEEP["program"]]}
        replaced |= {f"${{{name}}}": words for name, words in parts.items()}
        command = [
            word
            for part in create_sweep_command(SWEEP["command"])
            for word in replaced.get(part, [part])
        ]
        assert command[:4] == ["/usr/bin/env", "accelerate", "launch", SWEEP["program"]]
        monkeypatch.setattr(sys, "argv", command[3:])
        config = parse_config(config_class)
        for name, value in values.items():
            assert getattr(config, name.replace("-", "_")) == value["value"]


def test_sweep_chooses_by_validation_data() -> None:
    """The sweep's metric exists only for validation data."""
    assert SWEEP["metric"] == {"name": "val/best_accuracy", "goal": "maximize"}
    assert SWEEP["parameters"]["validation-share"] == {"value": 0.1}
    assert SWEEP["project"] == "accelerate-recipes"
