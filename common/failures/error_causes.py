"""Recognises errors of Python and of libraries that mean a lost process or exhausted memory."""

import errno
import re

from common.errors import LostProcessError, Preempted, UserError
from common.system.platforms.messages import error_texts

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
    *map(re.escape, error_texts(*NETWORK_ERRORS)),
)
LOST_PROCESS = re.compile("|".join(LOST_PROCESS_PHRASES), re.IGNORECASE)
# Errors of gloo while processes exchange values. Their texts have paths of gloo's source and advice
# to read the log of a "remote worker", which help no user.
GLOO_EXCHANGE = re.compile(
    r"\bgloo/transport/\w+/(pair|unbound_buffer)\.(cc|h)\b"
    r"|timed out waiting \d+ms for (send|recv) operation"
    r"|application timeout caused pair closure|pair is not connected \(",
    re.IGNORECASE,
)
# Words in the texts of such errors.
OTHER_VALUES = re.compile(r"size doesn't match|collective mismatch|preamble", re.IGNORECASE)
TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# Phrases in an error's text which say that memory ran out.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_ALLOC_FAILED",
    "new thread",  # Python's "can't start new thread"
    "CUDNN_STATUS_NOT_SUPPORTED",  # from accelerate.utils.memory.should_reduce_batch_size
)


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that another process is gone, or did not take part in a collective.

    `outcome_of` then calls the run resumable, because a restart may help.
    """
    if isinstance(error, (UserError, Preempted)) or is_out_of_memory(error):
        return False
    from torch.distributed import DistError

    if isinstance(error, (LostProcessError, DistError)):
        return True
    # Libraries raise a RuntimeError for most causes, and only its text tells them apart.
    return isinstance(error, RuntimeError) and bool(LOST_PROCESS.search(str(error)))


def lost_process_in_words(error: BaseException) -> str | None:
    """Return in plain words what an error of gloo between two processes means.

    The result is None for all other errors, such as those of NCCL, whose texts say more.
    """
    text = str(error)
    if isinstance(error, LostProcessError) or not is_lost_process(error):
        return None
    if not GLOO_EXCHANGE.search(text):
        return None
    if OTHER_VALUES.search(text):
        return "the processes exchanged values of different sizes: they did not make the same calls"
    if TIMEOUT.search(text):
        return (
            "timed out waiting for another process: it has ended or hangs, or the processes did "
            "not make the same calls"
        )
    return (
        "lost the connection to another process: it has ended, or the processes did not make the "
        "same calls"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the wordings of torch and Python."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase.lower() in text for phrase in NO_MEMORY)
