"""Run a recipe with known delays, and write down when its updates happened. Not a test.

python tests/record_times.py FOLDER RANK SECONDS_OF_DATA SECONDS_OF_WORK RECIPE FLAGS...

On the rank RANK, each micro-batch comes SECONDS_OF_DATA later, and the loop works on it for
SECONDS_OF_WORK longer. Each rank writes for each update: its number, when the loop had finished it,
when its logging had finished, how long the delays of data really were so far, and how long the loop
has waited for batches so far. Tests compare the meters with these times.
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

from common import run
from common.data import loader

RANK = os.environ.get("RANK", "0")
EPOCH = loader.Loader.epoch
RECORD = run.Run.record


class Delays:
    """The delays of this rank, in seconds, and how long they really took."""

    def __init__(self, data: float, work: float) -> None:
        self.data = data
        self.work = work
        self.waited = 0.0
        self.came = 0.0  # seconds between asking for a batch and having it

    def wait(self) -> None:
        """Delay a batch."""
        began = time.perf_counter()
        time.sleep(self.data)
        self.waited += time.perf_counter() - began


def delayed_epoch(self: Any, epoch: int, first_update: int = 0) -> Iterator[Any]:
    """Yield the batches of an epoch, each with a delay."""
    batches = EPOCH(self, epoch, first_update)
    began = time.perf_counter()
    for batch in batches:
        DELAYS.wait()
        DELAYS.came += time.perf_counter() - began
        yield batch
        began = time.perf_counter()


def record(self: Any, *tensors: Any) -> None:
    """Record an update after a delay, and write down when."""
    time.sleep(DELAYS.work)
    before = time.perf_counter()
    RECORD(self, *tensors)
    with FILE.open("a") as file:
        step = self.progress.global_step
        stamp = [step, before, time.perf_counter(), DELAYS.waited, DELAYS.came]
        file.write(json.dumps(stamp) + "\n")


if __name__ == "__main__":
    FILE = Path(sys.argv[1], f"rank-{RANK}.jsonl")
    FILE.parent.mkdir(exist_ok=True)
    is_slow = sys.argv[2] == RANK
    DELAYS = Delays(*(float(word) * is_slow for word in sys.argv[3:5]))
    loader.Loader.epoch = delayed_epoch  # type: ignore[method-assign]
    run.Run.record = record  # type: ignore[method-assign]
    sys.argv = sys.argv[5:]
    runpy.run_path(sys.argv[0], run_name="__main__")
