"""Locks the folder that receives several runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.failures.sentences import writing
from common.storage.files import LOCK, locked
from common.tools.launching.stopping import stoppable


@contextmanager
def locked_folder_of_runs(directory: Path, flag: str, command_to_continue: str) -> Iterator[None]:
    """Create a folder for several runs, and lock it while the `with` block runs.

    Ctrl-C or SIGTERM inside the block prints how to continue.

    Args:
        directory: the folder for the runs of a search or of variants.
        flag: the flag that names the folder, for a message.
        command_to_continue: the command that continues the work, for a message.

    Raises:
        UserError: another job is writing to the folder, or the folder can't be created or written.
        SystemExit: with status 130, after Ctrl-C or SIGTERM.
    """
    with writing(f"{flag} {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOCK).touch()  # a folder without write permission fails here, with advice
    # Another job may go on for hours, so do not wait for it.
    with locked(directory / LOCK, timeout=0, flag=flag), stoppable(command_to_continue):
        yield
