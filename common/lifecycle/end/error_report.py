"""Has exactly one rank print the user's mistake that ended a run."""

import time
from contextlib import suppress

import torch

from common.errors import UserError
from common.ranks.agreement import claim, claiming_rank
from common.system.launch_variables import is_main_rank, rank
from common.training.stop_request import StopRequest

# Other ranks wait this long for rank 0 to claim the report. All ranks meet the same mistake at the
# same update, but on a busy machine rank 0 may get there later.
SECONDS_TO_CLAIM = 5.0
# The other ranks wait this long for the rank that claimed the report to exit, because it closes its
# trackers before it prints. Once it has exited, the launcher ends them.
SECONDS_TO_EXIT = 60.0
SECONDS_BETWEEN_LOOKS = 0.1


def report_key(run_name: str) -> str:
    """Return the key of a run's report in the process group's store.

    The store may serve several runs, so the key has the name of the run.
    """
    return f"report-of-an-error-in-{run_name}"


def claim_report(run_name: str) -> None:
    """On rank 0, claim the report of a mistake, unless another rank has claimed it.

    On the other ranks, and in a run of one process, this does nothing.
    """
    if is_main_rank() and torch.distributed.is_initialized():
        with suppress(RuntimeError):  # the launcher, which keeps claims, has ended
            claim(report_key(run_name))


def report_once(error: UserError, request: StopRequest, run_name: str) -> None:
    """Have this rank print an error when it exits, or leave that to the rank that claimed it.

    Usually all ranks meet the same mistake, and rank 0 claims the report as soon as it meets it. A
    recipe may also raise an error on another rank alone, while rank 0 waits for that rank in a
    collective. That rank then claims the report after a few seconds.

    A launcher kills all ranks as soon as one has exited. So the ranks that do not print wait here
    for the one that prints. In a run of one process, this does nothing.

    Args:
        request: the signals that this process has received. The launcher sends one after a rank has
            exited.
        run_name: a name of the run that is the same on all ranks.
    """
    if not torch.distributed.is_initialized():
        return
    reporting_rank = wait_for_claim(request, report_key(run_name))
    if reporting_rank == rank():
        error.print_on_exit()
        return
    if reporting_rank is not None:
        error.stay_silent_on_exit()
        wait_for_signal(request, SECONDS_TO_EXIT)


def wait_for_claim(request: StopRequest, key: str) -> int | None:
    """Return the rank that prints the error; if no rank claims it in time, claim it for this one.

    The result is None if a signal came before any rank had claimed it. It is rank 0 if ranks can't
    claim anything any more.

    Args:
        key: the key of the report: see `report_key`.
    """
    deadline = time.monotonic() + SECONDS_TO_CLAIM
    try:
        while claiming_rank(key) is None and time.monotonic() < deadline:
            if request.reason is not None:
                return None
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return claim(key)
    except RuntimeError:  # the launcher or rank 0, which keeps claims, has ended
        return 0


def wait_for_signal(request: StopRequest, seconds: float) -> None:
    """Wait until the process is asked to stop, for a limited time."""
    deadline = time.monotonic() + seconds
    while request.reason is None and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
