"""Copies of a run's state in the host's memory: on CUDA made while the training goes on."""

from collections.abc import Callable

import torch

from common.checkpoints.pack import Tensors

Files = dict[str, Tensors]  # tensors by name of the file


def copied(tensors: Tensors) -> Tensors:
    """Return copies in the host's memory, which training does not change."""
    # In the layout that they have: another one costs time, and is made where nobody waits for it.
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def begun(files: Files, device: torch.device) -> tuple[Files, Callable[[], None]]:
    """Return what `copied` does of each file, and what waits until it is there.

    On CUDA the tensors are copied on the device first, which takes no time, and from there into
    pinned memory on a stream of their own. Where the device has no room for that, beside what
    training holds of it, they are copied from where they lie, and waited for.
    """
    if device.type != "cuda":
        return {name: copied(tensors) for name, tensors in files.items()}, lambda: None
    sources = changed(files, torch.detach)
    size = sum(value.nbytes for tensors in files.values() for value in tensors.values())
    if has_room := size < torch.cuda.mem_get_info(device)[0]:
        sources = changed(sources, torch.clone)
    copying = torch.cuda.Stream(device)
    copying.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(copying):
        copies = changed(sources, into_pinned_memory)
        done = copying.record_event()

    def wait() -> None:
        done.synchronize()
        sources.clear()  # which were to stay until now

    if not has_room:
        wait()
    return copies, wait


def changed(files: Files, change: Callable[[torch.Tensor], torch.Tensor]) -> Files:
    return {name: {k: change(v) for k, v in held.items()} for name, held in files.items()}


def into_pinned_memory(value: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty_like(value, device="cpu", pin_memory=True)
    return pinned.copy_(value, non_blocking=True)
