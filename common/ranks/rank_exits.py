"""What a rank waits for before it exits."""

import time

from common.system.machine import is_main_rank

# The seconds that a thread of gloo needs to release the last collective: see
# `common.ranks.agreement.wait_for_ranks`.
GLOO_RELEASE_SECONDS = 0.2


def let_main_rank_exit_first() -> None:
    """Wait for 5 s on all ranks but 0, so that rank 0 can print its message.

    A launcher kills all ranks as soon as one has exited.
    """
    if not is_main_rank():
        time.sleep(5)
