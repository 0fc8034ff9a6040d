"""Copies batches to the device while training uses the previous one."""

from collections.abc import Iterable, Iterator

import torch
from accelerate.utils import recursively_apply, send_to_device

from common.data.samples import Batch
from common.system import devices


def copied_to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device, each copied while training uses the previous one.

    A copy can overlap only on a device that has streams and pinned memory. On other devices, each
    batch is copied when it is needed.
    """
    if not (devices.has_streams(device) and devices.has_pinned_memory(device)):
        for batch in batches:
            yield send_to_device(batch, device)
        return
    copying = devices.new_stream(device)
    training = devices.current_stream(device)
    latest: list[Batch] = []  # has the batch that was copied last; empty before the first one
    for batch in batches:
        # Make training wait for the previous copy. The next copy is queued after that, so training
        # does not wait for it.
        training.wait_stream(copying)
        ready = latest
        with devices.on_stream(copying):
            latest = [send_to_device(batch, device, non_blocking=True)]
        # The copying stream allocated this memory. It must not reuse it before the training stream
        # is done with it.
        recursively_apply(torch.Tensor.record_stream, latest, training)
        yield from ready
    training.wait_stream(copying)
    yield from latest
