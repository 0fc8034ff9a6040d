"""Finds the first record in which an observed run differs from the reference run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import (
    EvaluationBatch,
    EvaluationFigures,
    MicroBatch,
    RecordedMicroBatch,
    RunEnd,
    SavedState,
)

# A field of a record in which two runs may differ.
ComparedField = Literal[
    "sample_indices",
    "part_digests",
    "generator_digests",
    "batch_digest",
    "loss",
    "metrics",
    "learning_rates",
    "figures",
]
# The records that are compared.
ComparedRecord = (
    MicroBatch | RecordedMicroBatch | EvaluationBatch | EvaluationFigures | SavedState | RunEnd
)
# The compared fields of each record, in the order in which their values arise.
COMPARED_FIELDS: dict[type, tuple[ComparedField, ...]] = {
    MicroBatch: ("sample_indices", "part_digests", "generator_digests", "batch_digest"),
    RecordedMicroBatch: ("generator_digests", "loss", "metrics", "learning_rates"),
    EvaluationBatch: ("sample_indices", "generator_digests", "batch_digest"),
    EvaluationFigures: ("figures",),
    SavedState: ("part_digests", "generator_digests"),
    RunEnd: ("part_digests",),
}
Key = tuple[object, ...]  # records of two runs are compared if their keys are equal


@dataclass(frozen=True)
class Difference:
    """The first difference of a run from the reference run."""

    launch: int  # the number of the launch that differs, from 0
    rank: int
    record: ComparedRecord  # the record that differs, of the run and not of the reference run
    field: ComparedField  # the field that differs
    names: tuple[str, ...]  # the parts, generators, metrics or figures that differ

    @property
    def step(self) -> int:
        """The number of updates before the record."""
        return self.record.step

    @property
    def moment(self) -> str:
        """The moment of the record, such as "in update 3"."""
        record = self.record
        if isinstance(record, MicroBatch):
            return f"before update {record.step + 1}{micro_batch_in_words(record.micro_batch)}"
        if isinstance(record, RecordedMicroBatch):
            return f"in update {record.step + 1}{micro_batch_in_words(record.micro_batch)}"
        if isinstance(record, SavedState):
            return f"in the checkpoint of update {record.step}"
        if isinstance(record, RunEnd):
            return "at the end"
        if record.phase == "rehearsal":
            return f"in the rehearsal of the evaluation after update {record.step}"
        return f"in the evaluation after update {record.step}"


def micro_batch_in_words(micro_batch: int) -> str:
    """Return a phrase for a micro-batch; empty for the first one of an update."""
    return f", micro-batch {micro_batch + 1}" if micro_batch else ""


def first_difference(reference: ObservedRun, other: ObservedRun) -> Difference | None:
    """Return the first difference of a run from the reference run; None if there is none.

    The order is by launch, then by rank. Records that the reference run lacks, such as those of the
    rehearsal of a resumed run, are not compared.
    """
    expected_by_rank = {
        process.rank: dict(keyed_records(process)) for process in reference.processes_of_launch(0)
    }
    for process in other.processes:
        expected = expected_by_rank.get(process.rank, {})
        for key, record in keyed_records(process):
            if key not in expected:
                continue
            difference = difference_of_records(expected[key], record, process)
            if difference is not None:
                return difference
    return None


def difference_of_records(
    expected: ComparedRecord, record: ComparedRecord, process: ObservedProcess
) -> Difference | None:
    """Return the first difference of a record from that of the reference run.

    Args:
        expected: the record of the reference run.
        record: the record of the other run.
        process: the process that wrote `record`.
    """
    for field in COMPARED_FIELDS[type(record)]:
        expected_value = getattr(expected, field)
        value = getattr(record, field)
        if not is_equal(expected_value, value):
            names = differing_names(expected_value, value)
            return Difference(process.launch, process.rank, record, field, names)
    return None


def is_equal(expected: object, value: object) -> bool:
    """Whether two values are equal; NaN equals NaN, because both have the same text."""
    return expected == value or repr(expected) == repr(value)


def differing_names(expected: object, value: object) -> tuple[str, ...]:
    """Return the keys of two dicts whose values differ; empty for values of other types."""
    if not isinstance(expected, dict) or not isinstance(value, dict):
        return ()
    names = dict.fromkeys([*expected, *value])
    return tuple(name for name in names if not is_equal(expected.get(name), value.get(name)))


def keyed_records(process: ObservedProcess) -> Iterator[tuple[Key, ComparedRecord]]:
    """Yield the records of a process that can be compared, each with its key.

    Micro-batches are complete, with all entries of `part_digests`.
    """
    batch_counts: Counter[Key] = Counter()  # by evaluation
    # The update after which this process last evaluated on validation data.
    evaluated_step: int | None = None
    for record in process.records:
        if isinstance(record, MicroBatch):
            position = record.step, record.micro_batch
            yield ("micro-batch", *position), process.micro_batches[position]
        elif isinstance(record, RecordedMicroBatch):
            yield ("recorded", record.step, record.micro_batch), record
        elif isinstance(record, EvaluationBatch):
            evaluation = record.step, record.phase, record.split
            yield ("evaluation batch", *evaluation, batch_counts[evaluation]), record
            batch_counts[evaluation] += 1
        elif isinstance(record, EvaluationFigures):
            yield ("evaluation", record.step, record.phase), record
            if record.phase == "validation":
                evaluated_step = record.step
        elif isinstance(record, SavedState):
            # After an update, a run may save both before and after its evaluation. The evaluation
            # changes the state of the best evaluation, so the two saves have different keys.
            is_evaluated = record.step == evaluated_step
            yield ("saved", record.step, is_evaluated), record
        elif isinstance(record, RunEnd):
            yield ("finished",), record
