"""Runs on one process and on two, in a precision in which their updates can be compared.

Batch norm amplifies rounding, so all runs of a model with batch norm are in float64. Those of other
models are in fp32.
"""

from dataclasses import dataclass
from typing import TypedDict, Unpack

from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.layouts.compared_runs import (
    UpdateLayout,
    run_of_whole_batches,
    run_with_layout,
    update_layouts,
)
from common.tools.prove.layouts.expected_differences import (
    reason_processes_differ,
    sample_mixing_of,
)
from common.tools.prove.layouts.pairs import RunPair
from common.tools.prove.observation.launch_plan import PlannedInterruption
from common.tools.prove.proof_runs.bench import Bench, RunFailedError
from common.tools.prove.records.observed_run import ObservedRun

STOPPED_AFTER = COMPARED_UPDATE - 1  # the resumed run makes the compared update
# The signal comes after the check for signals of this update, so the next update is the last one.
SIGNALLED_AFTER = STOPPED_AFTER - 1
KILLED_AFTER = COMPARED_UPDATE + 2  # later than the checkpoint after update 3


class NoFloat64Error(Exception):
    """A recipe with batch norm fails in float64 alone. The message says how."""


class LayoutOptions(TypedDict, total=False):
    """The options of `run_with_layout` that do not depend on the precision."""

    interruptions: tuple[PlannedInterruption, ...]
    resumed_processes: int | None
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ProcessCountChange:
    """A run that is resumed on a different number of processes after an interruption."""

    name: str  # the name of the run
    interruption: PlannedInterruption
    processes: int  # the number of processes of the first launch
    resumed_processes: int
    phrase: str  # the change in words


PROCESS_COUNT_CHANGES = (
    ProcessCountChange(
        "from-one-to-two",
        PlannedInterruption(manner="stop", step=SIGNALLED_AFTER),
        1,
        2,
        f"a run stopped on one process after update {STOPPED_AFTER} and resumed on two",
    ),
    ProcessCountChange(
        "from-two-to-one",
        PlannedInterruption(manner="update", step=KILLED_AFTER),
        2,
        1,
        f"a run killed on two processes after update {KILLED_AFTER} and resumed on one",
    ),
)


@dataclass(frozen=True)
class ProcessRuns:
    """A run on one process and one on two, and further runs that are compared with them."""

    bench: Bench
    pair: RunPair  # the run on one process is the baseline, and that on two is the variant
    in_float64: bool  # whether all runs compute their networks in float64

    @property
    def accumulates(self) -> bool:
        """Whether the run on one process has several micro-batches in each update."""
        return self.pair.baseline_layout.accumulation > 1

    def pair_with_whole_batches(self) -> RunPair:
        """Return a run of whole batches, in fp32, and the run on one process.

        Raises:
            RunFailedError: the run of whole batches fails.
        """
        layout = update_layouts(self.bench).whole
        whole = run_of_whole_batches(self.bench)
        return RunPair(whole, self.pair.baseline, layout, self.pair.baseline_layout)

    def pair_with_change(self, change: ProcessCountChange) -> RunPair:
        """Return the run on one process, and one that is resumed on another number of processes.

        Raises:
            NoFloat64Error: the second run fails in float64 alone.
            RunFailedError: the second run fails in fp32.
        """
        is_begun_on_one = change.processes == 1
        first_layout = self.pair.baseline_layout if is_begun_on_one else self.pair.variant_layout
        make_run = run_in_float64 if self.in_float64 else run_with_layout
        changed_run = make_run(
            self.bench,
            change.name,
            first_layout,
            interruptions=(change.interruption,),
            resumed_processes=change.resumed_processes,
        )
        # In each of these runs, two processes make the compared update.
        return RunPair(
            self.pair.baseline,
            changed_run,
            self.pair.baseline_layout,
            self.pair.variant_layout,
        )


def runs_on_one_and_two(
    bench: Bench, name: str, environment: tuple[tuple[str, str], ...] = ()
) -> ProcessRuns:
    """Launch a run on two processes and one on one, or take them from the bench.

    A loss that compares samples with each other needs a larger batch on one process, instead of
    accumulation.

    Args:
        name: the name of the run on two processes.
        environment: additional variables of the run on two processes.

    Raises:
        NoFloat64Error: the model has batch norm, and a run fails in float64 alone.
        RunFailedError: a run fails in fp32.
    """
    layouts = update_layouts(bench)
    double = run_with_layout(bench, name, layouts.distributed, environment=environment)
    mixing = sample_mixing_of(double)
    in_float64 = bool(mixing.batch_norms) and reason_processes_differ(mixing) is None
    if in_float64:
        double = run_in_float64(bench, name, layouts.distributed, environment=environment)
    single_name = "divided"
    single_layout = layouts.divided
    if mixing.couples_samples:
        single_name = "whole"
        single_layout = layouts.whole
    make_run = run_in_float64 if in_float64 else run_with_layout
    single = make_run(bench, single_name, single_layout)
    return ProcessRuns(
        bench, RunPair(single, double, single_layout, layouts.distributed), in_float64
    )


def run_in_float64(
    bench: Bench, name: str, layout: UpdateLayout, **options: Unpack[LayoutOptions]
) -> ObservedRun:
    """Return a run in float64; see `run_with_layout`.

    Raises:
        NoFloat64Error: the run fails in float64 alone.
        RunFailedError: the run fails in fp32, too.
    """
    try:
        return run_with_layout(bench, name, layout, in_float64=True, **options)
    except RunFailedError as problem:
        run_with_layout(bench, name, layout, **options)  # raises an error if it fails in fp32, too
        raise NoFloat64Error(
            "batch norm amplifies rounding, so the updates have to be compared in float64, in "
            f"which the recipe fails: {problem}"
        ) from problem
