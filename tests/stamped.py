"""Run a recipe with known delays, and write down when its updates were made: not a test itself.

python tests/stamped.py FOLDER RANK SECONDS_OF_DATA SECONDS_OF_WORK RECIPE FLAGS...

On one rank the loop waits so long for each micro-batch, and works so much longer on it. Each rank
writes, for each update, when the loop was done with it, when its logging was over, how long
the delays really were until then, and how long all batches together took to come: what the meters
say can be compared with that.
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
MAKE_BATCHES, RECORD = loader.Loader.make_batches, run.Run.record


class Delays:
    """Sleeps on one rank, and adds up how long."""

    def __init__(self, data: float, work: float) -> None:
        self.data, self.work = data, work
        self.waited = 0.0
        self.came = 0.0  # seconds between asking for a batch and having it

    def wait(self) -> None:
        """Be slow with data."""
        began = time.perf_counter()
        time.sleep(self.data)
        self.waited += time.perf_counter() - began


def make_batches(self: Any, micro_batches: Any, epoch: int | None, first: int = 0) -> Iterator[Any]:
    """Yield what the loader yields, late."""
    batches = MAKE_BATCHES(self, micro_batches, epoch, first)
    began = time.perf_counter()
    for made in batches:
        if epoch is not None:
            DELAYS.wait()
            DELAYS.came += time.perf_counter() - began
        yield made
        began = time.perf_counter()


def record(self: Any, *tensors: Any) -> None:
    """Work longer, and stamp the update."""
    time.sleep(DELAYS.work)
    before = time.perf_counter()
    RECORD(self, *tensors)
    with FILE.open("a") as file:
        stamp = [self.progress.global_step, before, time.perf_counter(), DELAYS.waited, DELAYS.came]
        file.write(json.dumps(stamp) + "\n")


if __name__ == "__main__":
    FILE = Path(sys.argv[1], f"rank-{RANK}.jsonl")
    FILE.parent.mkdir(exist_ok=True)
    is_slow = sys.argv[2] == RANK
    DELAYS = Delays(*(float(word) * is_slow for word in sys.argv[3:5]))
    loader.Loader.make_batches = make_batches  # type: ignore[method-assign]
    run.Run.record = record  # type: ignore[method-assign]
    sys.argv = sys.argv[5:]
    runpy.run_path(sys.argv[0], run_name="__main__")
