"""Releases what a process uses for a run, once the run is over."""

from collections.abc import Iterable

import torch
from torch.distributed import FileStore, PrefixStore

from common.data.loader import Loader
from common.errors import Preempted, UserError
from common.lifecycle.crossed_shapes import allow_crossed_shapes
from common.lifecycle.end.error_report import report_once
from common.lifecycle.stages import Context
from common.measure.memory_limits import lift_limit
from common.ranks.agreement import announcements
from common.system.allocator import HEAP
from common.training.launch.notebook import forget_accelerator

FILE_STORES_OF_ENDED_RUNS: list[FileStore] = []


def release(
    context: Context,
    loaders: Iterable[Loader],
    error: BaseException | None,
    is_embedded: bool,
) -> None:
    """Release workers, the process group, the lock of the directory, and the rest.

    If a `UserError` ended the run, ranks other than 0 may wait here for rank 0 to print it: see
    `report_once`.

    Args:
        error: what ended the run early; None if the run finished.
        is_embedded: whether another program called the recipe: see `launch.notebook.is_embedded`.
    """
    context.config.unfreeze()  # a program may change the flags for its next run
    for loader in loaders:
        loader.close()
    # Before the process group is destroyed, because the ranks claim the report in its store.
    if isinstance(error, UserError):
        report_once(error, context.decisions.request, context.directory.path.name)
    # After any other error, other ranks may still wait in a collective that this rank has left.
    # The process group is not destroyed then.
    all_ranks_end = error is None or isinstance(error, (UserError, Preempted))
    if torch.distributed.is_initialized() and all_ranks_end:
        keep_file_store()
        torch.distributed.destroy_process_group()
    try:
        context.provenance.wait()  # a thread may still write to the directory
        context.directory.release()
    finally:
        if is_embedded:
            restore_process(context)


def keep_file_store() -> None:
    """Keep the store of the process group until the process ends, if the store is a file.

    Accelerate's `debug_launcher` lets ranks meet in a file, which it removes at its end. The store
    would remove the file as well, as soon as all ranks have freed it.
    """
    store = announcements()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        FILE_STORES_OF_ENDED_RUNS.append(store)


def restore_process(context: Context) -> None:
    """Undo what the run has set for the whole process, so that another run can begin in it."""
    context.decisions.request.release()
    lift_limit()
    HEAP.stop_keeping()
    forget_accelerator()
    allow_crossed_shapes()
