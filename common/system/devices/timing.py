"""How the work on a device is timed: by events on its stream, or by torch's profiler."""

import torch

from common.system.devices.selection import is_accelerator
from common.system.devices.streams import current_stream
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once


@tried_once
def has_timed_events(device: torch.device) -> bool:
    """Whether two events on the stream of `device` give the milliseconds between them.

    A trial finds out, which waits for the device. Without such events, the host's clock is used.
    """
    if not is_accelerator(device):
        return False
    try:
        first = recorded_event(device)
        last = recorded_event(device)
        last.synchronize()
        return first.elapsed_time(last) >= 0
    except UNSUPPORTED_ERRORS:
        return False


def recorded_event(device: torch.device) -> torch.Event:
    """Return an event that records the time at which the current stream reaches this point."""
    event = torch.Event(device=device, enable_timing=True)
    event.record(current_stream(device))
    return event


def profiler_activity(device: torch.device) -> torch.profiler.ProfilerActivity | None:
    """Return the activity by which torch's profiler times kernels of `device`; None if it can't.

    The profiler accepts any backend from outside of torch, even if it can't time the backend's
    kernels. So the result is None for those backends.
    """
    if not is_accelerator(device) or device.type == torch._C._get_privateuse1_backend_name():
        return None
    activity = torch.profiler.ProfilerActivity.__members__.get(device.type.upper())
    return activity if activity in torch.profiler.supported_activities() else None
