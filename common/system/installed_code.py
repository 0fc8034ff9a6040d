"""Tells the files of installed packages and of the standard library from the user's own files.

A run, for example, records the user's own code, but only the versions of packages.
"""

import sysconfig
from pathlib import Path

STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# The folders that packages are installed in. They may lie inside the standard library's folder.
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_installed(path: str | Path) -> bool:
    """Whether a file belongs to an installed package."""
    return not PACKAGE_FOLDERS.isdisjoint(Path(path).parts)


def is_in_standard_library(path: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return path.startswith(STANDARD_LIBRARY) and not is_installed(path)
