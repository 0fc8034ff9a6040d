"""Which run `--resume` means, and whether this command may go on with it."""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.console import say
from common.directory import INITIAL, LOCK, read_status
from common.errors import UserError
from common.files import locked, read_json
from common.flags import from_json, role_of, spelled
from common.machine import world_size

MOST_FLAGS = 5  # flags that one message lists


class SavedRun(NamedTuple):
    """The flags of a run that `config.json` holds."""

    resolved: dict[str, Any]  # with the values that `auto` chose
    stated: dict[str, Any]  # as the command line had them
    effective_batch_size: int


def resumed_config(
    config_class: type,
    parse: Callable[[Any], Any],
    resume: str,
    output_dir: str | None,
    recipe: str,
) -> Any:
    """Return the configuration of the run to go on with, or a new one if there is none.

    Args:
        parse: reads the command line; its argument holds the defaults, None for those of the class.
        resume: the value of `--resume`. In the configuration of a new run it becomes None.

    Raises:
        UserError: there is no such run, it belongs to another recipe, or flags contradict it.
        SystemExit: with status 0, if the run is finished.
    """
    directory: Path | None
    if resume != "auto":
        directory = run_of(Path(resume), output_dir)
    elif output_dir is None:
        directory = newest_unfinished(parse(None), recipe)
    else:
        directory = Path(output_dir) if os.path.exists(Path(output_dir, "config.json")) else None
    if directory is None:
        if output_dir is None:
            say(f"--resume auto: runs/ has no unfinished run of {recipe}: a new one begins")
        return replace(parse(None), resume=None)
    run = read_run(directory, config_class, recipe)
    if is_finished(directory):
        say_finished(directory)
        raise SystemExit(0)
    defaults = config_class(**run.resolved)
    config = parse(defaults)
    fixed_flags = {
        name: value for name, value in run.resolved.items() if not role_of(config_class, name).free
    }
    contradictions = [
        f"{spelled(name)} {getattr(config, name)} (the run has {value})"
        for name, value in sorted(fixed_flags.items())
        if getattr(config, name) not in (value, run.stated[name], "auto")
    ]
    if contradictions:
        raise UserError(
            f"can't resume {directory} with {', '.join(contradictions)}: leave the flag out, or "
            "start another run"
        )
    fixed_flags["resume"] = str(directory if resume == "auto" else Path(resume))
    config = replace(config, **fixed_flags, output_dir=str(directory))
    return keep_effective_batch(config, defaults, run.effective_batch_size)


def say_finished(directory: Path) -> None:
    say(f"{directory} is finished: nothing to resume; its summary.json has the figures")


def was_finished_meanwhile(config: Any, recipe: str) -> bool:
    """Return whether the run to go on with is finished, once no other job can write to it.

    Since `resumed_config` read the run, another job may have finished or replaced it.

    Raises:
        UserError: the directory now holds another run than the one `config` was read for.
    """
    directory = Path(config.output_dir)
    run = read_run(directory, type(config), recipe)
    if is_finished(directory):
        say_finished(directory)
        return True
    changes = [
        f"{spelled(name)} {value}, which was {getattr(config, name)}"
        for name, value in sorted(run.resolved.items())
        if not role_of(type(config), name).free and value not in (getattr(config, name), "auto")
    ]
    effective = config.batch_size * config.gradient_accumulation_steps * world_size()
    if effective != run.effective_batch_size:
        changes.append(f"an effective batch of {run.effective_batch_size}, which was {effective}")
    if changes:
        raise UserError(
            f"{directory} became another run while this command waited for it: it has "
            f"{listed(changes)}: give the command again",
            resumable=True,
        )
    return False


def run_of(path: Path, output_dir: str | None) -> Path:
    """Return the directory of the run at a path, or of the run whose checkpoint is there.

    Raises:
        UserError: there is neither, or the run lies in another place than `output_dir`.
    """
    for directory in (path, path.parent.parent):
        if os.path.isdir(path) and os.path.isfile(directory / "config.json"):
            real_path = os.path.realpath(directory)
            if output_dir is not None and os.path.realpath(output_dir) != real_path:
                raise UserError(f"--resume {path} goes on in {directory}: leave --output-dir out")
            return directory
    raise UserError(f"--resume {path} is neither a run's directory nor one of its checkpoints")


def newest_unfinished(config: Any, recipe: str) -> Path | None:
    """Return the newest run in `runs/` that is unfinished and was started with the same flags.

    Raises:
        UserError: the only unfinished runs were started with other flags. If the command has lost a
            flag, it would otherwise start a new run unnoticed.
    """
    others: list[tuple[Path, list[str]]] = []
    for path in sorted(Path("runs").glob("*/config.json"), key=os.path.getmtime, reverse=True):
        directory = path.parent
        with contextlib.suppress(UserError):  # a run of another recipe, or a damaged one
            run = read_run(directory, type(config), recipe)
            if not is_finished(directory):
                differences = differing_flags(config, run.stated)
                if not differences:
                    return directory
                others.append((directory, differences))
    for directory, differences in others:
        if may_be_gone_on_with(directory):
            raise UserError(
                f"--resume auto: {directory} is unfinished and has other flags: "
                f"{listed(differences)}: go on with it by --resume {directory}, give the flags "
                "that it was started with, or begin another run by --output-dir or by removing it"
            )
    return None


