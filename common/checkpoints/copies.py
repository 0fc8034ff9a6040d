"""Copies a run's state to the host's memory for a checkpoint, during training if possible."""

from collections.abc import Callable

import torch

from common.checkpoints.pack import Tensors
from common.system.devices import (
    current_stream,
    has_pinned_memory,
    has_streams,
    memory_info,
    new_stream,
    use,
)

Files = dict[str, Tensors]  # tensors by name of the file

# Torch rounds an allocation of pinned memory up to a power of two, so this size is one.
PIECE_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes, enough for any dtype


def copied(tensors: Tensors) -> Tensors:
    """Return copies of tensors in the host's memory. Training does not change these copies."""
    # Keep the order of the dimensions in memory, because a contiguous copy takes longer.
    # `write_tensors` makes the contiguous copy in the writing thread, while training goes on.
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


class PinnedMemory:
    """Pinned memory of the host, in a few large pieces that each checkpoint uses again.

    A device copies to pinned memory without a wait after each tensor. But pinning takes about as
    long as writing the memory once, and some time for each call. To pin a piece for each tensor
    would delay the training by as long as hundreds of updates.
    """

    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []  # uint8 [bytes] each
        self.position = 0  # the index in `pieces` of the piece in use, which may not exist yet
        self.offset = 0  # the bytes of that piece that are taken

    def use_again(self) -> None:
        """Reuse all memory from now on; tensors returned earlier are overwritten."""
        self.position = 0
        self.offset = 0

    def empty_like(self, value: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor with the shape and dtype of `value`, in pinned memory.

        The strides are those that torch gives a copy: the order of the dimensions in memory stays,
        and gaps are left out.
        """
        memory = self.take(value.nbytes)
        strides = torch.empty_like(value, device="meta").stride()
        return memory.view(value.dtype).as_strided(value.shape, strides)

    def take(self, size: int) -> torch.Tensor:
        """Return the next free bytes, uint8 [size].

        They are in the piece in use, or in the next piece that has room. If no piece has room, a
        new one is pinned.
        """
        while not self.has_room(size):
            if self.position == len(self.pieces):  # no piece is left
                piece_size = max(size, PIECE_BYTES)
                self.pieces.append(torch.empty(piece_size, dtype=torch.uint8, pin_memory=True))
            else:
                self.position += 1
                self.offset = 0
        memory = self.pieces[self.position][self.offset : self.offset + size]
        self.offset += -(-size // ALIGNMENT) * ALIGNMENT  # rounded up
        return memory

    def has_room(self, size: int) -> bool:
        """Whether the piece in use has `size` free bytes; False if there is no such piece yet."""
        if self.position == len(self.pieces):
            return False
        return self.offset + size <= self.pieces[self.position].nbytes


class HostCopies:
    """Copies the tensors of one checkpoint after the other from a device to the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = PinnedMemory()
        self.is_asynchronous = has_streams(device) and has_pinned_memory(device)

    def begin(self, files: Files) -> tuple[Files, Callable[[], None]]:
        """Copy tensors with the values that they have now.

        A device with streams and pinned memory first copies the tensors to its own memory, after
        the work that training has queued. Training can then go on, and another thread copies these
        copies to the host, on a separate stream. If the device has no room for copies, or if its
        free memory is unknown, this function copies the tensors to the host before it returns. It
        does the same for a device without streams or pinned memory.

        Returns:
            The copies, and a function that completes them, which any thread may call. The copies
            may be used until the next call, which may take the same memory again.
        """
        if not self.is_asynchronous:
            return {name: copied(tensors) for name, tensors in files.items()}, lambda: None
        sources = with_each_tensor(files, torch.detach)  # a new dict, because `fetch` empties it
        size = sum(value.nbytes for tensors in files.values() for value in tensors.values())
        memory = memory_info(self.device)
        has_room = memory is not None and size < memory.free
        if has_room:
            sources = with_each_tensor(sources, torch.clone)
        sources_ready = current_stream(self.device).record_event()
        copies: Files = {name: {} for name in files}
        targets = dict(copies)  # the caller may take files out of `copies`

        def complete_copies() -> None:
            self.fetch(sources, targets, sources_ready)

        if has_room:
            return copies, complete_copies
        complete_copies()  # at once, because training will change these tensors
        return copies, lambda: None

    def fetch(self, sources: Files, targets: Files, sources_ready: torch.Event) -> None:
        """Copy tensors to the host, and wait until that is done.

        Args:
            sources: tensors on the device. The dict is emptied, which releases them.
            targets: the same files, without tensors. The copies are added to them.
            sources_ready: the event after which the sources have their values.
        """
        use(self.device)
        self.pinned.use_again()
        stream = new_stream(self.device)
        stream.wait_event(sources_ready)
        with stream:
            for name, tensors in sources.items():
                for key, value in tensors.items():
                    copy = self.pinned.empty_like(value)
                    targets[name][key] = copy.copy_(value, non_blocking=True)
        # Wait for an event, not for the stream: torch can be set to raise an error for waits in the
        # training loop, and counts a wait for a stream among them.
        stream.record_event().synchronize()
        sources.clear()  # releases the device's memory, which was in use until now


def with_each_tensor(files: Files, function: Callable[[torch.Tensor], torch.Tensor]) -> Files:
    """Return new files, in which the result of `function` takes the place of each tensor."""
    results = {}
    for name, tensors in files.items():
        results[name] = {key: function(value) for key, value in tensors.items()}
    return results
