"""Checks that training uses each sample once an epoch, and an evaluation each sample once."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.system.wording import counted
from common.tools.prove.checks.base import Check
from common.tools.prove.layouts.compared_runs import run_with_layout, update_layouts
from common.tools.prove.proof_runs.bench import Bench, RunFailedError
from common.tools.prove.proof_runs.interrupted_run import interrupted_spec
from common.tools.prove.records.instrument_records import (
    EvaluatedSamples,
    MissingSamples,
    UnusedSamples,
)
from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import (
    EvaluationBatch,
    EvaluationFigures,
    MicroBatch,
    RecordedMicroBatch,
)
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict

MIN_BATCHES = 3  # a position is unused if it has no gradient in at least this many batches
MAX_NAMED = 5  # the most samples that a sentence lists
ADVICE_TRAINING = (
    "use each batch of run.batches(train_loader) whole, and call run.record once for each"
)
ADVICE_EVALUATION = (
    "read the whole loader, `for batch in loader`; with run.equal_batches(loader), apply the mask "
    "to everything that is added up"
)

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
    evaluations = sum(len(complete_evaluations(run)) for run in runs)
    samples = bench.reference.start_record.split_sizes["train"]
    starts = sum(len(run.processes_of_rank(0)) for run in runs)
    epochs = ", ".join(f"{len(completed_epochs(run))} of {run.name}" for run in runs)
    compared = (
        f"{samples} training samples and {evaluations} evaluations, in {len(runs)} runs with "
        f"{starts} starts; whole epochs: {epochs}{element_counts_in_words(element_counts)}"
    )
    return failed_verdict(compared, causes) if causes else Verdict(True, compared)


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
    causes = (
        cause_of_unrecorded_batch(run),
        cause_of_changed_samples(run),
        cause_of_wrong_epoch(run),
        cause_of_missing_rows(run),
        cause_of_rows_without_gradient(run),
        cause_of_wrong_evaluation(run, element_counts),
        cause_of_unseen_samples(run),
    )
    return [cause for cause in causes if cause is not None]


# Training


def cause_of_unrecorded_batch(run: ObservedRun) -> Cause | None:
    """Return a cause if the loop takes a batch without recording it, or None."""
    for process in run.processes:
        pending: MicroBatch | None = None  # the batch that the loop has not recorded yet
        for record in process.records:
            if isinstance(record, RecordedMicroBatch):
                pending = None
            if not isinstance(record, MicroBatch):
                continue
            if pending is not None:
                return Cause(
                    f"the loop took a batch for update {pending.step + 1} and did not record it: "
                    f"{len(pending.sample_indices)} samples were skipped "
                    f"({first_samples(pending.sample_indices)})",
                    ADVICE_TRAINING,
                )
            pending = record
    return None


def cause_of_changed_samples(run: ObservedRun) -> Cause | None:
    """Return a cause if a resumed run repeats an update with different samples, or None."""
    samples: dict[tuple[int, int, int, int], list[int]] = {}
    for process, record in run.all(MicroBatch):
        # On a different number of processes, the ranks get different samples of the update.
        world_size = len(run.processes_of_launch(process.launch))
        key = (world_size, process.rank, record.step, record.micro_batch)
        earlier_samples = samples.setdefault(key, record.sample_indices)
        if earlier_samples != record.sample_indices:
            return Cause(
                f"update {record.step + 1} used the samples {first_samples(earlier_samples)}, and "
                f"after the resume {first_samples(record.sample_indices)}",
                "let the run's loader order the samples: its order depends only on seed and epoch",
            )
    return None


def final_micro_batches(run: ObservedRun) -> list[MicroBatch]:
    """Return the micro-batches of all ranks that count for the result.

    If a resumed run repeated an update, only the micro-batches of the last launch count.
    """
    last_launch: dict[int, int] = {}
    for process, record in run.all(MicroBatch):
        last_launch[record.step] = max(process.launch, last_launch.get(record.step, 0))
    return [
        record
        for process, record in run.all(MicroBatch)
        if last_launch[record.step] == process.launch
    ]


def completed_epochs(run: ObservedRun) -> list[int]:
    """Return the numbers of the epochs, from 0, of which a run has made all updates.

    It may have made them in several launches.
    """
    updates: defaultdict[int, set[int]] = defaultdict(set)
    for record in final_micro_batches(run):
        updates[record.epoch].add(record.step)
    updates_per_epoch = run.start_record.updates_per_epoch
    return sorted(epoch for epoch, steps in updates.items() if len(steps) == updates_per_epoch)


def cause_of_wrong_epoch(run: ObservedRun) -> Cause | None:
    """Return a cause if an epoch uses a sample twice or leaves out more than it may, or None.

    The last, incomplete batch of an epoch is dropped, so that all updates have the same weight.
    """
    started = run.start_record
    size = started.split_sizes["train"]
    samples_per_epoch = started.updates_per_epoch * started.samples_per_update
    # How often each epoch used each sample.
    uses: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for record in final_micro_batches(run):
        uses[record.epoch].update(record.sample_indices)
    completed = completed_epochs(run)
    for epoch, counts in sorted(uses.items()):
        repeated = [sample for sample, count in counts.items() if count > 1]
        if repeated:
            return Cause(
                f"epoch {epoch + 1} used {len(repeated)} training samples more than once "
                f"({first_samples(repeated)})",
                ADVICE_TRAINING,
            )
        if epoch in completed and len(counts) != samples_per_epoch:
            return Cause(
                f"epoch {epoch + 1} used {len(counts)} of {size} training samples, and only "
                f"{size - samples_per_epoch} may be left out, as an incomplete batch",
                ADVICE_TRAINING,
            )
    return None


def cause_of_missing_rows(run: ObservedRun) -> Cause | None:
    """Return a cause if the model gets fewer samples than a batch has, or None."""
    for _, record in run.all(MissingSamples):
        return Cause(
            f"the model gets only {record.received_count} of the {record.sample_count} samples of "
            f"a batch, first in update {record.step + 1}",
            ADVICE_TRAINING,
        )
    return None


def cause_of_rows_without_gradient(run: ObservedRun) -> Cause | None:
    """Return a cause if the loss never depends on some positions of a batch, or None."""
    # The unused positions of each batch, by the size of the batch.
    unused_by_size: defaultdict[int, list[set[int]]] = defaultdict(list)
    for _, record in run.all(UnusedSamples):
        unused_by_size[record.sample_count].append({*record.unused_positions})
    for size, unused_by_batch in unused_by_size.items():
        never_used = set.intersection(*unused_by_batch)
        has_enough_batches = len(unused_by_batch) >= MIN_BATCHES
        # If no position is used, the whole batch has no gradient, which is a different mistake.
        is_partly_used = 0 < len(never_used) < size
        if has_enough_batches and is_partly_used:
            positions = ", ".join(str(row + 1) for row in sorted(never_used)[:MAX_NAMED])
            return Cause(
                f"the loss does not depend on {len(never_used)} of the {size} samples of a batch, "
                f"in all {len(unused_by_batch)} batches at the same place ({positions})",
                "compute the loss from all rows of the model's output",
            )
    return None


# Evaluations


@dataclass(frozen=True)
class CompleteEvaluation:
    """The samples that all ranks have read in an evaluation that was not interrupted."""

    step: int
    phase: str
    split: str  # the split of the figures
    figures: dict[str, float]
    uses: dict[str, Counter[int]]  # how often each sample was read, by split


def complete_evaluations(run: ObservedRun) -> list[CompleteEvaluation]:
    """Return the evaluations of all launches, except those that were interrupted."""
    evaluations = []
    for number in sorted({process.launch for process in run.processes}):
        processes = run.processes_of_launch(number)
        for record in processes[0].of(EvaluationFigures):
            uses: defaultdict[str, Counter[int]] = defaultdict(Counter)
            for batch in batches_of(processes, record):
                uses[batch.split].update(batch.sample_indices)
            evaluations.append(
                CompleteEvaluation(
                    record.step, record.phase, record.split, record.figures, dict(uses)
                )
            )
    return evaluations


def batches_of(
    processes: list[ObservedProcess], evaluated: EvaluationFigures
) -> Iterator[EvaluationBatch]:
    """Yield the batches of one evaluation of all ranks.

    Args:
        processes: the processes of one launch.
        evaluated: the record of the evaluation.
    """
    for process in processes:
        for record in process.of(EvaluationBatch):
            if (record.step, record.phase) == (evaluated.step, evaluated.phase):
                yield record


def counts_of_elements(reference: ObservedRun) -> dict[str, float]:
    """Return the logged counts that are no numbers of samples, by split.

    An evaluation may count elements of samples, such as the tokens whose labels are not ignored.
    Its count says nothing about the samples if it read each of them equally often.

    Args:
        reference: the run on one process.
    """
    counts = {}
    for evaluation in complete_evaluations(reference):
        count = evaluation.figures.get("count")
        uses = evaluation.uses.get(evaluation.split, Counter())
        has_repetitions = len(set(uses.values())) > 1
        counts_each_sample = count in (len(uses), uses.total())
        if count is None or not float(count).is_integer():
            continue
        if not has_repetitions and not counts_each_sample:
            counts[evaluation.split] = count
    return counts


def element_counts_in_words(element_counts: Mapping[str, float]) -> str:
    """Return a remark on the counts that are no numbers of samples; empty if there are none."""
    return "".join(
        f"; `count` of {split} is {count:g}, so it counts elements of its samples, such as labels "
        "(each sample was read equally often; check that this is meant)"
        for split, count in element_counts.items()
    )


def cause_of_wrong_evaluation(
    run: ObservedRun, element_counts: Mapping[str, float]
) -> Cause | None:
    """Return the cause for the first evaluation with missing or repeated samples, or None."""
    for evaluation in complete_evaluations(run):
        split = evaluation.split
        counts_elements = split in element_counts
        cause = cause_of_evaluation(
            evaluation, run.start_record.split_sizes[split], counts_elements
        )
        if cause is not None:
            return cause
    return None


def cause_of_evaluation(
    evaluation: CompleteEvaluation, size: int, counts_elements: bool
) -> Cause | None:
    """Return the cause if an evaluation leaves out a sample or counts one too often, or None.

    Args:
        size: the number of samples in the split.
        counts_elements: whether the reference run counts elements of the samples.
    """
    evaluation_name = f"the {evaluation.phase} evaluation after update {evaluation.step}"
    uses = evaluation.uses.get(evaluation.split)
    if uses is None:
        return cause_of_other_split(evaluation, evaluation_name)
    if len(uses) < size:
        return Cause(
            f"{evaluation_name} read {len(uses)} of the {size} samples of {evaluation.split}",
            ADVICE_EVALUATION,
        )
    # An evaluation may read its split several times. Each pass reads each sample at least once.
    passes = min(uses.values())
    repeated = [sample for sample, count in uses.items() if count > passes]
    logged_count = evaluation.figures.get("count")
    if logged_count is None and repeated:
        return Cause(
            f"{evaluation_name} read {len(uses)} samples{repetitions_in_words(repeated)}, and logs "
            "no `count`",
            f"{ADVICE_EVALUATION}; log `count`, the number of samples that count",
        )
    if logged_count in (None, size) or (counts_elements and not repeated):
        return None
    sentence = (
        f"{evaluation_name} counted {logged_count:g} samples, and {evaluation.split} has {size}"
    )
    if repeated:
        return Cause(
            f"{sentence}{repetitions_in_words(repeated)}: samples that only fill up a batch must "
            "not count",
            ADVICE_EVALUATION,
        )
    times = "once" if passes == 1 else f"{passes} times"
    return Cause(
        f"{sentence}, each of which it read {times}",
        "count each sample once, and add up `count` over all processes, as Sums does",
    )


def repetitions_in_words(repeated: list[int]) -> str:
    """Return the end of a sentence about the samples that an evaluation read too often."""
    return (
        f", and it read {counted(len(repeated), 'sample')} twice or more "
        f"({first_samples(repeated)})"
    )


def cause_of_other_split(evaluation: CompleteEvaluation, evaluation_name: str) -> Cause | None:
    """Return the cause if an evaluation reads only splits that its figures do not stand for.

    This function is for an evaluation that has read no sample of its split. If the recipe has made
    the loader itself, or reads none, the samples are unknown, and the result is None.
    """
    splits = sorted(evaluation.uses)
    are_samples_unknown = not splits or "" in splits  # "" stands for a loader of the recipe's own
    if are_samples_unknown:
        return None
    return Cause(
        f"{evaluation_name} stands for the split {evaluation.split}, but read only "
        f"{' and '.join(splits)}",
        f"evaluate on the loader of {evaluation.split} that run.loaders(data) returns",
    )


def cause_of_unseen_samples(run: ObservedRun) -> Cause | None:
    """Return the cause if an evaluation reads samples without passing them to the model, or None.

    If the model got no sample of the split, the recipe evaluates without it. That can't be judged.
    """
    for process, record in run.all(EvaluatedSamples):
        if 0 < len(record.unseen_indices) < record.sample_count:
            rank = f" on process {process.rank}" if run.world_size > 1 else ""
            unseen = first_samples(record.unseen_indices)
            return Cause(
                f"the {record.phase} evaluation after update {record.step}{rank} read "
                f"{record.sample_count} samples of {record.split or 'its data'}, but did not pass "
                f"{len(record.unseen_indices)} of them to the model ({unseen})",
                "pass all samples of each batch to the model, also of the last, smaller batch",
            )
    return None


def first_samples(samples: list[int]) -> str:
    """Return the first samples as text, such as "3, 7, 9"."""
    text = ", ".join(str(sample) for sample in samples[:MAX_NAMED])
    return f"{text}, …" if len(samples) > MAX_NAMED else text


CHECK = Check(
    "samples",
    "each training sample is used once an epoch, and each evaluation sample once, over all ranks "
    "and across interruptions",
    judge_samples,
    compares_runs=True,
)
