"""The cache of prepared data: decoded images or tokenised text, made once and used by later runs.

Each data set has one folder for each combination of settings. The folder holds .npy files, other
files such as a tokenizer, and a JSON file of facts. If its contents have changed since they were
written, the folder is made again.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, NotRequired, TypedDict, TypeVar, cast

import numpy as np

from common.data.prepared_data.row_groups import RowGroupIndex
from common.data.sources import DataSource
from common.errors import UserError
from common.failures.sentences import writing
from common.storage.digests import SIGNATURE, is_as_signed, sha256_of_file, short_digest, signed
from common.storage.files import locked, replacing
from common.storage.json_files import read_json, write_json

FACTS_JSON = "facts.json"  # what `prepare` returned, and the SHA-256 of each file
# The stamps of the files when their digests were last compared. As long as the stamps stay the
# same, the digests need not be compared again.
SEEN = "seen.json"
DISK_ADVICE = (
    "free some space there, or set XDG_CACHE_HOME to a folder that has space and can be written"
)

# Numbers that change whenever a file changes, by the file's path in the cache: see `stamps_of`.
Stamps = dict[str, list[int]]


class PreparedFacts(TypedDict):
    """The facts about a prepared data set, kept as JSON in the cache."""

    class_names: list[str]
    notes: list[str]  # printed for the user
    held_out: int  # rows (streamed: row groups) of train that became the validation split
    # The names of the splits. `cached` removes them, because `Prepared.arrays` has them as keys.
    splits: NotRequired[list[str]]
    # A digest of the arrays. `cached` adds it, so it is not in the cache's file.
    fingerprint: NotRequired[str]
    evaluated: NotRequired[str]  # the name of the only split, if it is evaluated as a whole
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
    array_names: tuple[str, ...],
    settings: Mapping[str, object],
) -> Prepared[FactsType]:
    """Return a data set from the cache; prepare it first if it is not there or is damaged.

    If several processes call this, one of them prepares the data, and the others wait for a file
    lock as long as it takes. A barrier would time out.

    Args:
        prepare: a function that gets the source, an empty folder, and the settings by name. It
            writes the array SPLIT_NAME.npy to the folder for each split and each of `array_names`.
            For a streamed data set, it writes only SPLIT_groups.npy for each split. It returns the
            facts about the data, with a list "splits".
        version: a text that changes when `prepare` makes other data with the same settings.
        array_names: the names of the arrays of each split; not used for a streamed data set.
        settings: the arguments of `prepare`, by name. JSON must be able to hold them.

    Raises:
        UserError: the data can't be read, or the cache can't be written.
    """
    if source.streaming:
        # Raise the 3 whenever the arrays of row groups get another layout, or `ParquetTables`
        # chooses other row groups or other classes from the same files.
        version = f"rows-3-{version}"
        array_names = ("groups",)
    # Keep the keyword `kind`: `cache_folder` hashes it with its value, so all caches would be made
    # again with another keyword.
    folder = cache_folder(source, kind=version, **settings)
    with writing(f"the cache {folder}", DISK_ADVICE):
        ensure_cache(folder, partial(prepare, source, **settings))
        contents = read_json(folder / FACTS_JSON)
        arrays = {
            split: load_arrays(folder, split, array_names) for split in contents.pop("splits")
        }
    # Remove the digests and the signature, which `make_cache` has added.
    digests = contents.pop("files")
    del contents[SIGNATURE]
    array_digests = {name: digest for name, digest in digests.items() if name.endswith(".npy")}
    contents["fingerprint"] = short_digest(array_digests)
    # The rest has the type that `prepare` returned: the signature shows that no one has edited the
    # file.
    return Prepared(folder, cast(FactsType, contents), arrays)


def load_arrays(folder: Path, split: str, array_names: Iterable[str]) -> list[np.ndarray]:
    """Return the arrays of a split, memory-mapped and read-only."""
    return [np.load(folder / f"{split}_{name}.npy", mmap_mode="r") for name in array_names]


def ensure_cache(folder: Path, fill: Callable[[Path], PreparedFacts]) -> None:
    """Make a cache if its folder is missing or damaged. One process makes it, and others wait.

    Args:
        fill: a function that writes the data to a folder, and returns the facts about them.
    """
    if is_unchanged(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_file = Path(f"{folder}.lock")
    with locked(lock_file, other_job=f"another process is preparing the cache {folder}"):
        # Look again, because another process may have prepared the data while this one waited for
        # the lock. A folder that does not exist counts as damaged.
        problem = None if is_unchanged(folder) else find_damage(folder)
        if problem is None:
            return
        if folder.exists():
            print(f"the cache {folder} is made again: {problem}", flush=True)
        make_cache(folder, fill)


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet.

    The folder's name depends on the data set's fingerprint and on the names and values of all
    settings. So changed data and other settings get another cache.

    Args:
        settings: values that JSON can hold, on which the prepared data depend.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(cache_home, "accelerate-recipes")
    # These settings are added only if they are set. So a cache from before they existed is found.
    if source.validation_share is not None:
        settings["validation_share"] = source.validation_share
    if source.is_whole:
        settings["is_whole"] = True
    digest = short_digest([source.fingerprint, source.location, source.configuration, settings])
    return root / f"{source.name[:80]}-{digest}"


def stamps_of(folder: Path) -> Stamps:
    """Return the times, the size and the inode of each file, which show whether it has changed.

    One of the times is that of the last change of status (ctime). Programs can set back the time of
    modification, but not the ctime.
    """
    stamps = {}
    for name in files_in(folder):
        status = (folder / name).stat()
        stamps[name] = [status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino]
    return stamps


def files_in(folder: Path) -> list[str]:
    """Return the files in a cache relative to it, in order, without the file of the stamps.

    That file is written last. So it can't have a stamp or a digest.
    """
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != SEEN
    ]


def is_unchanged(folder: Path) -> bool:
    """Whether all files still have the stamps that they had when the cache was last found whole.

    This is fast, because no array is read. The answer is also False if the stamps are missing or
    can't be read. `find_damage` then reads all files.
    """
    with contextlib.suppress(UserError, OSError):
        return read_json(folder / SEEN) == stamps_of(folder)
    return False


def find_damage(folder: Path) -> str | None:
    """Compare the digests of all files, and return what is wrong with the cache, for a message.

    If nothing is wrong, return None, and save the stamps of the files. With these, `is_unchanged`
    saves the next run from reading all files again.
    """
    try:
        facts = read_json(folder / FACTS_JSON)
        # Take the stamps before the files are read, because the files may change meanwhile.
        stamps = stamps_of(folder)
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
    """Save the stamps of an undamaged cache.

    If they can't be written, there is no error, but each run has to compare the digests.
    """
    with contextlib.suppress(UserError):
        write_json(folder / SEEN, stamps)


def make_cache(folder: Path, fill: Callable[[Path], PreparedFacts]) -> None:
    """Make the cache in a new folder, which then takes the place of `folder`.

    The new folder gets the data from `fill`, the signed facts with the digests of all files, and
    the stamps.
    """
    with replacing(folder) as unfinished:
        facts = fill(unfinished)
        digests = {name: sha256_of_file(unfinished / name) for name in files_in(unfinished)}
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
