"""A complete `config.json`, for tests that care about few of its entries."""

from __future__ import annotations

import copy
from typing import Any

from common.run_directory.records import RunConfig

CONTENTS: dict[str, Any] = {
    "recipe": "tiny",
    "objective": "accuracy:max",
    "config": {
        "seed": 0,
        "evaluate_only": False,
        "effective_batch_size": None,
        "scale_learning_rate": "no",
        "learning_rate": 0.1,
    },
    "given": {"seed": 0},
    "environment": {
        "device": "an abacus",
        "device_type": "cpu",
        "processor": "an abacus, 2 rods",
        "world_size": 1,
        "mixed_precision": "no",
        "effective_batch_size": 64,
        "python": "3",
        "versions": {"torch": "2"},
        "git_commit": None,
    },
    "data": {"name": "digits", "sizes": {"train": 8, "test": 4}},
    "architecture": {"name": "MLP", "parameters": 12},
    "plan": {"total_steps": 9, "updates_per_epoch": 3, "log_every": 1, "eval_every": 3},
}


def contents_with(**changes: Any) -> dict[str, Any]:
    """Return the contents with changed entries; those of a group are merged into it."""
    contents = copy.deepcopy(CONTENTS)
    for name, value in changes.items():
        is_group = isinstance(value, dict) and name in contents
        contents[name] = contents[name] | value if is_group else value
    return contents


def saved_config(**changes: Any) -> RunConfig:
    """Return the record of `contents_with(**changes)`."""
    return RunConfig(**contents_with(**changes))
