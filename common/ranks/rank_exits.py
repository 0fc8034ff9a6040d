"""What a rank waits for before it exits."""

import time

from common.system.launch_variables import is_main_rank

GLOO_RELEASE_SECONDS = 0.2
MESSAGE_SECONDS = 5.0


def let_gloo_release() -> None:
    """Wait until gloo's threads have dropped their references to reduced tensors.

    Gloo (torch 2.13) aborts the process if one of its threads drops the last reference to a reduced
    tensor while the interpreter exits.
    """
    time.sleep(GLOO_RELEASE_SECONDS)


def let_main_rank_exit_first() -> None:
    """Wait on all ranks but 0, so that rank 0 can print its message.

    A launcher kills all ranks as soon as one has exited.
    """
    if not is_main_rank():
        time.sleep(MESSAGE_SECONDS)
