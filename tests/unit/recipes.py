"""Reading the recipes' command lines in the test's process."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from common.config import TrainingConfig, parse_config
from common.run_directory.directory import RunDirectory
from common.run_directory.identity import signed_config
from common.run_directory.taking import take_run_directory
from tests.unit.saved_config import contents_with

Parse = Callable[..., Any]


def config_class(recipe: str) -> type[TrainingConfig]:
    """Return the configuration of a recipe."""
    return import_module(f"recipes.{recipe}").Config


def parse(monkeypatch: pytest.MonkeyPatch, recipe: str, *flags: object) -> Any:
    """Read a command line as a recipe does."""
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *map(str, flags)])
    return parse_config(config_class(recipe), "What it does.")


def saved_contents(
    config: TrainingConfig,
    recipe: str = "mnist_mlp",
    *,
    given: TrainingConfig | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Return the contents of the `config.json` that a run writes at its start."""
    effective = config.batch_size * config.gradient_accumulation_steps * processes
    precision = "bf16" if config.mixed_precision == "auto" else config.mixed_precision
    facts = contents_with(
        recipe=recipe,
        run_id="0123456789abcdef",
        environment={"effective_batch_size": effective, "mixed_precision": precision},
    )
    facts["config"] = dataclasses.asdict(config)
    facts["given"] = dataclasses.asdict(given or config)
    return facts


def write_run(
    directory: Path,
    config: TrainingConfig,
    recipe: str = "mnist_mlp",
    *,
    given: TrainingConfig | None = None,
    status: str | None = "running",
    processes: int = 1,
) -> Path:
    """Write the files that a run leaves at its start, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = saved_contents(config, recipe, given=given, processes=processes)
    (directory / "config.json").write_text(json.dumps(signed_config(facts)))
    if status is not None:
        value = {"status": status, "resumable": True, "reason": None, "global_step": 7}
        (directory / "status.json").write_text(json.dumps(value))
    return directory


def resolved_config(**flags: Any) -> TrainingConfig:
    """Return flags of the MLP as a run of `write_run` has resolved them."""
    return config_class("mnist_mlp")(mixed_precision="no", **flags)


def take_directory(
    output_dir: str | Path | None,
    *,
    recipe: str = "mnist_mlp",
    resume: bool = False,
    timeout: float = 0,
) -> RunDirectory:
    """Take the directory of a run with the flags `resolved_config()`."""
    path = None if output_dir is None else str(output_dir)
    config = resolved_config(output_dir=path, resume=path if resume else None)
    return take_run_directory(config, recipe, timeout)


def status_of(directory: Path) -> dict[str, Any]:
    """Return a run's `status.json`."""
    return json.loads((directory / "status.json").read_text())


def kind_of(config: type[TrainingConfig], name: str) -> Any:
    """Return a flag's type, without None."""
    hint = get_type_hints(config)[name]
    if get_origin(hint) in (Literal, tuple):
        return hint
    members = [member for member in get_args(hint) if member is not type(None)]
    return members[0] if members else hint


def other_value(config: TrainingConfig, name: str) -> Any:
    """Return a valid value of a flag that differs from its current one."""
    value = getattr(config, name)
    flag_type = kind_of(type(config), name)
    if get_origin(flag_type) is Literal:
        return next(choice for choice in get_args(flag_type) if choice not in (value, "auto"))
    if get_origin(flag_type) is tuple:
        return (get_args(flag_type)[0](9),)
    if flag_type is bool:
        return not value
    if flag_type is int:
        return (value or 0) + 5
    if flag_type is str:
        return "other"
    return 0.25 if value == 0.5 else 0.5


def words(owner: type[TrainingConfig], name: str, value: Any) -> list[object]:
    """Return a flag and its value as they are on the command line."""
    spelled = name.replace("_", "-")
    if get_type_hints(owner)[name] is bool:  # one that may be None takes a value
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    return [f"--{spelled}", *(value if isinstance(value, tuple) else [value])]
