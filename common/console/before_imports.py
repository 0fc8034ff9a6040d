"""The first call of a recipe, which prepares the process for slow imports."""

import atexit
import gc
import os
import signal
from types import FrameType

from common.console.display import DISPLAY
from common.system.launch_variables import is_launched, is_main_rank

LAUNCHER_TRACEBACKS = (
    "the launcher may now print KeyboardInterrupt or SignalException, which is not an error"
)


def begin() -> None:
    """Prepare a recipe's process for its imports, which take seconds.

    - A terminal shows which library is being loaded.
    - Ctrl-C ends the program with one sentence, until the run handles signals itself.
    - A current directory that no longer exists ends the program with one sentence.
    - At exit, Python skips a garbage collection that would take a second and free nothing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        """End the program at Ctrl-C with exit status 1; rank 0 alone prints the sentence."""
        message = "stopped by Ctrl-C before the first update"
        if is_launched():
            message += f"; {LAUNCHER_TRACEBACKS}"
        raise SystemExit(message if is_main_rank() else 1)

    signal.signal(signal.SIGINT, stop)
    try:
        os.getcwd()
    except OSError:  # otherwise torch's libraries would end the process, without advice
        message = "error: the current directory was removed: change to a folder that exists"
        raise SystemExit(message if is_main_rank() else 1) from None
    atexit.register(gc.freeze)
    DISPLAY.begin()
