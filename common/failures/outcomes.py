"""How a run ended, as `status.json` records it."""

from typing import Literal, NamedTuple

from common.errors import Preempted, UserError
from common.failures.disk_errors import is_disk_error
from common.failures.error_causes import is_lost_process, lost_process_in_words
from common.system.wording import without_middle

# Characters of an error in the reason. The error of a compiler repeats all that it has printed,
# and names the cause at its end.
MAX_REASON = 2000

# The status that a run writes to `status.json`.
RunStatus = Literal["running", "finished", "preempted", "failed"]


class Outcome(NamedTuple):
    """How a run ended, as `status.json` records it."""

    status: RunStatus
    resumable: bool  # whether the same command, given again, may end in another way
    reason: str | None


def outcome_of(error: BaseException, rank: int | None = None) -> Outcome:
    """Return the outcome of a run that an error ended.

    Args:
        error: what ended the run.
        rank: the rank to name in the reason, if the error is neither the user's mistake nor a
            request to stop; None names no rank.
    """
    if isinstance(error, Preempted):
        return Outcome("preempted", resumable=True, reason=error.message)
    if isinstance(error, UserError):
        return Outcome("failed", resumable=error.resumable, reason=error.message)
    is_resumable = is_disk_error(error) or is_lost_process(error)
    prefix = "" if rank is None else f"rank {rank}: "
    text = lost_process_in_words(error) or f"{type(error).__name__}: {error}"
    return Outcome("failed", is_resumable, f"{prefix}{without_middle(text, MAX_REASON)}")
