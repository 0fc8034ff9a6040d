"""The cache of prepared data: decoded images or tokenised text, made once and used by later runs.

The cache of one data set with one group of settings is a folder. It holds .npy files, other files
such as a tokenizer, and a JSON file of facts. A cache that has changed since it was written is made
again.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, NotRequired, TypedDict, TypeVar, cast

import numpy as np

from common.data.sources import DataSource
from common.digests import SIGNATURE, is_as_signed, sha256_of_file, short_digest, signed
from common.errors import UserError
from common.files import locked, replacing
from common.json_files import read_json, write_json
from common.sentences import writing

FACTS_JSON = "facts.json"  # what `prepare` returned, and the SHA-256 of each file
SEEN = "seen.json"  # the stamps of the files when their digests were last compared
DISK_ADVICE = (
    "free some space there, or set XDG_CACHE_HOME to a folder that has space and can be written"
)

Stamps = dict[str, list[int]]  # what changes with a file, by its path in the cache


class RowGroupIndex(TypedDict):
    """Where a streamed data set is read: the arguments of `ParquetRows` besides the row groups."""

    shards: list[str]  # paths or URLs of the parquet files
    classes: list[str | int | float | None]  # the value of each class in the label column
    columns: list[str]  # the label column comes last


class PreparedFacts(TypedDict):
    """What is known about a prepared data set; JSON in the cache."""

    class_names: list[str]
    notes: list[str]  # printed for the user
    held_out: int  # rows (streamed: row groups) of train that became the validation split
    splits: NotRequired[list[str]]  # their names, the keys of `Prepared.arrays`
    fingerprint: NotRequired[str]  # digest of the arrays; `cached` computes it, so no file has it
    evaluated: NotRequired[str]  # the only split, if it is evaluated as a whole
    index: NotRequired[RowGroupIndex]  # only for a streamed data set


FactsType = TypeVar("FactsType", bound=PreparedFacts)


class Prepared(NamedTuple, Generic[FactsType]):
    """A data set in the cache."""

    folder: Path
    facts: FactsType  # what `prepare` returned, and a fingerprint of the arrays
    arrays: dict[str, list[np.ndarray]]  # by split; memory-mapped and read-only


def cached(
    source: DataSource,
    prepare: Callable[..., FactsType],
    version: str,
    names: tuple[str, ...],
    settings: Mapping[str, object],
) -> Prepared[FactsType]:
    """Return a data set from the cache, and prepare it first if it is not there or is damaged.

    If several processes call this, one prepares the data, and the others wait on a file lock. They
    wait for as long as it takes; a barrier would time out.

    Args:
        prepare: is called with the source, a folder, and the settings by name. For each split and
            each name, it writes the array SPLIT_NAME.npy to the folder; for a streamed data set, it
            writes SPLIT_groups.npy alone. It returns facts for JSON, with a list "splits".
        version: changes when `prepare` does something else with the same settings.
        names: the names of the arrays of each split.

    Raises:
        UserError: the data can't be read, or the cache can't be written.
    """
    if source.streaming:
        # This number changes with the layout of the row groups.
        version = f"rows-2-{version}"
        names = ("groups",)
    # `cache_folder` hashes the keyword `kind` with its value. With another keyword, all caches
    # would be made again.
    folder = cache_folder(source, kind=version, **settings)
    with writing(f"the cache {folder}", DISK_ADVICE):
        ensure_cache(folder, partial(prepare, source, **settings))
        contents = read_json(folder / FACTS_JSON)
        arrays = {
            split: [np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in names]
            for split in contents.pop("splits")
        }
    digests = contents.pop("files")  # `make_cache` has added the digests and the signature
    del contents[SIGNATURE]
    array_digests = {name: digest for name, digest in digests.items() if name.endswith(".npy")}
    contents["fingerprint"] = short_digest(array_digests)
    # The rest is what `prepare` returned. `cast` is safe: the signature shows that no one has
    # edited the file.
    return Prepared(folder, cast(FactsType, contents), arrays)


def ensure_cache(folder: Path, fill: Callable[[Path], PreparedFacts]) -> None:
    """Make a cache if its folder is missing or damaged. One process makes it, and others wait.

    Args:
        fill: writes the data to a folder, and returns the facts about them.
    """
    if is_unchanged(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{folder}.lock")):
        # Another process may have prepared the data while this one waited for the lock. A folder
        # that does not exist counts as damaged.
        problem = None if is_unchanged(folder) else find_damage(folder)
        if problem is None:
            return
        if folder.exists():
            print(f"the cache {folder} is made again: {problem}", flush=True)
        make_cache(folder, fill)


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet.

    The folder's name depends on the data set's fingerprint and on all settings: changed data or
    other settings have another cache.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(cache_home, "accelerate-recipes")
    # These settings are added only where they have a value, so that other caches keep their names.
    if source.validation_share is not None:
        settings["validation_share"] = source.validation_share
    if source.is_whole:
        settings["is_whole"] = True
    digest = short_digest([source.fingerprint, source.location, source.configuration, settings])
    return root / f"{source.name[:80]}-{digest}"


def stamps_of(folder: Path) -> Stamps:
    """Return the times, the size and the inode of each file, from which a change can be seen.

    The times include that of the last change of status (ctime). Programs can set back the time of
    modification, but not the ctime.
    """
    stamps = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEEN:
            status = path.stat()
            stamps[str(path.relative_to(folder))] = [
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_size,
                status.st_ino,
            ]
    return stamps


def is_unchanged(folder: Path) -> bool:
    """Whether all files still have the stamps that they had when the cache was last found whole.

    This is fast, because no array is read. A cache without stamps counts as changed; `find_damage`
    then reads its files.
    """
    # If a file can't be read, the error is passed over, and the last line returns False.
    with contextlib.suppress(UserError, OSError):
        return read_json(folder / SEEN) == stamps_of(folder)
    return False


def find_damage(folder: Path) -> str | None:
    """Compare the digests of all files, and return what is wrong with the cache.

    If there is no damage, return None, and save the stamps, so that the next run need not read all
    files again.
    """
    try:
        facts = read_json(folder / FACTS_JSON)
        stamps = stamps_of(folder)  # before the files are read: they may change meanwhile
        if not is_as_signed(facts):
            return f"{FACTS_JSON} has changed"
        for name, digest in facts["files"].items():
            if sha256_of_file(folder / name) != digest:
                return f"{name} has changed"
    except UserError as error:
        return error.problem  # without advice, because the cache is made again
    except OSError as error:
        return str(error)
    save_stamps(folder, stamps)
    return None


def save_stamps(folder: Path, stamps: Stamps) -> None:
    """Save the stamps of a whole cache; where this is impossible, each run compares the digests."""
    with contextlib.suppress(UserError):
        write_json(folder / SEEN, stamps)


def make_cache(folder: Path, prepare: Callable[[Path], PreparedFacts]) -> None:
    """Have `prepare` fill a new folder, add the facts, and put it in the place of `folder`."""
    with replacing(folder) as unfinished:
        facts = prepare(unfinished)
        digests = {name: sha256_of_file(unfinished / name) for name in stamps_of(unfinished)}
        contents = {**facts, "files": digests}
        (unfinished / FACTS_JSON).write_text(
            json.dumps(signed(contents), indent=2), encoding="utf-8"
        )
        save_stamps(unfinished, stamps_of(unfinished))


def write_array(path: Path, parts: Iterable[np.ndarray], length: int) -> None:
    """Write an array to a .npy file part by part, so that it never has to fit into memory.

    The file is not memory-mapped, because a full disk would then kill the process instead of
    raising an `OSError`.

    Args:
        parts: at least one array; they are joined along the first axis.
        length: the number of rows of all parts together.
    """
    with path.open("wb") as file:
        for part in map(np.ascontiguousarray, parts):
            if file.tell() == 0:
                shape = (length, *part.shape[1:])
                header = {"descr": part.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(part.data)
