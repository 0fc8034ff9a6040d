"""Ways in which a run ends early: by a mistake, by request, or by what a restart mends."""

import errno
import time
from typing import NamedTuple

from common.machine import is_main_rank
from common.platforms import words_for
from common.printable import printable

# Seconds in which a thread of gloo lets go of the last collective: see `agreement.wait_for_ranks`.
LETTING_GO = 0.2
# What says that a rank or a worker of a loader is gone or out of reach, and that memory is.
LOST = (
    *("gloo", "nccl", "peer", "timed out", "timeout", "not connected"),
    *("killed by signal", "exited unexpectedly"),
    *words_for(errno.EPIPE, errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH),
)
NO_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "_ALLOC_FAILED", "new thread"),
    "CUDNN_STATUS_NOT_SUPPORTED",  # as accelerate.utils.memory.should_reduce_batch_size has it
)
# What a system says of a disk that is full or fails, and of no mistake of the user's.
OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
FULL_ON_WINDOWS = "not enough space on the disk"  # in the words of its own errors, not of C's
NO_DISK = (*words_for(*OF_DISK), FULL_ON_WINDOWS)

# What to do about an error of a file system, by how the system words it. Else: mend what it says.
ADVICE = {
    (errno.ENOSPC, errno.EDQUOT): "free some space",
    (errno.EIO,): "free some space, or look for a failing disk",
    (errno.EACCES, errno.EPERM, errno.EROFS): "give this user the right to write there",
    (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR): "move away what is in its place",
    (errno.ENOENT,): "put back the folder that was removed",
    (errno.EFBIG,): "raise the limit on the size of files (ulimit -f), or shrink the model",
}
# A loss of a process at the same update again is no accident.
LOST_AGAIN = (
    "this is the second time at update {step}, so that a restart would not mend it: look for ranks "
    "with other numbers of batches, a collective (gather, reduce) under a condition that not all "
    "ranks meet, or a process that is killed for its memory"
)


class UserError(SystemExit):
    """A mistake that the user can mend: says what is wrong, where, and what to do.

    A ``SystemExit``: the interpreter prints the sentence without a traceback and ends with
    status 1. Only the first process of a job prints it, because all of them meet the same
    mistake; pass ``every_rank=True``, or call `speak`, for what one rank alone can see, and
    ``resumable=True`` for what is no mistake: the same command may end in another way.
    """

    def __init__(self, message: str, *, every_rank: bool = False, resumable: bool = False) -> None:
        self.message, self.resumable = printable(message), resumable
        super().__init__(f"error: {self.message}" if every_rank or is_main_rank() else 1)

    def speak(self) -> None:
        self.code = f"error: {self.message}"


class ReplacedDirectoryError(UserError):
    """A run's directory was removed, moved or replaced while the run wrote to it."""

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"{directory} was removed, moved or replaced while the run wrote to it: start the run "
            "again, and leave its directory in place"
        )


class TrainingError(UserError):
    """Training can't go on; says at which update, why, and what to try."""


class Preempted(SystemExit):
    """The run was asked to stop, and did, with everything saved; status 75 says: try again."""

    def __init__(self, message: str, *, is_by_ctrl_c: bool = False) -> None:
        super().__init__(75)
        self.message = message
        self.is_by_ctrl_c = is_by_ctrl_c  # then a launcher prints tracebacks of its own


class LostProcessError(RuntimeError):
    """Another rank, or a worker of a loader, is gone or hangs: what a restart mends."""


class Outcome(NamedTuple):
    """How a run ended, as `status.json` says it."""

    status: str  # preempted or failed
    resumable: bool  # whether the same command, given again, may end in another way
    reason: str | None


def outcome_of(error: BaseException, rank: int | None = None) -> Outcome:
    """Return what an error on a rank, to be named unless it is the user's, means for the run."""
    if isinstance(error, Preempted):
        return Outcome("preempted", True, error.message)
    if isinstance(error, UserError):
        return Outcome("failed", error.resumable, error.message)
    is_mended = is_of_disk(error) or is_loss(error)
    where = "" if rank is None else f"rank {rank}: "
    return Outcome("failed", is_mended, f"{where}{type(error).__name__}: {error}")


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another process is gone, or did not take part in a collective."""
    if isinstance(error, (UserError, Preempted)) or is_out_of_memory(error):
        return False
    from torch.distributed import DistError

    return isinstance(error, (LostProcessError, DistError)) or says(error, LOST)


def advice_for(problem: str) -> str:
    """Return what to do about an error of a file system, from its text."""
    for numbers, advice in ADVICE.items():
        is_full_on_windows = errno.ENOSPC in numbers and FULL_ON_WINDOWS in problem
        if is_full_on_windows or any(words in problem for words in words_for(*numbers)):
            return advice
    return "mend that"


def is_of_disk(error: BaseException) -> bool:
    """Whether an error of Python's or of a library's says that a disk is full or fails."""
    is_numbered = isinstance(error, OSError) and error.errno in OF_DISK
    return is_numbered or any(text in str(error) for text in NO_DISK)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the wordings of torch and Python."""
    asked = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return asked or isinstance(error, MemoryError) or says(error, NO_MEMORY)


def says(error: BaseException, words: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(word.lower() in said for word in words)


def let_main_rank_exit_first() -> None:
    """Wait on other ranks: a launcher ends all ranks when one exits, also one about to speak."""
    if not is_main_rank():
        time.sleep(5)
