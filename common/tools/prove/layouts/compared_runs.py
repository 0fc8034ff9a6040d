"""Runs whose updates are divided in different ways into micro-batches and processes.

Dropout is off in these runs, because the layouts would draw different masks. The instruments of
these runs record what the comparisons need.
"""

from dataclasses import dataclass

from common.tools.prove.observation.launch_plan import PlannedInterruption
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.proof_runs.recipe_flags import as_words
from common.tools.prove.records.observed_run import ObservedRun

# The instruments of the compared runs, as names of modules.
INSTRUMENTS = tuple(
    f"common.tools.prove.instruments.{name}"
    for name in (
        "without_dropout",
        "updates",
        "changed_gradients",
        "own_draws",
        "collate_draws",
        "mixing",
        "losses",
        "samples_used",
        "evaluated_samples",
    )
)
# One more instrument, for runs whose networks are computed in float64.
IN_FLOAT64 = "common.tools.prove.instruments.in_float64"
UPDATES = 6  # the number of compared updates
# The evaluation batches of the run of whole batches are this many times as small as those of the
# other runs. A figure that is wrongly a mean over batches, such as a calibration error, hardly
# differs between two large batch sizes. A correct figure is the same with any.
EVALUATION_BATCH_DIVISOR = 8
MIN_EVALUATION_BATCH = 2  # samples


@dataclass(frozen=True)
class UpdateLayout:
    """The division of an update into micro-batches and processes.

    Its text, such as "2 × 16", has the number of micro-batches first.
    """

    batch_size: int  # samples in a micro-batch of one process
    accumulation: int  # micro-batches of one process
    processes: int = 1

    def __str__(self) -> str:
        ranks = f" on {self.processes} processes" if self.processes > 1 else ""
        return f"{self.accumulation} × {self.batch_size}{ranks}"


@dataclass(frozen=True)
class UpdateLayouts:
    """Three layouts of the same updates."""

    whole: UpdateLayout  # one micro-batch on one process
    divided: UpdateLayout  # two micro-batches on one process
    distributed: UpdateLayout  # one micro-batch on each of two processes


def update_layouts(bench: Bench) -> UpdateLayouts:
    """Return three layouts of an update with about as many samples as in `Bench.reference`."""
    half = max(1, bench.batch_size * bench.accumulation // 2)
    return UpdateLayouts(
        whole=UpdateLayout(2 * half, accumulation=1),
        divided=UpdateLayout(half, accumulation=2),
        distributed=UpdateLayout(half, accumulation=1, processes=2),
    )


def run_of_whole_batches(bench: Bench) -> ObservedRun:
    """Return a run with one micro-batch in each update, which evaluates in small batches.

    Raises:
        RunFailedError: the launch has failed.
    """
    layout = update_layouts(bench).whole
    evaluation_batch_size = max(MIN_EVALUATION_BATCH, bench.batch_size // EVALUATION_BATCH_DIVISOR)
    return run_with_layout(bench, "whole", layout, evaluation_batch_size=evaluation_batch_size)


def run_with_layout(
    bench: Bench,
    name: str,
    layout: UpdateLayout,
    *,
    evaluation_batch_size: int | None = None,
    interruptions: tuple[PlannedInterruption, ...] = (),
    resumed_processes: int | None = None,
    environment: tuple[tuple[str, str], ...] = (),
    in_float64: bool = False,
) -> ObservedRun:
    """Return a run whose updates have a layout, without dropout.

    `evaluation_batch_size`, `interruptions`, `resumed_processes` and `environment` are fields of
    `RunSpec`.

    Args:
        name: the name of the run's folder; with `in_float64`, the folder's name has an ending.
        in_float64: whether to compute the networks in float64 instead of fp32.

    Raises:
        RunFailedError: a launch has failed.
    """
    spec = RunSpec(
        f"{name}-in-float64" if in_float64 else name,
        flags_of_layout(bench, layout, in_float64),
        processes=layout.processes,
        instruments=(*INSTRUMENTS, IN_FLOAT64) if in_float64 else INSTRUMENTS,
        evaluation_batch_size=evaluation_batch_size,
        interruptions=interruptions,
        resumed_processes=resumed_processes,
        environment=environment,
    )
    return bench.run(spec)


def flags_of_layout(bench: Bench, layout: UpdateLayout, in_float64: bool) -> tuple[str, ...]:
    """Return the words of the flags of a run whose updates have a layout.

    Of its updates, only the first `UPDATES` are compared. But a run in fp32 makes a whole epoch,
    because `judge_samples` also takes such runs, and checks that an epoch uses all samples.
    """
    effective_batch = layout.batch_size * layout.accumulation * layout.processes
    updates = UPDATES
    if not in_float64:
        updates = max(UPDATES, bench.flags.training_samples // effective_batch)
    flags = as_words(
        batch_size=layout.batch_size,
        gradient_accumulation_steps=layout.accumulation,
        max_steps=updates,
        log_every=1,
        mixed_precision="no",
    )
    if in_float64:
        # Compression rounds gradients, but only those that several processes exchange. So layouts
        # with different numbers of processes would differ by far more than float64 does.
        flags += as_words(gradient_compression="no")
    return flags
