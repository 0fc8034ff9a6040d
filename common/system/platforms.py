"""What the operating system offers. Only this module knows which system it is; others ask it."""

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import psutil

fcntl: ModuleType | None
resource: ModuleType | None
try:
    import fcntl
    import resource
except ImportError:  # Windows has neither
    fcntl = resource = None

SYSTEM = sys.platform
IS_LINUX = SYSTEM == "linux"
IS_WINDOWS = SYSTEM == "win32"

# ------------------------------------------------------------------------------------ Signals


def signals_named(names: Iterable[str]) -> dict[int, str]:
    """Return the names of those signals that this system has, by number."""
    numbers = {name: getattr(signal, name, None) for name in names}
    return {int(number): name for name, number in numbers.items() if number is not None}


# A cluster sends SIGTERM. Slurm sends SIGUSR1 with --signal=USR1. Ctrl-C sends SIGINT. A terminal
# that closes sends SIGHUP. On Windows Ctrl-Break sends SIGBREAK, which a process can also send to
# another process.
STOP_SIGNAL_NAMES = signals_named(("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGBREAK"))
STOP_SIGNALS = tuple(STOP_SIGNAL_NAMES)
HANGUP: int | None = getattr(signal, "SIGHUP", None)
CHILD_ENDED: int | None = getattr(signal, "SIGCHLD", None)


def polite_stop_signal() -> int:
    """Return the signal that asks a process in a group of its own to stop.

    On Windows, SIGTERM would end the process at once, with nothing saved.
    """
    if not IS_WINDOWS:
        return signal.SIGTERM
    # Python has the constant on Windows only. Where tests simulate Windows, it is missing.
    return getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)


@contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Delay signals that ask this process to stop; processes started meanwhile never get them.

    Use it while worker processes are started: they inherit the blocked signals, and keep them
    blocked. A spawned process takes seconds until its own code can ignore a Ctrl-C. Before that, a
    Ctrl-C would end it with a traceback. A fork has its parent's handlers and needs no delay.
    Windows can't hold signals back, so nothing is delayed there.
    """
    if worker_start_method() == "fork" or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------------- Parents and children

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
    if IS_LINUX:
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

    If that process has ended, the result is the process that has adopted this one, on POSIX, or
    this process itself, on Windows. It is this process itself, too, if the process that started it
    can't be seen from here, as from inside a container.
    """
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        # In a virtual environment on Windows, python.exe starts the real interpreter and waits. So
        # the process that started python.exe is one level further up.
        is_redirected = IS_WINDOWS and sys.executable != getattr(sys, "_base_executable", None)
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
    if IS_WINDOWS:
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    arguments: ProcessGroupArguments = {"start_new_session": True}
    if IS_LINUX:
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
    return {} if IS_LINUX else {WATCHES_PARENT: "1"}


# ---------------------------------------------------------------------------------- Processes


def usable_cores() -> int:
    """Return the number of cores that this process may use, or of all cores if that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Return how many threads wanted a core in the last minute, on average."""
    import psutil

    return psutil.getloadavg()[0]  # on Windows, the average begins with the first call


def can_fork_with_threads() -> bool:
    """Whether a process that has threads may fork, which only Linux allows."""
    return IS_LINUX and hasattr(os, "fork")


def can_limit_own_memory() -> bool:
    """Whether RLIMIT_DATA limits the memory that this process allocates; on Linux alone it does."""
    return IS_LINUX


def worker_start_method() -> str:
    """Return the method of `multiprocessing` that starts the loader's workers.

    A fork starts at once and shares the data. It is named here, because Linux's default is another
    method from Python 3.14 on. A method that the program has set is kept.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method is not None:
        return method
    return "fork" if can_fork_with_threads() else "spawn"


def raise_descriptor_limit(few: int, enough: int) -> None:
    """If the soft limit on open files is below `few`, raise it to `enough` or as far as allowed.

    The loader's workers need this: the training process opens several files for each of them.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard or soft >= few:  # the limit can't be raised, or need not be
        return
    raised = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def descriptor_limit() -> int | None:
    """Return how many files this process may open; None if no limit is known."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int | None:
    """Return how many files this process has open; None if the system does not report it."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return None


# -------------------------------------------------------------------------------------- Files

