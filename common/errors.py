"""What a user can mend, in one clear sentence without a traceback; and what a restart mends."""

from __future__ import annotations

import os
import time

# Seconds in which a thread of gloo lets go of the last collective: see `Agreement.end_collectives`.
LETTING_GO = 0.2


class UserError(SystemExit):
    """A mistake that the user can mend: says what is wrong, where, and what to do.

    A ``SystemExit``: the interpreter prints the sentence without a traceback and ends with
    status 1. Only the first process of a job prints it, because all of them meet the same
    mistake; pass ``every_rank=True`` for what one rank alone can see.
    """

    def __init__(self, message: str, *, every_rank: bool = False) -> None:
        printed = every_rank or is_main_rank()
        super().__init__(f"error: {message}" if printed else 1)
        self.message = message


class LostProcessError(RuntimeError):
    """Another rank, or a worker of a loader, is gone or hangs: what a restart mends."""


def is_main_rank() -> bool:
    """Whether this process is the one that speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def let_main_rank_exit_first() -> None:
    """Wait on other ranks: a launcher ends all ranks when one exits, also one about to speak."""
    if not is_main_rank():
        time.sleep(5)
