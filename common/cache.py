"""Data prepared once and kept on disk: whole or not there at all, also with many processes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from common.errors import UserError


class CachedData:
    """A folder of arrays and facts: memory-mapped when read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}

    def array(self, name: str) -> np.ndarray:
        """Return a saved array, memory-mapped and read-only."""
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    def create(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return a new array to fill, memory-mapped."""
        path = self.folder / f"{name}.npy"
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)

    def save(self, name: str, array: np.ndarray) -> None:
        """Write an array."""
        np.save(self.folder / f"{name}.npy", array)

    def require_space(self, num_bytes: int) -> None:
        """Raise a `UserError` if the disk has no room for `num_bytes`."""
        free = shutil.disk_usage(self.folder).free
        if num_bytes > 0.9 * free:
            raise UserError(
                f"the decoded data take {num_bytes / 2**30:.1f} GiB, and {self.folder.parent} has "
                f"{free / 2**30:.1f} GiB free: lower --image-size, or let XDG_CACHE_HOME name a "
                "folder on a larger disk"
            )


def prepare_once(folder: Path, prepare: Callable[[CachedData], None]) -> CachedData:
    """Return the data cached in `folder`, calling `prepare` if it is not there yet.

    Of several processes one prepares and the others wait on a file lock, for as long as it
    takes: a barrier would time out. The folder appears by a rename, so it is whole or absent.
    """
    ready = CachedData(folder)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                unfinished = CachedData(folder.with_name(folder.name + ".unfinished"))
                shutil.rmtree(unfinished.folder, ignore_errors=True)
                unfinished.folder.mkdir()
                prepare(unfinished)
                facts = json.dumps(unfinished.facts)
                (unfinished.folder / "facts.json").write_text(facts)
                os.replace(unfinished.folder, folder)
    ready.facts = json.loads((folder / "facts.json").read_text())
    return ready