# Windows can't open folders. Its file systems write the names in them to their journals instead.
CAN_SYNC_FOLDERS = hasattr(os, "O_DIRECTORY")
# Windows only syncs files that are open for writing.
SYNC_MODE = os.O_RDWR if IS_WINDOWS else os.O_RDONLY
# Whether a file can be renamed, replaced and removed while a process has it open. Windows refuses
# this, and there a virus scanner or an indexer opens each new file for a moment. So on Windows, a
# refused rename is tried again for the seconds below.
CAN_MOVE_OPEN_FILES = not IS_WINDOWS
MOVE_PATIENCE_SECONDS = 5.0


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, if the system can do so."""
    if not CAN_SYNC_FOLDERS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else SYNC_MODE)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Wait until the contents of an open file are on the disk."""
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        # Apple's fsync does not wait for the drive's own cache. A full sync does, but only some
        # file systems have it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def rename_path(source: Path, target: Path) -> None:
    """Rename a file or folder to a free name; on Windows, wait until no program has it open."""
    retry_while_open(lambda: os.rename(source, target))


def replace_file(source: Path, target: Path) -> None:
    """Rename a file over another file; on Windows, wait until no program has either open."""
    retry_while_open(lambda: os.replace(source, target))


def retry_while_open(move: Callable[[], None]) -> None:
    """Move files; on Windows, try again while another program has them open.

    Raises:
        OSError: the system refuses, on Windows for `MOVE_PATIENCE_SECONDS`.
    """
    deadline = time.monotonic() + (0 if CAN_MOVE_OPEN_FILES else MOVE_PATIENCE_SECONDS)
    while True:
        try:
            return move()
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)


def is_unlocked(lock_file: Path) -> bool:
    """Whether a lock file exists and no process holds its lock; False if that is unknown.

    The file is not changed. For a moment, this holds a shared lock, which only a job that takes the
    lock at this moment can notice. For Windows, see `can_take_lock`.
    """
    if fcntl is None:
        return can_take_lock(lock_file)
    try:
        # The file is opened only for reading, because it may be another user's. Without O_NONBLOCK,
        # a pipe in its place would block this process.
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A shared lock is refused while a job holds an exclusive one. Closing the file releases it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def can_take_lock(lock_file: Path) -> bool:
    """Whether a lock file exists and no process holds its lock; only used on Windows.

    Windows has no other test than taking the lock. It is released again at once.
    """
    from filelock import FileLock, Timeout

    if not lock_file.is_file():
        return False
    try:
        with FileLock(lock_file, timeout=0):
            pass
        lock_file.touch()  # create it again: on Windows, the release of the lock has removed it
    except (Timeout, NotImplementedError, OSError):  # some file systems have no locks
        return False
    return True


# ----------------------------------------------------------------------------------- Commands


def command_line(words: Iterable[str]) -> str:
    """Join words into a command that can be pasted into this system's shell."""
    return subprocess.list2cmdline([*words]) if IS_WINDOWS else shlex.join(words)


def with_posix_command(advice: str, command: str) -> str:
    """Add an example command to advice, unless the system is Windows, which lacks the command."""
    return advice if IS_WINDOWS else f"{advice}, for example with {command}"


def quoted(word: object) -> str:
    """Quote one word, such as a path, for a command that can be pasted."""
    return command_line([str(word)])


def shown_path(path: Path) -> str:
    """Return a path as a message shows it: relative if it is inside the current folder."""
    absolute = os.path.abspath(path)
    try:
        relative = os.path.relpath(absolute)
    except ValueError:  # on another Windows drive
        return absolute
    return absolute if relative.split(os.sep)[0] == os.pardir else relative


def split_words(text: str) -> list[str]:
    """Split words as a shell does; a backslash is part of a path on Windows.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    words = shlex.shlex(text, posix=True, punctuation_chars=False)
    words.whitespace_split = True
    words.commenters = ""  # "#" is a character like any other
    if IS_WINDOWS:
        words.escape = ""
    return [*words]


# ------------------------------------------------------------------------------------ Messages


def error_texts(*numbers: int) -> tuple[str, ...]:
    """Return the system's texts for error numbers; numbers without a text are left out.

    The texts help to recognise an error that a library raises without its number. Windows calls
    every network error "Unknown error".
    """
    return tuple(
        message
        for message in map(os.strerror, numbers)
        if not message.lower().startswith("unknown error")
    )


def system_limits() -> str | None:
    """Return one line about what runs lack on this system and have on Linux; None on Linux."""
    if IS_LINUX:
        return None
    sentences = ["the loader's workers take seconds to start"]
    if not CAN_SYNC_FOLDERS:
        sentences.append("after a loss of power the newest checkpoint may be missing")
    if "SIGUSR1" not in STOP_SIGNAL_NAMES.values():
        sentences.append("only Ctrl-C and Ctrl-Break stop a run with everything saved")
    return "; ".join(sentences)
