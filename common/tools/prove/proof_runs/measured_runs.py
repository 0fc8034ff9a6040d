"""Two runs that measure memory and speed, so they leave out the records that read tensors.

The steady run only makes updates. The eventful run has an evaluation after each update, and many
saves.
"""

from itertools import pairwise
from statistics import median

from common.tools.prove.instruments.memory import MEASURED_EVERY
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.proof_runs.recipe_flags import as_words
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import RecordedMicroBatch

MAX_UPDATES = 60
MIN_UPDATES = 40
# The steady run has as many updates as the reference run would make in this time, within the limits
# above.
MAX_SECONDS = 60.0
SAVE_EVERY = 4  # updates, in the eventful run
MANY_EPOCHS = 1000  # so many that `max_steps` ends the run
NEVER = 100_000  # updates, more than a run of a proof makes


def steady_run(bench: Bench) -> ObservedRun:
    """Train without evaluations and saves, for about `MAX_SECONDS`, and return the observed run.

    The number of updates depends on the speed of the reference run.
    """
    updates = updates_in(MAX_SECONDS, median_update_seconds(bench.reference))
    spec = RunSpec(
        "steady",
        as_words(
            max_steps=updates,
            epochs=MANY_EPOCHS,
            log_every=MEASURED_EVERY,
            eval_every=NEVER,
            checkpoint_every=NEVER,
            gradient_accumulation_steps=1,
        ),
        instruments=(
            "common.tools.prove.instruments.memory",
            "common.tools.prove.instruments.clock",
        ),
        reads_tensors=False,
    )
    return bench.run(spec)


def eventful_run(bench: Bench) -> ObservedRun:
    """Return a run that evaluates after each update and saves often."""
    spec = RunSpec(
        "eventful",
        as_words(
            max_steps=MIN_UPDATES,
            epochs=MANY_EPOCHS,
            log_every=MEASURED_EVERY,
            eval_every=1,
            checkpoint_every=SAVE_EVERY,
            gradient_accumulation_steps=1,
            # With so many evaluations, a recipe that stops early by default would end too soon.
            early_stopping=None,
        ),
        instruments=("common.tools.prove.instruments.memory",),
        reads_tensors=False,
    )
    return bench.run(spec)


def updates_in(seconds: float, seconds_per_update: float) -> int:
    """Return how many updates fit into a time, from `MIN_UPDATES` to `MAX_UPDATES`.

    The number is a multiple of `MEASURED_EVERY`.
    """
    count = int(min(MAX_UPDATES, seconds / max(seconds_per_update, 1e-6)))
    return max(MIN_UPDATES, count // MEASURED_EVERY * MEASURED_EVERY)


def median_update_seconds(run: ObservedRun) -> float:
    """Return the median seconds from one update of rank 0 to the next; 0 for a single update."""
    clocks = [
        record.clock_seconds
        for record in run.processes[0].of(RecordedMicroBatch)
        if record.is_update
    ]
    times = [later - earlier for earlier, later in pairwise(clocks)]
    return median(times) if times else 0.0
