"""What others read again of a run's files: facts, status and rows, each of the type it had."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typeguard import TypeCheckError, check_type

from common.errors import UserError
from common.files import read_lines
from common.flags import EVERY_ITEM
from common.objective import Objective
from common.track.names import STEP

# What is read of `status.json` and of `config.json`, which hold more.
STATUS = {"status": str, "reason": str | None}
FACTS = {
    "recipe": str,
    "objective": str,
    "config": dict[str, Any],
    "environment": {
        "device": str,
        "device_type": str,
        "world_size": int,
        "mixed_precision": str,
        "effective_batch_size": int,
        "threads_per_process": int,
        "tf32": bool,
        "python": str,
        "versions": dict[str, str],
        "git_commit": str | None,
    },
    "data": {"name": str, "sizes": dict[str, int]},
    "architecture": {"name": str, "parameters": int},
    "plan": {"total_steps": int},
}
GROUPS = {*FACTS, "memory_plan", "peak"} - {"config"}  # at W&B, what is none of these is a flag
TOO_LARGE = 1e100  # for a chart


def checked(value: Any, kinds: Mapping[str, Any], source: str) -> Any:
    """Return what a file held if it has all of `kinds`, each name with a type or more such names.

    A `UserError` names what `source` lacks or has of another type, at any depth.
    """
    for name, kind in kinds.items():
        wrong = ""
        if not isinstance(value, dict) or name not in value:
            wrong = f"it lacks {name}"
        elif isinstance(kind, Mapping):
            checked(value[name], kind, f"{source}, {name},")
        else:
            try:
                check_type(value[name], kind, collection_check_strategy=EVERY_ITEM)
            except TypeCheckError:
                wrong = f"{name} is {reprlib.repr(value[name])}"
        if wrong:
            raise UserError(f"{source} is not what a recipe wrote: {wrong}")
    return value


def checked_facts(value: Any, source: str) -> dict[str, Any]:
    facts = checked(value, FACTS, source)
    try:
        Objective.parse(facts["objective"])
    except UserError as problem:
        raise UserError(f"{source} is not what a recipe wrote: {problem.message}") from None
    return facts


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return those of some values that are numbers, and not NaN."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < TOO_LARGE
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a run's `metrics.jsonl`; none where there is no such file."""
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if STEP not in numbers(row):
            raise UserError(f"{path}, line {number}, is not what a recipe wrote: it lacks {STEP}")
    return rows


def precision_name(facts: Mapping[str, Any]) -> str:
    precision = facts["environment"]["mixed_precision"]
    return "fp32" if precision == "no" else precision


def flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's facts with its flags at top level, beside the groups, for W&B's table."""
    return {**facts["config"], **{name: facts[name] for name in GROUPS if name in facts}}


def unflat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that `flat` was given, without what it leaves out."""
    groups = {name: config[name] for name in GROUPS if name in config}
    return {"config": {n: v for n, v in config.items() if n not in GROUPS}, **groups}
