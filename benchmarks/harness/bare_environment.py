"""Makes a virtual environment that lacks some of this one's packages, to test without them.

Nothing is installed or downloaded: the environment's `site-packages` has links to this one's.
Processes that its Python starts run in the same environment.
"""

from __future__ import annotations

import os
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name


def installed_versions() -> dict[str, str]:
    """Return the version of each distribution of this environment, by canonical name."""
    return {
        canonicalize_name(distribution.name): distribution.version
        for distribution in metadata.distributions()
    }


def make_bare_environment(folder: Path, missing: Iterable[str]) -> Path:
    """Make an environment in `folder` with all distributions of this one except `missing`.

    Args:
        missing: names of distributions; those that this environment lacks are ignored.

    Returns:
        The path of its Python.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    variables = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=variables))
    source = Path(sysconfig.get_path("purelib"))
    hidden = entries_of_missing({canonicalize_name(name) for name in missing})
    for entry in source.iterdir():
        if entry.name not in hidden:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def entries_of_missing(missing: set[str]) -> set[str]:
    """Return the names in `site-packages` that belong to distributions of `missing` alone."""
    hidden: set[str] = set()
    kept: set[str] = set()
    for distribution in metadata.distributions():
        if canonicalize_name(distribution.name) in missing:
            hidden |= entries_of(distribution)
        else:
            kept |= entries_of(distribution)
    return hidden - kept


def entries_of(distribution: metadata.Distribution) -> set[str]:
    """Return the names of a distribution's files and folders in `site-packages`."""
    paths = [str(path).replace(os.sep, "/") for path in distribution.files or ()]
    return {path.split("/")[0] for path in paths if not path.startswith("..")} - {"__pycache__"}
