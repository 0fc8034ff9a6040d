"""Stops a process in the middle of a save, after an exact number of bytes.

`stop_in_write.c` says how. It needs Linux and a C compiler. This module imports no library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "stop_in_write.c"
COMPILERS = ("cc", "gcc", "clang")
# A kill has missed its share if the share on the disk differs from it by more than this.
SHARE_TOLERANCE = 0.05


def compiler() -> str | None:
    """Return the C compiler's path; None where a process can't be stopped in a save."""
    if sys.platform != "linux":
        return None
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def build_library(folder: Path) -> Path:
    """Compile the library into a folder, and return its path.

    Raises:
        SystemExit: there is no compiler, or it fails.
    """
    program = compiler()
    if program is None:
        raise SystemExit(
            "error: a kill in a save needs Linux and a C compiler: install gcc, or pass other "
            "--kills"
        )
    library = folder / "stop_in_write.so"
    words = [program, "-shared", "-fPIC", "-O1", "-pthread", str(SOURCE), "-o", str(library)]
    built = subprocess.run([*words, "-ldl"], capture_output=True, encoding="utf-8", check=False)
    if built.returncode != 0:
        raise SystemExit(f"error: {program} can't compile {SOURCE.name}:\n{built.stderr}")
    return library


def preloading(library: Path) -> dict[str, str]:
    """Return the variables of the environment that load the library into a command's processes."""
    others = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{others}" if others else str(library)}


def stop_after_bytes(folder: Path, size: int) -> None:
    """Let this process stop itself once it has written so many bytes into files below a folder."""
    library = ctypes.CDLL(None)  # the preloaded one is among the symbols of the process
    library.stop_after_bytes.argtypes = [ctypes.c_char_p, ctypes.c_long]
    library.stop_after_bytes.restype = None
    library.stop_after_bytes(os.fsencode(folder.resolve()), size)


def missed_share(share: float, written: float) -> bool:
    """Whether a process was killed with another share on the disk than it should have been."""
    return abs(written - share) > SHARE_TOLERANCE
