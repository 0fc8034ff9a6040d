"""Runs without the usual observers, to measure memory and speed.

One has updates alone. The other has an evaluation after each update, and many saves and epochs.
"""

from itertools import pairwise
from statistics import median

from common.tools.prove.bench import Bench, RunSpec
from common.tools.prove.instruments.memory import EVERY
from common.tools.prove.observation import ObservedRun, Recorded

MOST_UPDATES = 60
LEAST_UPDATES = 40
SECONDS = 60.0  # that the run may take, if it is no faster than the reference run
SAVE_EVERY = 4  # updates of the eventful run
NEVER = "100000"  # updates, more than a proof makes


def steady_run(bench: Bench) -> ObservedRun:
    """Return the run; its number of updates depends on how long those of the reference took."""
    updates = updates_in(SECONDS, seconds_of_update(bench.reference))
    spec = RunSpec(
        "steady",
        (
            *("--max-steps", str(updates), "--epochs", "1000", "--log-every", str(EVERY)),
            *("--eval-every", NEVER, "--checkpoint-every", NEVER),
            *("--gradient-accumulation-steps", "1"),
        ),
        instruments=tuple(f"common.tools.prove.instruments.{name}" for name in ("memory", "clock")),
        is_observed=False,
    )
    return bench.run(spec)


def eventful_run(bench: Bench) -> ObservedRun:
    """Return a run that evaluates after each update and often saves, to measure memory alone."""
    spec = RunSpec(
        "eventful",
        (
            *("--max-steps", str(LEAST_UPDATES), "--epochs", "1000", "--log-every", str(EVERY)),
            *("--eval-every", "1", "--checkpoint-every", str(SAVE_EVERY)),
            *("--gradient-accumulation-steps", "1"),
        ),
        instruments=("common.tools.prove.instruments.memory",),
        is_observed=False,
    )
    return bench.run(spec)


def updates_in(seconds: float, seconds_of_one: float) -> int:
    """Return how many updates fit into a time, a multiple of `EVERY` within the limits."""
    count = int(min(MOST_UPDATES, seconds / max(seconds_of_one, 1e-6)))
    return max(LEAST_UPDATES, count // EVERY * EVERY)


def seconds_of_update(run: ObservedRun) -> float:
    """Return the median time from one update of rank 0 to the next."""
    clocks = [record.clock for record in run.launches[0].of(Recorded) if record.is_update]
    times = [later - earlier for earlier, later in pairwise(clocks)]
    return median(times) if times else 0.0
