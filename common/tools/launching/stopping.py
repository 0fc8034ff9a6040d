"""Stops the work of a tool on Ctrl-C or SIGTERM, and says how to continue it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from common.console import say

STOPPED = 130  # exit status after Ctrl-C


@contextmanager
def stoppable(command_to_continue: str) -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C in the `with` block, and say how to continue after either.

    Both raise a `KeyboardInterrupt` in the block, so its clean-up can first stop a launched run. By
    default, SIGTERM would end this process without any clean-up.

    Args:
        command_to_continue: the command that continues the work, for a message.

    Raises:
        SystemExit: with status 130, after Ctrl-C or SIGTERM.
    """
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped: continue with {command_to_continue}")
        raise SystemExit(STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
