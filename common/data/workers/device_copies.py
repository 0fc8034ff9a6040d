"""Copies batches to the device while training uses the previous one."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from accelerate.utils import send_to_device

from common.data.places import attributes_of
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
        record_stream(latest, training)
        yield from ready
    training.wait_stream(copying)
    yield from latest


def record_stream(value: object, stream: torch.Stream) -> None:
    """Keep the memory of all tensors in a batch until a stream is done with it.

    Objects that copy themselves by a method `to` may have a method `record_stream` as well, as
    those of PyTorch Geometric do. Otherwise, their attributes hold their tensors.
    """
    items: Iterable[object] = ()
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "to"):
        items = attributes_of(value)
    for item in items:
        record_stream(item, stream)
