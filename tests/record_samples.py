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

EPOCH = loader.Loader.epoch


def recorded_epoch(
    self: loader.Loader, epoch: int, first_update: int = 0
) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of an epoch, and write down each one's samples before it is used."""
    assert isinstance(self.order, loader.TrainingOrder)
    micro_batches = self.order.micro_batches(epoch, first_update)
    batches = EPOCH(self, epoch, first_update)
    first_number = first_update * self.order.accumulation
    with FILE.open("a") as file:
        for number, (samples, batch) in enumerate(
            zip(micro_batches, batches, strict=True), first_number
        ):
            update, micro_batch = divmod(number, self.order.accumulation)
            file.write(json.dumps([epoch, update, micro_batch, samples.tolist()]) + "\n")
            file.flush()
            yield batch


if __name__ == "__main__":
    FILE = Path(sys.argv[1], f"{time.time_ns()}-rank-{os.environ.get('RANK', '0')}.jsonl")
    FILE.parent.mkdir(exist_ok=True)
    loader.Loader.epoch = recorded_epoch  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
