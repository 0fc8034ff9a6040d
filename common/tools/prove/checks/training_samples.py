"""Finds mistakes in how a training uses its samples: each sample counts once an epoch."""

from collections import Counter, defaultdict

from common.tools.prove.checks.samples_in_words import MAX_NAMED, first_samples
from common.tools.prove.records.instrument_records import MissingSamples, UnusedSamples
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import MicroBatch, RecordedMicroBatch
from common.tools.prove.verdicts import Cause

MIN_BATCHES = 3  # a position is unused if it has no gradient in at least this many batches
ADVICE = "use each batch of run.batches(train_loader) whole, and call run.record once for each"


def causes_in_training(run: ObservedRun) -> list[Cause]:
    """Return the mistakes in the training samples of a run, at most one of each sort."""
    causes = (
        cause_of_unrecorded_batch(run),
        cause_of_changed_samples(run),
        cause_of_wrong_epoch(run),
        cause_of_missing_samples(run),
        cause_of_unused_samples(run),
    )
    return [cause for cause in causes if cause is not None]


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
                    ADVICE,
                )
            pending = record
    return None


def cause_of_changed_samples(run: ObservedRun) -> Cause | None:
    """Return a cause if a resumed run repeats an update with different samples, or None."""
    first_used: dict[tuple[int, int, int, int], list[int]] = {}
    for process, record in run.all(MicroBatch):
        # On a different number of processes, the ranks get different samples of the update.
        world_size = len(run.processes_of_launch(process.launch))
        key = (world_size, process.rank, record.step, record.micro_batch)
        earlier_samples = first_used.setdefault(key, record.sample_indices)
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
    steps_by_epoch: defaultdict[int, set[int]] = defaultdict(set)
    for record in final_micro_batches(run):
        steps_by_epoch[record.epoch].add(record.step)
    completed = []
    for epoch, steps in sorted(steps_by_epoch.items()):
        if len(steps) == run.start_record.updates_per_epoch:
            completed.append(epoch)
    return completed


def cause_of_wrong_epoch(run: ObservedRun) -> Cause | None:
    """Return a cause if an epoch uses a sample twice or leaves out more than it may, or None.

    The last, incomplete batch of an epoch is dropped, so that all updates have the same weight.
    """
    start = run.start_record
    size = start.split_sizes["train"]
    samples_per_epoch = start.updates_per_epoch * start.samples_per_update
    # How often each epoch used each sample.
    use_counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for record in final_micro_batches(run):
        use_counts[record.epoch].update(record.sample_indices)
    completed = completed_epochs(run)
    for epoch, counts in sorted(use_counts.items()):
        repeated = [sample for sample, count in counts.items() if count > 1]
        if repeated:
            return Cause(
                f"epoch {epoch + 1} used {len(repeated)} training samples more than once "
                f"({first_samples(repeated)})",
                ADVICE,
            )
        if epoch in completed and len(counts) != samples_per_epoch:
            return Cause(
                f"epoch {epoch + 1} used {len(counts)} of {size} training samples, and only "
                f"{size - samples_per_epoch} may be left out, as an incomplete batch",
                ADVICE,
            )
    return None


def cause_of_missing_samples(run: ObservedRun) -> Cause | None:
    """Return a cause if the model gets fewer samples than a batch has, or None."""
    for _, record in run.all(MissingSamples):
        return Cause(
            f"the model gets only {record.received_count} of the {record.sample_count} samples of "
            f"a batch, first in update {record.step + 1}",
            ADVICE,
        )
    return None


def cause_of_unused_samples(run: ObservedRun) -> Cause | None:
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
            positions = ", ".join(str(position + 1) for position in sorted(never_used)[:MAX_NAMED])
            return Cause(
                f"the loss does not depend on {len(never_used)} of the {size} samples of a batch, "
                f"in all {len(unused_by_batch)} batches at the same place ({positions})",
                "compute the loss from all rows of the model's output",
            )
    return None
