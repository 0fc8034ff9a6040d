"""A watch over the process that W&B starts beside a run, so that W&B can never hang a training.

Calls of `wandb` wait for that process, its service, without a time limit. The watch kills a service
that does not answer. The waiting call then fails, and the training goes on.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

SERVICE_NAME = "wandb-core"
LOOK_EVERY = 1.0  # seconds between two looks at the service
# The seconds for which the service may use no processor time during a call. A service that is idle
# for longer is suspended or hangs.
MAX_IDLE = 15.0
MAX_SECONDS = 60.0  # the longest call, whatever the service does meanwhile
MAX_SECONDS_TO_FINISH = 600.0  # the longest last call, which may still upload large files


class ServiceWatch(threading.Thread):
    """A thread that kills this process's W&B service if a call waits for it in vain.

    That is so if the service uses no processor time, or if the call takes too long. The waiting
    call then fails at once. Later calls fail at once too, including the call that W&B makes when
    Python exits.
    """

    def __init__(self) -> None:
        """Begin to watch. W&B has started its service already."""
        super().__init__(daemon=True, name="watch over the W&B service")
        self.services = [child for child in psutil.Process().children() if is_service(child)]
        # The `time.monotonic()` by which the current call must end; None between calls.
        self.deadline: float | None = None
        self.has_killed_service = False
        self.start()

    @contextmanager
    def limited(self, seconds: float = MAX_SECONDS) -> Iterator[None]:
        """Kill the service if the calls in this block take longer than `seconds`.

        Raises:
            TimeoutError: the service is gone, or it was killed because a call took too long.
        """
        began = time.monotonic()
        self.deadline = began + seconds
        try:
            yield
        except Exception:
            if not self.is_service_gone():
                raise
            forget_service()
            waited = time.monotonic() - began
            message = f"the W&B service is gone, or did not answer for {waited:.0f} s"
            raise TimeoutError(message) from None
        finally:
            self.deadline = None

    def run(self) -> None:
        """Look at the service every second, and kill it once a call waits for it in vain."""
        idle_looks = 0
        earlier_times = None
        while not self.has_killed_service:
            time.sleep(LOOK_EVERY)
            deadline = self.deadline
            times = None if deadline is None else self.processor_times()
            # Count looks, not seconds, because this process may have been suspended too, while its
            # clock went on.
            is_idle = times is not None and times == earlier_times
            idle_looks = idle_looks + 1 if is_idle else 0
            earlier_times = times
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late or idle_looks * LOOK_EVERY >= MAX_IDLE:
                self.kill_service()

    def kill_service(self) -> None:
        # Set this first: the waiting call fails as soon as the service is gone, and then reads it.
        self.has_killed_service = True
        for service in self.services:
            with suppress(psutil.Error):
                service.kill()

    def is_service_gone(self) -> bool:
        """Whether the service has ended; false with WANDB_MODE=disabled, where W&B starts none."""
        if not self.services:
            return False
        return self.has_killed_service or not any(map(is_service, self.services))

    def processor_times(self) -> list[float] | None:
        """Return the service's processor seconds, which grow while it works.

        The result is None if the seconds can't be read, or if there is no service. In both cases
        the service does not count as idle.
        """
        seconds: list[float] = []
        try:
            for service in self.services:
                times = service.cpu_times()
                seconds += [times.user, times.system]
        except psutil.Error:
            return None
        return seconds or None


def is_service(process: psutil.Process) -> bool:
    """Whether a process is a W&B service that still runs."""
    try:
        return process.name() == SERVICE_NAME and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def forget_service() -> None:
    """Stop W&B from waiting for the dead service when Python exits, and from reporting its loss."""
    import wandb

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # no report of the broken connection
    with suppress(Exception):
        wandb.teardown()