def differing_flags(config: Any, stated_values: dict[str, Any]) -> list[str]:
    """Describe each flag that can't change on a resume and was stated otherwise for a run."""
    return [
        f"{spelled(name)} {value} there and {getattr(config, name)} here"
        for name, value in sorted(stated_values.items())
        if not role_of(type(config), name).free and getattr(config, name) != value
    ]


def may_be_gone_on_with(directory: Path) -> bool:
    """Return whether an unfinished run stopped early and does not run now."""
    if read_status(directory).get("status") == "failed" and (directory / "summary.json").exists():
        return False  # it was trained to its end and missed its --target
    with contextlib.suppress(UserError), locked(directory / LOCK, patience=0):
        return True
    return False


def listed(differences: list[str]) -> str:
    """Join differences into a phrase that is short enough for a message."""
    texts = [text if len(text) < 200 else f"{text[:200]}…" for text in differences[:MOST_FLAGS]]
    phrase = ", ".join(texts)
    more = len(differences) - MOST_FLAGS
    return f"{phrase}, and {more} more" if more > 0 else phrase


def read_run(directory: Path, config_class: type, recipe: str) -> SavedRun:
    """Read those flags of a run that this version of the recipe has.

    Raises:
        UserError: the run belongs to another recipe, or its `config.json` can't be read.
    """
    path = directory / "config.json"
    saved = read_json(path)
    recipe_of_run = saved.get("recipe")
    if recipe_of_run != recipe:
        raise UserError(f"{directory} is a run of {recipe_of_run!s:.50}, and this is {recipe}")
    config = dict_in(saved, "config")
    stated_values = dict_in(saved, "given")
    environment = dict_in(saved, "environment")
    effective = environment.get("effective_batch_size")
    has_flags = bool(config and stated_values)
    has_valid_wandb_id = isinstance(saved.get("wandb_run_id", ""), str)
    is_whole = has_flags and has_valid_wandb_id
    if not is_whole or not isinstance(effective, int) or effective < 1:
        raise UserError(f"{path} is damaged, and the run can't be resumed")
    # A resumed run keeps the precision that `auto` chose, and its own copy of the initial weights.
    config = config | {"mixed_precision": environment.get("mixed_precision")}
    if os.path.isdir(directory / INITIAL):
        config["init_from"] = str(directory / INITIAL)
    resolved = from_json(config_class, known_flags(config_class, config), str(path))
    stated = from_json(config_class, known_flags(config_class, stated_values), str(path))
    return SavedRun(resolved, resolved | stated, effective)


def dict_in(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the dict of this name; an empty one if it is missing or no dict."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def known_flags(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the flags that a class has."""
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in values.items() if name in names}


def is_finished(directory: Path) -> bool:
    return read_status(directory).get("status") == "finished"


def keep_effective_batch(config: Any, defaults: Any, effective: int) -> Any:
    """Set the accumulation so that an update still has `effective` samples.

    Raises:
        UserError: the flags or the number of processes do not allow that.
    """
    processes = world_size()
    batch_size = config.batch_size
    accumulation = config.gradient_accumulation_steps
    stated = config.effective_batch_size
    if stated not in (None, effective):
        raise UserError(
            f"the run's effective batch is {effective}, and not {stated}: leave the flag out, or "
            "start another run"
        )
    is_batch_size_kept = batch_size == defaults.batch_size
    is_accumulation_kept = accumulation == defaults.gradient_accumulation_steps
    if stated or (is_batch_size_kept and is_accumulation_kept):
        return accumulated(config, effective)
    product = batch_size * accumulation * processes
    if product != effective:
        raise UserError(
            f"the run has an effective batch of {effective}, and {batch_size} × {accumulation} "
            f"accumulated × {processes} processes is {product}: choose --batch-size and "
            f"--gradient-accumulation-steps to make {effective}"
        )
    return config


def accumulated(config: Any, effective: int) -> Any:
    """Set the accumulation so that an update has `effective` samples.

    Raises:
        UserError: no number of batches makes `effective` samples.
    """
    processes = world_size()
    batch_size = config.batch_size
    # A batch size below 1 is refused elsewhere, by its limits.
    if batch_size < 1 or effective % (batch_size * processes) == 0:
        accumulation = effective // max(1, batch_size * processes)
        return replace(config, gradient_accumulation_steps=accumulation)
    if effective % processes:
        advice = f"start as many processes as divide {effective}"
    else:
        advice = f"pass --batch-size {nearest_divisor(effective // processes, batch_size)}"
    raise UserError(
        f"an effective batch of {effective} can't be accumulated of {batch_size} × {processes} "
        f"processes: {advice}"
    )


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` whose ratio to `target` is closest to 1."""
    candidates = range(1, min(2 * target, number) + 1)
    divisors = [candidate for candidate in candidates if number % candidate == 0]
    return min(divisors, key=lambda divisor: abs(math.log(divisor / target)), default=1)
