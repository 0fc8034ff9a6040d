"""Measures memory at every fifth update: of the process, its allocator, live tensors, and arrays.

It writes `MemoryInUse`. The allocator's figure is exact to the byte, where the system's C library
reports it. Resident memory also includes freed memory that the allocator keeps. After the last
update, it writes `GrowingTensors` for each dtype and shape of tensors whose number keeps growing,
`GrowingGraph` for each variable whose graph of gradients does, and `GrowingContainer` for each
variable with a container that does.

Batches may be padded to different lengths. Then the tensors of the current batch, such as its
logits, differ in size from update to update. So they are measured apart from those that are older
than the batch, and the memory of the allocator and of the device is measured without them.

Tensors and arrays in a `deque` of the recipe with a `maxlen` are left out, because their number is
bounded. The memory of the allocator and of the process includes such arrays, and resident memory
also includes such tensors.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as tree
from torch.utils.weak import TensorWeakRef

from common.checkpoints.shards import is_sharded
from common.data.loader import Loader
from common.data.samples import Batch
from common.run import Run
from common.system.devices import allocated_bytes
from common.tools.prove.instruments.allocator_statistics import bytes_in_use
from common.tools.prove.instruments.graphs import graph_sizes
from common.tools.prove.instruments.holders import holder_in_words
from common.tools.prove.instruments.recipe_containers import (
    ContainerSize,
    bytes_of_arrays,
    container_sizes,
    tensors_in_bounded_deques,
)
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import (
    GrowingContainer,
    GrowingGraph,
    GrowingTensors,
    MemoryInUse,
)

MEASURED_EVERY = 5  # updates; each measured update has a log line, where the run adds up its values
FIRST_MEASURED = 10  # the first measured update; libraries fill their caches before it
MIN_GROWTH = 2  # the least growth of a number of tensors or items that is written
TensorType = tuple[str, tuple[int, ...]]  # the dtype and the shape


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = MemoryObserver(session)
    session.wrap(Run, "batches", observer.around_batches)
    session.wrap(Run, "record", observer.around_record)


class MemoryObserver:
    """Writes the memory in use after some updates."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.process = psutil.Process()
        # When the loop got the current batch, if its update is to be measured:
        self.older_tensors: list[TensorWeakRef] = []
        self.batch_bytes = 0
        # At the first measurement:
        self.first_counts: Counter[TensorType] | None = None
        self.first_graph_sizes: dict[str, int] = {}
        self.first_container_sizes: dict[str, ContainerSize] = {}
        self.first_step = 0

    def around_batches(
        self, original: Callable[[Run, Loader], Iterator[Batch]], run: Run, loader: Loader
    ) -> Iterator[Batch]:
        """Yield batches; before one whose update is to be measured, note the older tensors."""
        for batch in original(run, loader):
            if is_measured(run.progress.global_step + 1):
                self.note_older_tensors(batch)
            yield batch

    def note_older_tensors(self, batch: Batch) -> None:
        """Note the size of a batch, and the live tensors except those of the batch."""
        leaves = [leaf for leaf in tree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        batch_ids = {id(tensor) for tensor in leaves}
        self.batch_bytes = storage_bytes(leaves)
        self.older_tensors = [
            TensorWeakRef(tensor) for tensor in live_tensors() if id(tensor) not in batch_ids
        ]

    def around_record(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Record a micro-batch; measure memory if it completes an update that is to be measured."""
        previous_step = run.progress.global_step
        original(run, *positional, **named)
        step = run.progress.global_step
        if step > previous_step and is_measured(step):
            self.measure(run, step)

    def measure(self, run: Run, step: int) -> None:
        """Write the memory in use; at the last measurement, also write what keeps growing."""
        gc.collect()
        folder = Path(run.context.recipe_file).resolve().parent
        bounded = [*tensors_in_bounded_deques(sys._getframe(), folder)]
        bounded_ids = {id(tensor) for tensor in bounded}
        tensors = [tensor for tensor in live_tensors() if id(tensor) not in bounded_ids]
        older_ids = {id(reference()) for reference in self.older_tensors}
        older = [tensor for tensor in tensors if id(tensor) in older_ids]
        new = [tensor for tensor in tensors if id(tensor) not in older_ids]
        left_out = [*bounded, *new]
        counts = Counter(dtype_and_shape(tensor) for tensor in older)
        self.session.write(
            MemoryInUse(
                step=step,
                resident_bytes=self.process.memory_info().rss,
                allocator_bytes=without_tensors(bytes_in_use(), left_out, on_host=True),
                device_bytes=without_tensors(allocated_bytes(run.device), left_out, on_host=False),
                tensor_count=len(older),
                tensor_bytes=storage_bytes(older),
                # Some may be views of older tensors, whose storages count only once.
                new_tensor_bytes=storage_bytes(tensors) - storage_bytes(older),
                batch_bytes=self.batch_bytes,
                array_bytes=bytes_of_arrays(sys._getframe(), folder),
            )
        )
        if self.first_counts is None:
            self.first_counts = counts
            self.first_graph_sizes = graph_sizes(sys._getframe(), folder)
            self.first_container_sizes = container_sizes(sys._getframe(), folder)
            self.first_step = step
        elif step + MEASURED_EVERY > run.plan.total_steps:
            self.write_growing_graphs(step, folder)
            self.write_growing_tensors(counts, older, step, folder)
            self.write_growing_containers(step, folder)

    def write_growing_graphs(self, step: int, folder: Path) -> None:
        """Write the variables whose graph has grown by an operation or more in each update.

        Args:
            step: the current update.
            folder: the recipe's folder.
        """
        for variable, count in graph_sizes(sys._getframe(), folder).items():
            growth = count - self.first_graph_sizes.get(variable, count)
            if growth >= step - self.first_step:
                self.session.write(
                    GrowingGraph(step=step, variable=variable, operation_count=count, growth=growth)
                )

    def write_growing_containers(self, step: int, folder: Path) -> None:
        """Write the containers of the recipe that have grown since the first measurement.

        Args:
            step: the current update.
            folder: the recipe's folder.
        """
        for variable, size in container_sizes(sys._getframe(), folder).items():
            growth = size.item_count - self.first_container_sizes.get(variable, size).item_count
            if growth >= MIN_GROWTH:
                self.session.write(
                    GrowingContainer(
                        step=step,
                        variable=variable,
                        item_count=size.item_count,
                        growth=growth,
                        item_bytes=size.item_bytes,
                    )
                )

    def write_growing_tensors(
        self, counts: Counter[TensorType], tensors: list[torch.Tensor], step: int, folder: Path
    ) -> None:
        """Write the types of tensors whose number grows most since the first measurement.

        Args:
            counts: how many of the tensors have each type.
            tensors: the live tensors that are older than the current batch.
            step: the current update.
            folder: the recipe's folder.
        """
        assert self.first_counts is not None
        growths = {
            tensor_type: count - self.first_counts[tensor_type]
            for tensor_type, count in counts.items()
        }
        smallest_growth = max(MIN_GROWTH, max(growths.values(), default=0) // 2)
        for tensor_type, growth in growths.items():
            if growth < smallest_growth:
                continue
            count = counts[tensor_type]
            growing = [tensor for tensor in tensors if dtype_and_shape(tensor) == tensor_type]
            dtype, shape = tensor_type
            self.session.write(
                GrowingTensors(
                    step=step,
                    dtype=dtype,
                    shape=[*shape],
                    tensor_count=count,
                    growth=growth,
                    holder=holder_in_words(growing, sys._getframe(), folder),
                )
            )


def is_measured(step: int) -> bool:
    """Whether memory is measured after the update with this number, from 1."""
    return step >= FIRST_MEASURED and step % MEASURED_EVERY == 0


def live_tensors() -> list[torch.Tensor]:
    """Return all tensors that Python holds."""
    # `isinstance` would run code of objects that imitate a class, so it is not used here.
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def dtype_and_shape(tensor: torch.Tensor) -> TensorType:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages; views of one storage count once.

    Tensors without memory do not count: those on the meta device, and the fake tensors with which
    `torch.compile` traces a model.
    """
    sizes = {}
    for tensor in tensors:
        local = tensor._local_tensor if is_sharded(tensor) else tensor
        if local.layout == torch.strided and local.device.type != "meta" and not is_fake(local):
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def without_tensors(size: int | None, tensors: list[torch.Tensor], *, on_host: bool) -> int | None:
    """Return the memory of the host or of the device without that of some tensors.

    Args:
        size: bytes, or None if they are unknown.
        tensors: tensors on the host and on the device. Those of the other one do not matter.
    """
    if size is None:
        return None
    return size - storage_bytes([tensor for tensor in tensors if tensor.is_cpu == on_host])
