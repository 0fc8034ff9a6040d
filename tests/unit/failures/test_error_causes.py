"""Errors of libraries, and what each means for its run."""

from __future__ import annotations

import pytest
import torch

from common.errors import LostProcessError
from common.failures.error_causes import (
    is_lost_process,
    is_out_of_memory,
    lost_process_in_words,
)
from common.failures.outcomes import Outcome, outcome_of

LOST_PROCESS_ERRORS = [
    LostProcessError("rank 1 timed out"),
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"),
    RuntimeError("NCCL communicator was aborted on rank 1"),
    *map(
        RuntimeError,
        (
            "Timed out waiting 5000ms for recv operation to complete",
            "Wait timeout",
            "Application timeout caused pair closure",
            "Read timeout [127.0.0.1]:9",
            "Pair is not connected (",
            "Connect timeout [10.0.0.2]:9",
            "Socket Timeout",
            "writev [10.0.0.2]:9: Broken pipe",
            "connect: No route to host",
            "connect [10.0.0.2]:9: Connection refused",
            "sendmsg: Network is unreachable",
            "readv [10.0.0.2]:9: Connection reset by peer",
            "read: Connection timed out",
            "Remote peer closed the connection.",
            "Write timeout [10.0.0.2]:9",
            "Rank 1 timed out in monitoredBarrier after 1000 ms.",
            "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            "The client socket has timed out after 60000ms while trying to connect to (a, 9).",
            "Failed to recv, got 0 bytes. Connection was likely closed.",
            "waitForInput: socket SocketImpl(fd=9) timed out after 1000ms",
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa",
            "Gloo connectFullMesh failed with a cause",
            "NCCL error in: ProcessGroupNCCL.cpp:9, remote process exited",
            "NCCL Error 6: remote process exited or there was a network error",
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        ),
    ),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
    RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
    RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1."),
    RuntimeError("DataLoader timed out after 5 seconds"),
    torch.distributed.DistBackendError("what a backend says"),
]
OUT_OF_MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"),
    MemoryError(),
]
OTHER_ERRORS = [
    *OUT_OF_MEMORY_ERRORS,
    ValueError("gloo, peer and timed out are words that a value may have"),
    RuntimeError("shapes differ"),
    # A recipe's own errors may have the words of a lost process.
    RuntimeError("timeout while reading my file"),
    RuntimeError("the download timed out"),
    RuntimeError("the label of a peer is missing"),
    RuntimeError("the sensor is not connected"),
    RuntimeError("this recipe needs NCCL or gloo"),
    RuntimeError("ffmpeg exited unexpectedly"),
    RuntimeError("my program is killed by signal 9"),
    KeyError("labels"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", LOST_PROCESS_ERRORS, ids=str)
def test_lost_process_is_resumable(error: Exception) -> None:
    """gloo, NCCL and torch's loader report it in different words."""
    outcome = outcome_of(error, rank=3)
    assert (outcome.status, outcome.resumable) == ("failed", True)
    in_words = lost_process_in_words(error) or f"{type(error).__name__}: {error}"
    assert outcome.reason == f"rank 3: {in_words}"
    assert is_lost_process(error)
    assert not is_out_of_memory(error)


PAIR = "gloo/transport/tcp/pair.cc"
GLHF = "This is typically caused by a remote worker crashing. Check the logs. GLHF!"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"[/src/{PAIR}:537] Connection closed by peer. {GLHF}", "lost the connection to another"),
        (f"[/src/{PAIR}:537] Read error [::1]:3: Connection reset by peer. {GLHF}", "lost the"),
        (f"[enforce fail at /src/{PAIR}:456] preamble. 9 vs 4. mismatch", "of different sizes"),
        (
            "Timed out waiting 5000ms for recv operation to complete",
            "timed out waiting for another",
        ),
        (
            "[/src/gloo/transport/uv/unbound_buffer.cc:81] Timed out waiting 9ms for recv",
            "timed out",
        ),
        ("Application timeout caused pair closure", "timed out waiting for another process"),
        ("Pair is not connected (", "lost the connection to another process"),
    ],
)
def test_errors_of_gloo_are_told_in_plain_words(text: str, words: str) -> None:
    """They say that processes may not have made the same calls, which gloo does not know."""
    reason = outcome_of(RuntimeError(text)).reason or ""
    assert words in reason
    assert "not make the same calls" in reason
    assert not any(word in reason for word in ("gloo", "GLHF", "worker", "pair"))


@pytest.mark.parametrize(
    "error",
    [
        LostProcessError("rank 1 timed out"),
        RuntimeError("DataLoader timed out after 5 seconds"),
        RuntimeError("NCCL communicator was aborted on rank 1"),
        RuntimeError("[enforce fail at /src/gloo/transport/tcp/device.cc:84] no interface"),
        RuntimeError("the recipe timed out"),
    ],
    ids=repr,
)
def test_errors_that_say_more_keep_their_text(error: Exception) -> None:
    """So do those of a loader's worker, which are about no other rank."""
    assert outcome_of(error).reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=repr)
def test_other_errors_are_not_resumable(error: BaseException) -> None:
    """The reason has the error's type, and its rank if that is known."""
    assert outcome_of(error) == Outcome("failed", False, f"{type(error).__name__}: {error}")
    assert not is_lost_process(error)
    assert is_out_of_memory(error) == (error in OUT_OF_MEMORY_ERRORS)
