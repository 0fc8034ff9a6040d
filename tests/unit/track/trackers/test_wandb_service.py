"""The watch on W&B's service: it ends a service that hangs, and leaves a working one alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from common.track.trackers import wandb_service as service
from common.track.trackers.wandb_service import ServiceWatch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check often, and leave the real W&B alone."""
    monkeypatch.setattr(service, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(service, "MAX_IDLE", 0.5)
    monkeypatch.setattr(service, "forget_service", lambda: None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that works forever, instead of the service."""
    monkeypatch.setattr(service, "SERVICE_NAME", "yes")
    process = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def read_all(process: subprocess.Popen[bytes]) -> None:
    """Wait for the service as a call to W&B does: until it is gone."""
    assert process.stdout is not None
    while process.stdout.read(2**16):
        pass
    raise ConnectionResetError("the service is gone")


def test_stopped_service_is_ended(stand_in: subprocess.Popen[bytes]) -> None:
    """The call that waits for it raises an error, and so do all later ones."""
    watch = ServiceWatch()
    psutil.Process(stand_in.pid).suspend()
    with pytest.raises(TimeoutError, match="did not answer"), watch.limited():
        read_all(stand_in)
    assert watch.has_killed_service
    with pytest.raises(TimeoutError), watch.limited():  # later calls fail, too
        raise BrokenPipeError


def test_call_that_takes_too_long_is_ended(stand_in: subprocess.Popen[bytes]) -> None:
    """The service may still be working."""
    watch = ServiceWatch()
    with pytest.raises(TimeoutError), watch.limited(1.0):
        read_all(stand_in)
    assert watch.has_killed_service


def test_service_is_left_alone_while_nobody_waits(stand_in: subprocess.Popen[bytes]) -> None:
    """An error inside a call stays as it is."""
    watch = ServiceWatch()
    psutil.Process(stand_in.pid).suspend()
    time.sleep(1.0)
    assert not watch.has_killed_service
    with pytest.raises(ValueError, match="of the call"), watch.limited():
        raise ValueError("of the call")
    watch.has_killed_service = True  # ends the thread


def test_error_without_a_service_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With WANDB_MODE=disabled, W&B starts no service, so none can be gone."""
    monkeypatch.setattr(service, "SERVICE_NAME", "no such process")
    watch = ServiceWatch()
    with pytest.raises(ValueError, match="of the call"), watch.limited():
        raise ValueError("of the call")
    watch.has_killed_service = True  # ends the thread
