"""Which run `--resume` means, and whether this command may go on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.directory import read_status
from common.errors import UserError, is_main_rank

if TYPE_CHECKING:
    from common.config import TrainingConfig

ConfigType = TypeVar("ConfigType", bound="TrainingConfig")

# What a resumed run may change: none of it changes what the model learns.
FREE = {
    *("config", "resume", "output_dir", "run_name", "project", "tags", "tracker"),
    *("group", "notes", "log_model", "profile"),
    *("target_accuracy", "num_workers", "data_placement", "collective_timeout"),
    *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
    *("batch_size", "gradient_accumulation_steps"),  # together they keep the effective batch
}


def resumed_config(
    parse: Callable[[ConfigType | None], ConfigType],
    asked: str,
    output_dir: str | None,
    recipe: str,
) -> ConfigType:
    """Return the configuration of the run to go on with, or a fresh one where there is none.

    Its ``resume`` is the run's directory, or the checkpoint that was named, and its
    ``output_dir`` the run's directory; for a fresh run ``resume`` is None.

    Args:
        parse: reads the command line over the given defaults.
        asked: the value of `--resume`: ``auto``, a run or a checkpoint.
        output_dir: the value of `--output-dir`.
        recipe: the name of the script.
    Raises:
        UserError: when there is no such run, it is another recipe's, or flags contradict it.
        SystemExit: with status 0, when the run is finished.
    """
    fresh = None
    if asked != "auto":
        directory = run_of(Path(asked))
        if output_dir is not None and Path(output_dir).resolve() != directory.resolve():
            raise UserError(f"--resume {asked} goes on in {directory}: leave --output-dir out")
    elif output_dir is not None and (Path(output_dir) / "config.json").exists():
        directory = Path(output_dir)
    else:
        fresh = parse(None)
        found = None if output_dir is not None else newest_unfinished(fresh, recipe)
        if found is None:
            return replace(fresh, resume=None)
        directory = found
    saved = read_json(directory / "config.json")
    if saved.get("recipe") != recipe:
        raise UserError(f"{directory} is a run of {saved.get('recipe')}, and this is {recipe}")
    if is_finished(directory):
        if is_main_rank():
            print(f"{directory} is finished: nothing to resume; its summary.json has the figures")
        raise SystemExit(0)
    config_class = type(fresh or parse(None))
    known = {field.name for field in fields(config_class)}
    resolved = from_json({n: v for n, v in saved["config"].items() if n in known})
    given = from_json({n: v for n, v in saved["given"].items() if n in known})
    defaults = config_class(**resolved)
    config = fresh or parse(defaults)
    contradictions = [
        f"--{name.replace('_', '-')} {getattr(config, name)} (the run has {resolved[name]})"
        for name in sorted(resolved.keys() - FREE)
        if getattr(config, name) not in (resolved[name], given[name])
    ]
    if contradictions:
        raise UserError(
            f"can't resume {directory} with {', '.join(contradictions)}: leave the flag out, or "
            "start another run"
        )
    kept = {name: value for name, value in resolved.items() if name not in FREE}
    config = replace(config, **kept, output_dir=str(directory))
    config.resume = str(directory if asked == "auto" else Path(asked))
    return keep_effective_batch(config, saved)


def run_of(path: Path) -> Path:
    """Return the directory of a run, given it or one of its checkpoints."""
    for directory in (path, path.parent.parent):
        if path.is_dir() and (directory / "config.json").is_file():
            return directory
    raise UserError(f"--resume {path} is neither a run's directory nor one of its checkpoints")


def newest_unfinished(config: TrainingConfig, recipe: str) -> Path | None:
    """Return the newest run under runs/ of the same recipe and flags that did not finish."""
    for path in sorted(Path("runs").glob("*/config.json"), key=os.path.getmtime, reverse=True):
        try:
            saved = read_json(path)
            given = from_json(saved["given"])
        except (UserError, KeyError, AttributeError):
            continue
        same = all(getattr(config, n, None) == v for n, v in given.items() if n not in FREE)
        if saved.get("recipe") == recipe and same and not is_finished(path.parent):
            return path.parent
    return None


def is_finished(directory: Path) -> bool:
    """Whether `status.json` says that a run finished; a kill may have kept it from being there."""
    return read_status(directory).get("status") == "finished"


def keep_effective_batch(config: ConfigType, saved: dict[str, Any]) -> ConfigType:
    """Set the accumulation so that an update has as many samples as before.

    Raises:
        UserError: when this number of processes can't give the same effective batch.
    """
    effective = saved["environment"]["effective_batch_size"]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    flags = (config.batch_size, config.gradient_accumulation_steps)
    before = (saved["config"]["batch_size"], saved["config"]["gradient_accumulation_steps"])
    if flags == before and effective % (config.batch_size * processes) == 0:
        accumulation = effective // (config.batch_size * processes)
        config = replace(config, gradient_accumulation_steps=accumulation)
    product = config.batch_size * config.gradient_accumulation_steps * processes
    if product != effective:
        raise UserError(
            f"the run has an effective batch of {effective}, and {config.batch_size} × "
            f"{config.gradient_accumulation_steps} accumulated × {processes} processes is "
            f"{product}: choose --batch-size and --gradient-accumulation-steps to make {effective}"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} is missing or damaged: it can't be resumed") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what a recipe wrote")
    return value


def from_json(values: dict[str, Any]) -> dict[str, Any]:
    """Turn JSON's lists back into the tuples that configurations have."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
