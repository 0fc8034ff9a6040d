"""Has exactly one rank print the user's mistake that ended a run."""

import time
from contextlib import suppress

import torch

from common.errors import UserError
from common.ranks.agreement import announce, is_announced
from common.system.launch_variables import is_main_rank
from common.training.stop_request import StopRequest

ANNOUNCEMENT = "rank-0-prints-an-error"  # a key in the process group's store
# Other ranks wait this long for the announcement of rank 0. All ranks meet the same mistake at the
# same update, but on a busy machine rank 0 may get there later.
SECONDS_TO_ANNOUNCE = 5.0
# After the announcement, they wait this long for rank 0 to exit: it closes its trackers before it
# prints. Once rank 0 has exited, the launcher ends the other ranks.
SECONDS_TO_EXIT = 60.0
SECONDS_BETWEEN_LOOKS = 0.1


def announce_error() -> None:
    """On rank 0, tell the other ranks that rank 0 has met a mistake and will print it.

    On the other ranks, and in a run of one process, this does nothing.
    """
    if is_main_rank() and torch.distributed.is_initialized():
        with suppress(RuntimeError):  # the launcher, which keeps announcements, has ended
            announce(ANNOUNCEMENT)


def report_once(error: UserError, request: StopRequest) -> None:
    """Have this rank print an error when it exits, unless rank 0 prints one.

    Usually all ranks meet the same mistake, and rank 0 prints it when it exits. A recipe may also
    raise an error on another rank alone, while rank 0 waits for that rank in a collective. A
    launcher kills all ranks as soon as one has exited, so the other ranks first let rank 0 exit.
    On rank 0, this function does nothing.

    Args:
        request: the signals that this process has received. The launcher sends one after rank 0 has
            exited.
    """
    if is_main_rank():
        return
    began = time.monotonic()
    has_announcement = False
    while request.reason is None:
        has_announcement = has_announcement or is_error_announced()
        longest_wait = SECONDS_TO_EXIT if has_announcement else SECONDS_TO_ANNOUNCE
        if time.monotonic() - began > longest_wait:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    if request.reason is None and not has_announcement:
        error.speak()  # without this call, only rank 0 prints the error when it exits


def is_error_announced() -> bool:
    """Whether rank 0 has announced that it prints an error, or has exited already."""
    if not torch.distributed.is_initialized():
        return False
    try:
        return is_announced(ANNOUNCEMENT)
    except RuntimeError:  # the launcher or rank 0, which keeps announcements, has ended
        return True
