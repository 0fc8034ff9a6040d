"""What is made of a data set once, kept for later runs: whole or not there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from common.data.sources import DataSource, digest_of
from common.files import read_json, write_json, writing


class Cached(NamedTuple):
    """What a cache holds of a data set."""

    folder: Path
    facts: dict[str, Any]
    arrays: dict[str, list[np.ndarray]]  # of each split, memory-mapped and read-only


def cached(
    source: DataSource,
    prepare: Callable[..., dict[str, Any]],
    version: str,
    names: tuple[str, ...],
    settings: dict[str, Any],
) -> Cached:
    """Return what `prepare`, in some version, makes of a data set with some settings.

    It takes the source, a folder and the settings by name, writes SPLIT_NAME.npy there for each of
    `names`, and returns facts, with a list of the splits. Of several processes one prepares and the
    others wait on a file lock, for as long as it takes: a barrier would time out. The folder
    appears by a rename, so it is whole or absent.
    """
    folder = cache_folder(source, kind=version, **settings)
    if not folder.is_dir():
        with writing(f"the cache {folder}", "let XDG_CACHE_HOME name another folder"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.is_dir():
                    unfinished = folder.with_name(folder.name + ".unfinished")
                    shutil.rmtree(unfinished, ignore_errors=True)
                    unfinished.mkdir()
                    write_json(unfinished / "facts.json", prepare(source, unfinished, **settings))
                    unfinished.rename(folder)
    facts = read_json(folder / "facts.json")
    arrays = {
        split: [np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in names]
        for split in facts.pop("splits")
    }
    return Cached(folder, facts, arrays)


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-recipes")
    if source.validation_share is not None:
        settings["validation_share"] = source.validation_share
    place = source.fingerprint, source.location, source.configuration
    return root / f"{source.name}-{digest_of([*place, settings])}"
