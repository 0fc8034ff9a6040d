"""What is made of a data set once, kept for later runs: whole and as it was, or made again."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.data.sources import DataSource, short_digest
from common.errors import UserError
from common.files import locked, read_json, receipt_of, replacing, signed, write_json, writing

FACTS = "facts.json"  # what was prepared, and the SHA-256 of each file
SEEN = "seen.json"  # the files' stamps when their digests were last compared
ADVICE = "make room, or let XDG_CACHE_HOME name a folder elsewhere"


def cached(
    source: DataSource,
    prepare: Callable[..., dict[str, Any]],
    version: str,
    names: tuple[str, ...],
    settings: dict[str, Any],
) -> tuple[Path, dict[str, Any], dict[str, list[Any]]]:
    """Return what `prepare`, in some version, makes of a data set with some settings.

    A folder, facts, and the arrays of each split, memory-mapped and read-only.

    It takes the source, a folder and the settings by name, writes SPLIT_NAME.npy there for each of
    `names`, or SPLIT_groups.npy of what is streamed, and returns facts, with a list of the splits.
    Of several processes one prepares, or looks for damage, and the others wait on a file lock, for
    as long as it takes: a barrier would time out.
    """
    if source.streaming:
        version, names = f"rows-2-{version}", ("groups",)
    folder = cache_folder(source, kind=version, **settings)
    with writing(f"the cache {folder}", ADVICE):
        if not was_seen(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(Path(f"{folder}.lock")):
                if not was_seen(folder) and (reason := damage(folder)):
                    if folder.exists():
                        print(f"the cache {folder} is made again: {reason}", flush=True)
                    make(folder, partial(prepare, source, **settings))
        facts = read_json(folder / FACTS)
        arrays = {
            split: [np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in names]
            for split in facts.pop("splits")
        }
    files = {name: one for name, one in facts.pop("files").items() if name.endswith(".npy")}
    del facts["sha256"]
    facts["fingerprint"] = short_digest(files)
    return folder, facts, arrays


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-recipes")
    if source.validation_share is not None:
        settings["validation_share"] = source.validation_share
    if source.is_whole:
        settings["is_whole"] = True
    place = source.fingerprint, source.location, source.configuration
    return root / f"{source.name[:80]}-{short_digest([*place, settings])}"


def stamps(folder: Path) -> dict[str, list[int]]:
    """Return what changes with each file: its times, size and inode.

    No program sets the time of a change of status (ctime) back, as it can that of a modification.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEEN)
    statuses = {str(path.relative_to(folder)): path.stat() for path in files}
    return {
        name: [status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino]
        for name, status in statuses.items()
    }


def was_seen(folder: Path) -> bool:
    """Whether all files of a cache have the stamps with which they were last seen to be whole."""
    with contextlib.suppress(UserError, OSError):
        return read_json(folder / SEEN) == stamps(folder)
    return False


def damage(folder: Path) -> str | None:
    """Return what is wrong with a cache, every byte of which is read; None of a whole one."""
    try:
        facts, before = read_json(folder / FACTS), stamps(folder)
        if facts != signed(facts):
            return f"{FACTS} has changed"
        for name, digest in facts["files"].items():
            if receipt_of(folder / name)["sha256"] != digest:
                return f"{name} has changed"
    except (UserError, OSError) as problem:
        return str(problem)
    remember(folder, before)
    return None


def remember(folder: Path, found: dict[str, list[int]]) -> None:
    with contextlib.suppress(UserError):  # where it can't be written, all is read each time
        write_json(folder / SEEN, found)


def make(folder: Path, prepare: Callable[[Path], dict[str, Any]]) -> None:
    """Put what `prepare` writes in the place of `folder`, with a digest of each file."""
    with replacing(folder) as unfinished:
        facts = prepare(unfinished)
        receipts = {name: receipt_of(unfinished / name) for name in stamps(unfinished)}
        facts["files"] = {name: receipt["sha256"] for name, receipt in receipts.items()}
        (unfinished / FACTS).write_text(json.dumps(signed(facts), indent=2), encoding="utf-8")
        remember(unfinished, stamps(unfinished))


def write_array(path: Path, parts: Iterable[np.ndarray], length: int) -> None:
    """Write an array of `length` rows, whose parts come one after the other, as a .npy file.

    Not through a memory map: where the disk is full, that ends the process.
    """
    with path.open("wb") as file:
        for part in map(np.ascontiguousarray, parts):
            if file.tell() == 0:
                shape = (length, *part.shape[1:])
                header = {"descr": part.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(part.data)
