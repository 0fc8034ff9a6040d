"""Checks that training uses each sample once an epoch, and an evaluation each sample once."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from common.tools.prove.checks.base import Check
from common.tools.prove.checks.evaluation_samples import (
    causes_in_evaluations,
    complete_evaluations,
    counts_of_elements,
    element_counts_in_words,
)
from common.tools.prove.checks.training_samples import causes_in_training, completed_epochs
from common.tools.prove.layouts.compared_runs import run_with_layout, update_layouts
from common.tools.prove.proof_runs.bench import Bench, RunFailedError
from common.tools.prove.proof_runs.interrupted_run import interrupted_spec
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict

NO_COMPLETED_EPOCH = Cause(
    "the run on two processes completed no epoch, so the check can't tell whether an epoch uses "
    "all samples",
    "pass fewer --updates or more --epochs, so that an epoch is shorter",
)


def judge_samples(bench: Bench) -> Verdict:
    """Check the reference run, a divided one, one on two processes, and an interrupted one."""
    layouts = update_layouts(bench)
    distributed = run_with_layout(bench, "two-processes", layouts.distributed)
    runs = [
        bench.reference,
        run_with_layout(bench, "divided", layouts.divided),
        distributed,
        *interrupted_runs(bench),
    ]
    causes: list[Cause] = []
    element_counts = counts_of_elements(bench.reference)
    for run in runs:
        causes += causes_of(run, element_counts)
    if not completed_epochs(distributed):
        causes.append(NO_COMPLETED_EPOCH)
    compared = compared_in_words(runs) + element_counts_in_words(element_counts)
    return failed_verdict(compared, causes) if causes else Verdict(True, compared)


def compared_in_words(runs: Sequence[ObservedRun]) -> str:
    """Return how many samples, evaluations, starts and whole epochs were checked.

    Args:
        runs: the checked runs, the reference run first.
    """
    sample_count = runs[0].start_record.split_sizes["train"]
    evaluation_count = sum(len(complete_evaluations(run)) for run in runs)
    start_count = sum(len(run.processes_of_rank(0)) for run in runs)
    epochs = ", ".join(f"{len(completed_epochs(run))} of {run.name}" for run in runs)
    return (
        f"{sample_count} training samples and {evaluation_count} evaluations, in {len(runs)} runs "
        f"with {start_count} starts; whole epochs: {epochs}"
    )


def interrupted_runs(bench: Bench) -> Iterator[ObservedRun]:
    """Yield the run that the check `resumes` interrupts.

    If the run failed, that check reports the failure, and this function yields nothing.
    """
    with contextlib.suppress(RunFailedError):
        yield bench.run(interrupted_spec(bench))


def causes_of(run: ObservedRun, element_counts: Mapping[str, float]) -> list[Cause]:
    """Return the mistakes in the samples of a run, at most one of each sort.

    Args:
        element_counts: the result of `counts_of_elements` for the reference run.
    """
    return [*causes_in_training(run), *causes_in_evaluations(run, element_counts)]


CHECK = Check(
    "samples",
    "each training sample is used once an epoch, and each evaluation sample once, over all ranks "
    "and across interruptions",
    judge_samples,
    compares_runs=True,
)
