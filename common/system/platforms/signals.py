"""The signals by which a system or a user asks a run to stop."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from common.system.platforms import current
from common.system.platforms.limits import worker_start_method


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
    if not current.IS_WINDOWS:
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
