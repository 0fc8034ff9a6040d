"""Parents and children: the end of a parent, process groups and forks."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from common.system.platforms import current

if TYPE_CHECKING:
    import psutil

# The signal that a process gets when its parent has ended, from the kernel or from itself. Windows
# has no SIGUSR2. SIGTERM serves there, because no other process can send it on Windows.
PARENT_ENDED = int(getattr(signal, "SIGUSR2", signal.SIGTERM))
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
# A process with this variable watches for the end of its parent itself. Linux does not need it,
# because its kernel sends a signal.
WATCHES_PARENT = "ACCELERATE_RECIPES_WATCH_PARENT"
PARENT_LOOK_SECONDS = 1.0


def signal_when_parent_ends(number: int = PARENT_ENDED) -> None:
    """Have this process get a signal when its parent has ended, even if the parent was killed.

    On Linux, the kernel sends the signal. Elsewhere a thread watches the parent.
    """
    if current.IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(number))
    else:
        # Look the parent up before the thread starts. Once it has ended, its process number may
        # belong to another process.
        parent = starting_process()
        arguments = (parent, number)
        threading.Thread(target=signal_after_end, args=arguments, daemon=True).start()


def signal_after_end(process: "psutil.Process", number: int) -> None:
    """Wait for the end of a process, then signal the main thread of the current process."""
    import _thread

    import psutil

    with contextlib.suppress(psutil.Error):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(PARENT_LOOK_SECONDS)
    if hasattr(signal, "pthread_kill"):  # this also interrupts a wait of the main thread
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def starting_process() -> "psutil.Process":
    """Return the process that started this process.

    If that process has ended, POSIX gives the process that adopted this one. On Windows, the result
    is this process itself. The result is also this process if its parent can't be seen, as from
    inside a container.
    """
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        # In a virtual environment on Windows, python.exe starts the real interpreter and waits. So
        # the process that started python.exe is one level further up.
        is_redirected = current.IS_WINDOWS and sys.executable != getattr(
            sys, "_base_executable", None
        )
        if is_redirected:
            return parent.parent() or psutil.Process()
        return parent
    except psutil.NoSuchProcess:
        return psutil.Process()


def is_orphan() -> bool:
    """Whether the launcher that started this process has ended.

    Ask this after `signal_when_parent_ends`, which can't notice an earlier end. The launcher is a
    Python process, and a process that adopts an orphan is not. So the launcher has ended if the
    parent is not Python.
    """
    import psutil

    parent = starting_process()
    try:
        # On Windows, a parent that has ended is not found: see `starting_process`.
        is_missing = parent.pid == os.getpid()
        return is_missing or "python" not in " ".join(parent.cmdline()).lower()
    except psutil.AccessDenied:
        return False  # there is a parent, but its command can't be read
    except (OSError, psutil.Error):
        return True


class ProcessGroupArguments(TypedDict, total=False):
    """Arguments of `subprocess.Popen`, by system; see `own_group_arguments`."""

    creationflags: int
    start_new_session: bool
    preexec_fn: Callable[[], None]


def own_group_arguments() -> ProcessGroupArguments:
    """Return arguments of `subprocess.Popen` for a process that gets no Ctrl-C of the terminal.

    When its parent ends, the kernel asks the process to stop. Only Linux can do so. Elsewhere, a
    recipe watches its parent itself if its environment has the `parent_watch_variables`.
    """
    if current.IS_WINDOWS:
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    arguments: ProcessGroupArguments = {"start_new_session": True}
    if current.IS_LINUX:
        arguments["preexec_fn"] = partial(signal_when_parent_ends, signal.SIGTERM)
    return arguments


def fork() -> int:
    """Fork this process; return 0 in the fork, and its process id here.

    Only `recipes prove` calls it, on Linux: a fork need not import the libraries again.
    """
    return os.fork()


def begin_session() -> None:
    """Put a fork into a session of its own, so that it gets no Ctrl-C of the terminal."""
    os.setsid()


def parent_watch_variables() -> dict[str, str]:
    """Return the variables with which a recipe watches for its parent's end; none on Linux."""
    return {} if current.IS_LINUX else {WATCHES_PARENT: "1"}
