"""Records that a collate function draws random numbers.

The library seeds the random generators before it reads a sample, so a sample does not depend on its
batch. What a collate function draws depends on the other samples of the batch. So losses and
figures change with the batch size, without a mistake in the loss or in the evaluation.

It writes a `CollateDraw` at the first such call of a process. A worker process that is forked
writes one, too. A worker that is started as a new process has no instruments, so it writes none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from common.data import dataset, iterable
from common.data.samples import Batch, Collate
from common.tools.prove.observation.run_observer import generator_digests
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import CollateDraw
from common.tools.prove.records.observed_run import differing_common_keys

# A worker process can't use an accelerator, so only the generators on the host are compared.
HOST = torch.device("cpu")


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = CollateObserver(session)
    session.wrap(dataset, "collated", observer.around_collated)
    session.wrap(iterable, "collated", observer.around_collated)


class CollateObserver:
    """Compares the states of the random generators before and after a call of a collate function.

    They are those of torch, NumPy and Python.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.has_written = False

    def around_collated(
        self,
        original: Callable[[Collate, list[Any], Sequence[int] | None], Batch],
        collate: Collate,
        rows: list[Any],
        indices: Sequence[int] | None,
    ) -> Batch:
        """Make a batch; at the first one with draws, write the generators that have changed."""
        if self.has_written or collate is default_collate:
            return original(collate, rows, indices)
        before = generator_digests(HOST)
        batch = original(collate, rows, indices)
        drawn = differing_common_keys(before, generator_digests(HOST))
        if drawn:
            self.has_written = True
            self.session.write(CollateDraw(step=self.session.step, generators=drawn))
        return batch
