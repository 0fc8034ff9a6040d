"""Run a recipe whose images take long to read. Not a test.

python tests/slow_data.py MILLISECONDS_PER_SAMPLE RECIPE FLAGS...
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from common.data.image_batches.image_samples import CachedImages


def slowed(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return the method, but slower by `seconds` for each sample of its first argument."""

    def slow(self: CachedImages, samples: Any, *others: Any) -> Any:
        time.sleep(seconds * len(samples))
        return method(self, samples, *others)

    return slow


if __name__ == "__main__":
    seconds = float(sys.argv[1]) / 1000
    CachedImages.gather = slowed(CachedImages.gather, seconds)  # type: ignore[method-assign]
    CachedImages.fetch = slowed(CachedImages.fetch, seconds)  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
