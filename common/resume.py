"""Which run `--resume` means, and whether this command may go on with it."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from common.console import say
from common.directory import read_status
from common.errors import UserError
from common.files import read_json
from common.flags import from_json, role_of, spelled
from common.machine import world_size


def resumed_config(
    config_class: type, parse: Callable[[Any], Any], asked: str, output_dir: str | None, recipe: str
) -> Any:
    """Return the configuration of the run to go on with, or a fresh one where there is none.

    Its ``resume`` is the run's directory, or the checkpoint that was named, and its ``output_dir``
    the run's directory; for a fresh run ``resume`` is None. `parse` reads the command line over
    the given defaults.

    Raises:
        UserError: when there is no such run, it is another recipe's, or flags contradict it.
        SystemExit: with status 0, when the run is finished.
    """
    fresh = None
    if asked != "auto":
        named = Path(asked)
        runs = [run for run in (named, named.parent.parent) if os.path.isfile(run / "config.json")]
        if not os.path.isdir(named) or not runs:
            raise UserError(
                f"--resume {named} is neither a run's directory nor one of its checkpoints"
            )
        directory = runs[0]
        if output_dir is not None and Path(output_dir).resolve() != directory.resolve():
            raise UserError(f"--resume {asked} goes on in {directory}: leave --output-dir out")
    elif output_dir is not None and os.path.exists(Path(output_dir, "config.json")):
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
    if read_status(directory).get("status") == "finished":
        say(f"{directory} is finished: nothing to resume; its summary.json has the figures")
        raise SystemExit(0)
    resolved = flags_of(saved, "config", config_class, directory)
    given = resolved | flags_of(saved, "given", config_class, directory)
    defaults = config_class(**resolved)
    config = fresh or parse(defaults)
    fixed = sorted(name for name in resolved if not role_of(config_class, name).free)
    contradictions = [
        f"{spelled(name)} {getattr(config, name)} (the run has {resolved[name]})"
        for name in fixed
        if getattr(config, name) not in (resolved[name], given[name])
    ]
    if contradictions:
        advice = "leave the flag out, or start another run"
        raise UserError(f"can't resume {directory} with {', '.join(contradictions)}: {advice}")
    kept = {name: resolved[name] for name in fixed}
    kept["resume"] = str(directory if asked == "auto" else Path(asked))
    config = replace(config, **kept, output_dir=str(directory))
    return keep_effective_batch(config, defaults, saved)


def flags_of(
    saved: dict[str, Any], group: str, config_class: type, directory: Path
) -> dict[str, Any]:
    """Return the flags that a run's `config.json` has and this version of the recipe knows."""
    path, known = directory / "config.json", {field.name for field in fields(config_class)}
    values = saved.get(group)
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it has no {group!r}, and can't be resumed")
    return from_json(config_class, {n: v for n, v in values.items() if n in known}, str(path))


def newest_unfinished(config: Any, recipe: str) -> Path | None:
    for path in sorted(Path("runs").glob("*/config.json"), key=os.path.getmtime, reverse=True):
        try:
            saved = read_json(path)
            given = flags_of(saved, "given", type(config), path.parent)
        except UserError:
            continue
        fixed = [name for name in given if not role_of(type(config), name).free]
        same = all(getattr(config, name) == given[name] for name in fixed)
        finished = read_status(path.parent).get("status") == "finished"
        if saved.get("recipe") == recipe and same and not finished:
            return path.parent
    return None


def keep_effective_batch(config: Any, defaults: Any, saved: dict[str, Any]) -> Any:
    """Set the accumulation so that an update has as many samples as before, or refuse."""
    environment = saved.get("environment")
    effective = environment.get("effective_batch_size") if isinstance(environment, dict) else None
    if not isinstance(effective, int):
        raise UserError(f"{config.output_dir}/config.json is damaged: it has no environment")
    processes, batch = world_size(), config.batch_size
    accumulation = config.gradient_accumulation_steps
    before = (defaults.batch_size, defaults.gradient_accumulation_steps)
    if (batch, accumulation) == before and effective % (batch * processes) == 0:
        accumulation = effective // (batch * processes)
    if (product := batch * accumulation * processes) != effective:
        raise UserError(
            f"the run has an effective batch of {effective}, and {batch} × {accumulation} "
            f"accumulated × {processes} processes is {product}: choose --batch-size and "
            f"--gradient-accumulation-steps to make {effective}"
        )
    return replace(config, gradient_accumulation_steps=accumulation)
