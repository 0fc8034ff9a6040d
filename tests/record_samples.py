"""Run a recipe and write down which samples each process trains on. Not a test.

python tests/record_samples.py FOLDER RECIPE FLAGS...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.data import loader

ORIGINAL = loader.Loader.make_batches


def make_batches(
    self: loader.Loader, micro_batches: Any, epoch: int | None, first_micro_batch: int = 0
) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of the loader, and write down each one's samples before it is used."""
    batches = ORIGINAL(self, micro_batches, epoch, first_micro_batch)
    if epoch is None:
        yield from batches
        return
    assert isinstance(self.order, loader.TrainingOrder)
    per_epoch = self.order.updates_per_epoch * self.order.accumulation
    first_number = per_epoch - len(micro_batches) + first_micro_batch
    with FILE.open("a") as file:
        for number, batch in enumerate(batches, first_number):
            samples = micro_batches[number - per_epoch + len(micro_batches)]
            update, micro_batch = divmod(number, self.order.accumulation)
            file.write(json.dumps([epoch, update, micro_batch, samples.tolist()]) + "\n")
            file.flush()
            yield batch


if __name__ == "__main__":
    FILE = Path(sys.argv[1], f"{time.time_ns()}-rank-{os.environ.get('RANK', '0')}.jsonl")
    FILE.parent.mkdir(exist_ok=True)
    loader.Loader.make_batches = make_batches  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
