"""Find a data set: on the Hub, in a local folder or built in."""

import contextlib
import os
import platform
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator

from common.agreement import ask_rank_zero
from common.data.evaluated import (
    Evaluated,
    is_same_place,
    own_configuration,
    read_evaluated,
)
from common.data.local_files import TABLE_SUFFIXES, find_files, identify
from common.errors import UserError
from common.files import digest_of, reading

# Short names of public data sets: Hub id and configuration.
PUBLIC = {
    "mnist": ("ylecun/mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "sst2": ("nyu-mll/glue", "sst2"),
    "mrpc": ("nyu-mll/glue", "mrpc"),
}
BUILT_IN = ("digits", "docstrings", "synthetic")


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from, known before any of it is read."""

    name: str  # short name, as the recipes' tables know it
    location: str  # Hub id, absolute folder or file, or the built-in name
    configuration: str | None
    reason: str  # why this one, for the person at the terminal
    fingerprint: str  # changes when the data do
    validation_share: float | None = None  # of train, held out where there is no validation split
    streaming: bool = False  # read while training
    is_whole: bool = False  # one split alone is read, nothing held out: no run trained on it
    evaluated: Evaluated | None = None  # the model, where nothing is trained


def choose_source(
    config: Any, accelerator: Accelerator, *, public: str, built_in: str, public_on_cpu: bool
) -> DataSource:
    """Resolve `--dataset`; a data set that is named is never replaced by another.

    ``auto`` is `public` where it can be had, on a CPU only if `public_on_cpu`; else `built_in`.
    """

    configuration = own_configuration(config)

    def choose() -> DataSource:
        if config.dataset != "auto":
            return find_named(config.dataset, configuration)
        if accelerator.device.type == "cpu" and not public_on_cpu:
            return built_in_source(built_in, f"auto: {public} would take hours without a GPU")
        location, known = PUBLIC[public]
        if commit := hub_commit(location):
            return DataSource(public, location, known, "auto: from the Hub", commit)
        reason = f"auto: {public} is not cached, the Hub does not answer"
        return built_in_source(built_in, reason)

    source = ask_rank_zero(choose)
    if config.streaming and source.location in BUILT_IN:
        raise UserError(f"--streaming: data set {source.name} is built in: leave the flag out")
    source = replace(source, validation_share=config.validation_share, streaming=config.streaming)
    return for_evaluation(source, config.init_from) if config.evaluate_only else source


def for_evaluation(source: DataSource, model: str) -> DataSource:
    """Return a data set as it is read to evaluate a model: whole, or what a run held out of it.

    Raises:
        UserError: it would hold out another share than the run that trained on it.
    """
    evaluated = read_evaluated(model)
    for trained in evaluated.trained_on:
        location, known = PUBLIC.get(trained.dataset, (trained.dataset, None))
        place = replace(trained, dataset=location, configuration=trained.configuration or known)
        if not is_same_place(place, source.location, source.configuration):
            continue
        if source.validation_share not in (None, trained.validation_share):
            was = trained.validation_share
            share = "the default share" if was is None else f"--validation-share {was:g}"
            raise UserError(
                f"--validation-share {source.validation_share:g}: {trained.run} trained on this "
                f"data set with {share}, and its training samples would be evaluated: leave the "
                "flag out"
            )
        return replace(
            source,
            validation_share=trained.validation_share,
            evaluated=replace(evaluated, trained_on=(trained,)),
        )
    return replace(source, is_whole=True, validation_share=None, evaluated=evaluated)


def built_in_source(name: str, reason: str) -> DataSource:
    version = platform.python_version() if name == "docstrings" else "1"
    return DataSource(name, name, None, reason, f"{name}-5-{version}")


def find_named(name: str, configuration: str | None) -> DataSource:
    """Find a data set by its name, folder, file or Hub id; a `UserError` says what to pass."""
    if name in BUILT_IN:
        return built_in_source(name, "named, built in")
    if "://" in name or not name:  # not repeated in the message: it may hold a token
        raise UserError("--dataset takes a name, a Hub id, a local folder or file, and no address")
    with reading(f"--dataset {name}"):
        source = find_local(name, configuration)
    if source is not None:
        return source
    location, known = PUBLIC.get(name, (name, None))
    if commit := hub_commit(location):
        return DataSource(name, location, configuration or known, "named, from the Hub", commit)
    suggestion = similar_name(name)
    meant = "" if suggestion is None else f"Did you mean {suggestion}? "
    raise UserError(
        f"--dataset {name} can't be had: there is no such folder or file, it is not cached, and "
        f"the Hub has no {location} or does not answer. {meant}Pass a local folder or file, or one "
        f"that is built in: {', '.join(BUILT_IN)}"
    )


def find_local(name: str, configuration: str | None) -> DataSource | None:
    """Return the data set of a local folder or file; None where there is no such path."""
    path = Path(name).expanduser().resolve()
    if not path.exists():
        return None
    is_folder = path.is_dir()
    if not is_folder and not (path.is_file() and path.suffix.lower() in TABLE_SUFFIXES):
        kinds = ", ".join(TABLE_SUFFIXES)
        raise UserError(
            f"--dataset {name} is a file of no kind that is read: pass one of {kinds}, or the "
            "folder that holds it"
        )
    if re.search(r"[*?[\n]|::", str(path)):  # patterns to `datasets`
        raise UserError(f"--dataset {name!r}: no * ? [ :: or new line in its path: rename it")
    if is_folder:
        digest = short_digest(listing(path))
        short_name = path.name.lower()
        return DataSource(short_name, str(path), configuration, "named, a local folder", digest)
    digest = short_digest(identify({str(path): path.stat()}))
    return DataSource(path.stem.lower(), str(path), None, "named, a local file", digest)


def similar_name(name: str) -> str | None:
    """Return a name like one that could not be had, which was perhaps meant."""
    if name in PUBLIC:
        return None
    beside = Path(name).expanduser().parent
    paths = [str(path) for path in beside.glob("*/")]
    paths += [str(path) for suffix in TABLE_SUFFIXES for path in beside.glob(f"*{suffix}")]
    names = {candidate.lower(): candidate for candidate in (*paths, *PUBLIC, *BUILT_IN)}
    matches = get_close_matches(name.lower(), names, 1)
    return names[matches[0]] if matches else None


def listing(folder: Path) -> list[list[Any]]:
    """Return what identifies the files under a folder, sorted; an `OSError` where it can't."""
    return identify(find_files(folder).files)


def hub_commit(hub_id: str, kind: Literal["datasets", "models"] = "datasets") -> str | None:
    """Return the commit of a Hub repository: from the Hub within 3 s, else from the local cache."""
    from huggingface_hub import HfApi, constants

    with contextlib.suppress(Exception):  # where it is out of reach, what the cache has will do
        return HfApi().repo_info(hub_id, repo_type=kind.removesuffix("s"), timeout=3).sha
    folder = f"{kind}--{hub_id.replace('/', '--')}"
    reference = Path(constants.HF_HUB_CACHE, folder, "refs", "main")
    return reference.read_text(encoding="utf-8").strip() if os.path.isfile(reference) else None


def short_digest(value: Any) -> str:
    return digest_of(value)[:16]
