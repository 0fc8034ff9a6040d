"""Locks the folder that receives several runs, and stops its work on Ctrl-C or SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.console import say
from common.errors import UserError
from common.sentences import writing

LOCK = ".lock"  # the file in the folder that is locked


@contextmanager
def working_in(directory: Path, flag: str, command_to_continue: str) -> Iterator[None]:
    """Create a folder for several runs, and lock it while the `with` block runs.

    Ctrl-C inside the block prints how to continue. From then on, SIGTERM acts like Ctrl-C.

    Args:
        directory: the folder for the runs of a search or of variants.
        flag: the flag that names the folder, for a message.
        command_to_continue: the command that continues after Ctrl-C, for a message.

    Raises:
        UserError: another process uses the folder.
        SystemExit: with status 130, after Ctrl-C.
    """
    with writing(f"{flag} {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOCK).touch()
    try:
        with FileLock(directory / LOCK, timeout=0):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            yield
    except Timeout:
        raise UserError(
            f"{directory} is being used by another process",
            advice=f"wait until that process has ended, or pass another directory with {flag}",
        ) from None
    except KeyboardInterrupt:
        say(f"stopped: continue with {command_to_continue}")
        raise SystemExit(130) from None
