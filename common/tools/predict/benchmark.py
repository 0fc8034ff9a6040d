"""Measure how long a trained model takes to classify a batch."""

import itertools
import time
from collections.abc import Sequence

import numpy as np

from common.system.devices import device_name
from common.tools.predict.predictor import Predictor

WARM_UP_BATCHES = 3  # the number of first batches that are not measured
MIN_BATCHES = 20
MIN_SECONDS = 5.0  # the shortest duration of a measurement, with its warm-up


def benchmark(predictor: Predictor, inputs: Sequence[str]) -> dict[str, object]:
    """Return the latency and the throughput of batches, with the conditions of the measurement.

    A batch is measured from the files or texts to the probabilities on the host. The inputs are
    repeated until `MIN_BATCHES` were measured and `MIN_SECONDS` have passed.
    """
    endless_inputs = itertools.cycle(inputs)
    durations: list[float] = []  # seconds of each batch
    while len(durations) < WARM_UP_BATCHES + MIN_BATCHES or sum(durations) < MIN_SECONDS:
        started = time.perf_counter()
        predictor([*itertools.islice(endless_inputs, predictor.batch_size)])
        durations.append(time.perf_counter() - started)
    measured = durations[WARM_UP_BATCHES:]
    p50, p95 = np.percentile(measured, (50, 95)) * 1000
    return {
        "p50_milliseconds": round(p50, 3),
        "p95_milliseconds": round(p95, 3),
        "samples_per_second": round(predictor.batch_size / float(np.mean(measured)), 1),
        "batch_size": predictor.batch_size,
        "batches": len(measured),
        "device": device_name(predictor.accelerator.device),
        "mixed_precision": predictor.accelerator.mixed_precision,
    }
