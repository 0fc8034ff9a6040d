"""Has exactly one rank print the user's mistake that ended a run."""

import time
from contextlib import suppress

import torch

from common.errors import UserError
from common.system.machine import is_main_rank
from common.training.stop import StopRequest

ANNOUNCEMENT = "rank-0-prints-an-error"  # a key in the process group's store
# Ranks meet the same mistake at the same update. On a busy machine one of them may come later.
SECONDS_TO_ANNOUNCE = 5.0
# Rank 0 closes its trackers before it prints and exits. Then the launcher ends the other ranks.
SECONDS_TO_EXIT = 60.0
SECONDS_BETWEEN_LOOKS = 0.1


def announce_error() -> None:
    """On rank 0, tell the other ranks that it has met a mistake and will print it."""
    if is_main_rank() and torch.distributed.is_initialized():
        store = torch.distributed.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # whoever keeps the store (the launcher or rank 0) is gone
            store.set(ANNOUNCEMENT, "")


def report_once(error: UserError, request: StopRequest) -> None:
    """Have this rank print an error unless rank 0 does so.

    Usually all ranks meet the same mistake, and rank 0 prints it when it exits. A recipe may also
    raise an error on another rank alone, while rank 0 waits for that rank in a collective. A
    launcher kills all ranks as soon as one has exited, so the other ranks first let rank 0 exit.

    Args:
        request: the signals of this process. The launcher sends one after rank 0 has exited.
    """
    if is_main_rank():
        return
    began = time.monotonic()
    is_announced = False
    while request.reason is None:
        is_announced = is_announced or is_error_announced()
        waited = time.monotonic() - began
        if waited > (SECONDS_TO_EXIT if is_announced else SECONDS_TO_ANNOUNCE):
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    if request.reason is None and not is_announced:
        error.speak()


def is_error_announced() -> bool:
    """Whether rank 0 has announced that it prints an error, or has exited already."""
    if not torch.distributed.is_initialized():
        return False
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.check([ANNOUNCEMENT])
    except RuntimeError:  # whoever keeps the store (the launcher or rank 0) is gone
        return True
