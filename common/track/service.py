"""The process that W&B starts beside a run: ended where a call would wait for it without end."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

NAME = "wandb-core"
LOOK_EVERY = 1.0  # seconds
# Seconds of a call in which the service may do nothing at all. It is stopped then, or hangs.
MOST_IDLE = 15.0
MOST_SECONDS = 60.0  # of a call, whatever the service does meanwhile
MOST_SECONDS_TO_FINISH = 600.0  # in which large files may still be sent


class ServiceWatch(threading.Thread):
    """Ends the W&B service of this process where a call waits for it in vain.

    The call then fails at once, and so do the later ones, also that at the end of Python.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="watch over the W&B service")
        self.services = [child for child in psutil.Process().children() if is_service(child)]
        self.deadline: float | None = None  # time.monotonic(), of the call that waits
        self.has_ended_service = False
        self.start()

    @contextmanager
    def limited(self, seconds: float = MOST_SECONDS) -> Iterator[None]:
        """End the service if the block takes longer; raise a `TimeoutError` in that case."""
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
        looks, before = 0, None
        while not self.has_ended_service:
            time.sleep(LOOK_EVERY)
            deadline = self.deadline
            work = None if deadline is None else self.work_done()
            # Looks are counted, and not seconds: this process may have been stopped as well.
            looks = looks + 1 if work is not None and work == before else 0
            before = work
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late or looks * LOOK_EVERY >= MOST_IDLE:
                self.end_service()

    def end_service(self) -> None:
        self.has_ended_service = True
        for service in self.services:
            with suppress(psutil.Error):
                service.kill()

    def is_service_gone(self) -> bool:
        return self.has_ended_service or not any(map(is_service, self.services))

    def work_done(self) -> list[float] | None:
        """Return figures that grow while the service works; None where they can't be read."""
        work = list[float]()
        try:
            for service in self.services:
                times = service.cpu_times()
                work += [times.user, times.system]
        except psutil.Error:
            return None
        return work or None


def is_service(process: psutil.Process) -> bool:
    try:
        return process.name() == NAME and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def forget_service() -> None:
    """Have W&B not wait for its service at the end of Python, nor report that it is gone."""
    import wandb

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with suppress(Exception):
        wandb.teardown()
