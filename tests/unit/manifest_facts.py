"""The facts of a run in a manifest, for tests that care about few of them."""

from __future__ import annotations

import copy
from typing import Any

from common.run_directory.records import RunIdentity
from common.storage.json_files import json_safe

FACTS: dict[str, Any] = {
    "run_id": "0123456789abcdef",
    "recipe": "tiny",
    "model": "MLP",
    "objective": "accuracy:max",
    "flags": {},
    "parts_described": {},
    "global_sample_index": 0,
    "data": {"name": "tiny", "sizes": {"train": 8, "test": 4}, "class_names": None},
    "effective_batch_size": 64,
    "world_size": 1,
    "mixed_precision": "no",
    "versions": {"torch": "2"},
}


def facts_at(step: int, **changes: Any) -> dict[str, Any]:
    """Return the facts of a run at an update, with changed entries."""
    return {**copy.deepcopy(FACTS), "global_step": step, **changes}


def identity_at(step: int, **changes: Any) -> RunIdentity:
    """Return these facts as a record."""
    return RunIdentity.model_validate(json_safe(facts_at(step, **changes)))
