"""The ways in which a run ends early: a user's mistake, a request to stop, or a lost process."""

import errno
import re
import time
from typing import Literal, NamedTuple

from common.disk_errors import is_of_disk
from common.system.machine import is_main_rank
from common.system.platforms import words_for
from common.system.printable import printable

# The seconds that a thread of gloo needs to release the last collective: see
# `agreement.wait_for_ranks`.
GLOO_RELEASE_SECONDS = 0.2
# The error numbers of a connection whose other end is gone or out of reach.
NETWORK_ERRORS = (
    errno.EPIPE,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
)
# Phrases that libraries print when a rank or a loader's worker is gone or out of reach, as regular
# expressions. Errors of a recipe may have words such as "timeout", so single words would not do.
LOST_PROCESS_PHRASES = (
    # gloo begins most of its errors with the path of its source file.
    r"\bgloo/[\w/]+\.(cc|h)\b",
    r"\bgloo \w+ failed",
    # gloo/transport/tcp/pair.cc and unbound_buffer.cc
    r"connection closed by peer",
    r"remote peer closed the connection",
    r"(connect|read|write) timeout \[",
    r"application timeout caused pair closure",
    r"timed out waiting \d+ms for (send|recv) operation",
    r"pair is not connected \(",
    # torch/csrc/distributed/c10d: ProcessGroupGloo.cpp
    r"timed out in monitoredbarrier",
    r"failed to pass monitoredbarrier",
    r"reached monitoredbarrier, but received errors",
    r"^operation timed out!",
    # torch/csrc/distributed/c10d: TCPStore.cpp, FileStore.cpp, HashStore.cpp, socket.cpp, Utils.hpp
    r"^socket timeout",
    r"^wait timeout",
    r"^timeout waiting for key: ",
    r"barrier timeout after \d+ms, key",
    r"waitforinput: (poll for )?socket ",
    r"timed out after \d+ seconds waiting for clients",
    r"connection was likely closed",
    r"the client socket has (timed out|failed to connect)",
    r"tcp client failed to connect",
    # torch/csrc/distributed/c10d: NCCLUtils.hpp and ProcessGroupNCCL.cpp
    r"\bnccl (error|timeout)( in| \d+)?:",
    r"nccl communicator (was|has been) aborted",
    r"watchdog caught collective operation timeout",
    # torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py
    r"dataloader worker \(pid(\(s\))? [\d, ]+\) (is killed by signal|exited unexpectedly)",
    r"dataloader timed out after ",
    r"pin memory thread exited unexpectedly",
    # libuv's words for network errors, which gloo prints on Windows and macOS
    r"connection (reset by peer|timed out|refused)",
    r"socket is not connected",
    # the system's words for them
    *map(re.escape, words_for(*NETWORK_ERRORS)),
)
LOST_PROCESS = re.compile("|".join(LOST_PROCESS_PHRASES), re.IGNORECASE)
# Phrases in an error's text which say that memory ran out.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_ALLOC_FAILED",
    "new thread",  # Python's "can't start new thread"
    "CUDNN_STATUS_NOT_SUPPORTED",  # from accelerate.utils.memory.should_reduce_batch_size
)
# Printed if a process is lost at the same update for the second time, which is not an accident.
LOST_AGAIN = "this is the second time at update {step}, so a restart would not help"
LOST_AGAIN_ADVICE = (
    "look for ranks with different numbers of batches, a collective (gather, reduce) under a "
    "condition that not all ranks meet, or a process that is killed for its memory"
)


class UserError(SystemExit):
    """A mistake that the user can fix: the message says what is wrong, where, and what to do.

    It is a ``SystemExit``, so Python prints the message without a traceback and exits with
    status 1. All ranks meet the same mistake, so only rank 0 prints the message.

    Args:
        problem: what is wrong and where, without "error:".
        advice: what the user can do, as an instruction such as "pass --num-workers 0". The
            library always gives one, and a test checks it. A recipe's own check may do without.
        every_rank: whether each rank that raises it prints the message, because only one rank may
            have the problem. Otherwise only rank 0 prints it.
        resumable: whether the same command may succeed later, because the cause is not a mistake
            in it.
    """

    def __init__(
        self, problem: str, *, advice: str = "", every_rank: bool = False, resumable: bool = False
    ) -> None:
        self.problem = printable(problem)
        self.advice = printable(advice)
        self.message = f"{self.problem}: {self.advice}" if advice else self.problem
        self.resumable = resumable
        # Both exit with status 1. Python prints the text, and prints nothing for the number 1.
        super().__init__(f"error: {self.message}" if every_rank or is_main_rank() else 1)

    def speak(self) -> None:
        """Have this rank print the message when it exits, although it is not rank 0."""
        self.code = f"error: {self.message}"


class ReplacedDirectoryError(UserError):
    """A run's directory was removed, moved or replaced while the run wrote to it."""

    ADVICE = "start the run again, and leave its directory in place"

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"{directory} was removed, moved or replaced while the run wrote to it",
            advice=self.ADVICE,
        )


class TrainingError(UserError):
    """Training can't go on. The message says at which update, why, and what to try."""


class Preempted(SystemExit):
    """The run stopped on request with everything saved. Exit status 75 means: start it again."""

    def __init__(self, message: str, *, is_by_ctrl_c: bool = False) -> None:
        super().__init__(75)
        self.message = message
        self.is_by_ctrl_c = is_by_ctrl_c  # a launcher then prints tracebacks of its own


class LostProcessError(RuntimeError):
    """Another rank or a loader's worker is gone or hangs. A restart helps."""


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
    is_resumable = is_of_disk(error) or is_lost_process(error)
    prefix = "" if rank is None else f"rank {rank}: "
    return Outcome("failed", is_resumable, f"{prefix}{type(error).__name__}: {error}")


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that another process is gone, or did not take part in a collective."""
    if isinstance(error, (UserError, Preempted)) or is_out_of_memory(error):
        return False
    from torch.distributed import DistError

    if isinstance(error, (LostProcessError, DistError)):
        return True
    # Libraries raise a RuntimeError for most causes, and only its text tells them apart.
    return isinstance(error, RuntimeError) and bool(LOST_PROCESS.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the wordings of torch and Python."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase.lower() in text for phrase in NO_MEMORY)


def let_main_rank_exit_first() -> None:
    """Wait for 5 s on all ranks but 0, so that rank 0 can print its message.

    A launcher kills all ranks as soon as one has exited.
    """
    if not is_main_rank():
        time.sleep(5)
