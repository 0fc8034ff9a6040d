"""Streams of a device, and waiting for the work on them."""

from contextlib import AbstractContextManager

import torch

from common.system.devices.backend import device_count, optional_function
from common.system.devices.current import current_device
from common.system.devices.selection import indexed, is_accelerator
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once


@tried_once
def has_streams(device: torch.device) -> bool:
    """Whether work can be queued on a second stream of `device`, and waited for by an event."""
    if not is_accelerator(device):
        return False
    try:
        current = current_stream(device)
        stream = new_stream(device)
        stream.wait_stream(current)
        with on_stream(stream):
            event = stream.record_event()
        current.wait_event(event)
        event.synchronize()
        stream.synchronize()
        torch.ones(1, device=device).record_stream(stream)
    except UNSUPPORTED_ERRORS:
        return False
    # A device with a single stream may return this stream as a new one.
    return stream.stream_id != current.stream_id


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of a device that `has_streams`."""
    return torch.Stream(device=device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """Return a context in which work is queued on `stream`: the stream itself.

    Tests replace this function, because they simulate streams without a GPU.
    """
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(indexed(device))


def synchronize(device: torch.device) -> None:
    """Wait for all work on all streams of `device`.

    A device that offers no way to wait is assumed to finish its work before each call returns.
    """
    if not is_accelerator(device):
        return
    wait = optional_function(device, "synchronize")
    if wait is None:
        if accelerator_can_wait_for(device):
            torch.accelerator.synchronize(indexed(device))
    elif device_count(device) > 1:  # some backends' `synchronize` takes no device
        with current_device(device):
            wait()
    else:
        wait()


@tried_once
def accelerator_can_wait_for(device: torch.device) -> bool:
    """Whether ``torch.accelerator`` can wait for `device`."""
    try:
        torch.accelerator.synchronize(indexed(device))
    except UNSUPPORTED_ERRORS:
        return False
    return True


def synchronize_stream(device: torch.device) -> None:
    """Wait for the work on the current stream of `device`, or for all work if it has no streams.

    A checkpoint that is being copied on another stream is not waited for.
    """
    if not is_accelerator(device):
        return
    if has_streams(device):
        current_stream(device).synchronize()
    else:
        synchronize(device)
