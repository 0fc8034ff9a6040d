"""Finds the first record in which an observed run differs from the reference run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from common.tools.prove.observation import (
    AnyObserved,
    Evaluated,
    EvaluationBatch,
    Finished,
    MicroBatch,
    ObservedLaunch,
    ObservedRun,
    Recorded,
    Saved,
)

Subject = Literal[
    "samples", "parts", "generators", "batch", "loss", "metrics", "learning_rates", "figures"
]
# What is compared of each record, in the order in which it comes about.
COMPARED: dict[type, tuple[Subject, ...]] = {
    MicroBatch: ("samples", "parts", "generators", "batch"),
    Recorded: ("generators", "loss", "metrics", "learning_rates"),
    EvaluationBatch: ("samples", "generators", "batch"),
    Evaluated: ("figures",),
    Saved: ("parts", "generators"),
    Finished: ("parts",),
}
Key = tuple[object, ...]  # says which record of another run to compare with


@dataclass(frozen=True)
class Difference:
    """The first difference of a launch from the reference run."""

    launch: int
    rank: int
    record: AnyObserved  # of the launch
    subject: Subject
    names: tuple[str, ...]  # of the parts, generators, metrics or figures that differ

    @property
    def step(self) -> int:
        """The updates made before the record."""
        return self.record.step

    @property
    def place(self) -> str:
        """When the record was written, in words."""
        record = self.record
        if isinstance(record, MicroBatch):
            return f"before update {record.step + 1}{batch_in_words(record.micro_batch)}"
        if isinstance(record, Recorded):
            return f"in update {record.step + 1}{batch_in_words(record.micro_batch)}"
        if isinstance(record, Saved):
            return f"in the checkpoint of update {record.step}"
        if isinstance(record, Finished):
            return "at the end"
        phase = getattr(record, "phase", "")
        if phase == "rehearsal":
            return f"in the rehearsal of the evaluation after update {record.step}"
        return f"in the evaluation after update {record.step}"


def batch_in_words(micro_batch: int) -> str:
    """Return which micro-batch of an update is meant, if it is not the first."""
    return f", micro-batch {micro_batch + 1}" if micro_batch else ""


def first_difference(reference: ObservedRun, other: ObservedRun) -> Difference | None:
    """Return the first difference of a run from the reference run; None if there is none.

    Launches come in their order, and in each of them its ranks. A record that the reference run
    does not have is not compared, such as the rehearsal of a resumed run.
    """
    expected_by_rank = {
        launch.rank: dict(keyed_records(launch)) for launch in reference.of_launch(0)
    }
    for launch in other.launches:
        expected = expected_by_rank.get(launch.rank, {})
        for key, record in keyed_records(launch):
            if key not in expected:
                continue
            difference = compare(expected[key], record, launch)
            if difference is not None:
                return difference
    return None


def compare(
    expected: AnyObserved, record: AnyObserved, launch: ObservedLaunch
) -> Difference | None:
    """Return the first difference of a record from that of the reference run."""
    for subject in COMPARED[type(record)]:
        before = getattr(expected, subject)
        now = getattr(record, subject)
        if not is_equal(before, now):
            names = differing_names(before, now)
            return Difference(launch.launch, launch.rank, record, subject, names)
    return None


def is_equal(before: Any, now: Any) -> bool:
    """Whether two values are equal; NaN equals NaN, because the text of both is the same."""
    return before == now or repr(before) == repr(now)


def differing_names(before: Any, now: Any) -> tuple[str, ...]:
    """Return the entries of two mappings that differ; nothing for other values."""
    if not isinstance(before, dict):
        return ()
    names = [*before, *(name for name in now if name not in before)]
    return tuple(name for name in names if not is_equal(before.get(name), now.get(name)))


def keyed_records(launch: ObservedLaunch) -> Iterator[tuple[Key, AnyObserved]]:
    """Yield the records of a launch that can be compared, each with its key.

    Micro-batches have all entries of `parts`.
    """
    batches: Counter[Key] = Counter()  # of each evaluation
    evaluated_step = -1  # the update after which this launch last evaluated on validation data
    for record in launch.records:
        if isinstance(record, MicroBatch):
            place = record.step, record.micro_batch
            yield ("micro-batch", *place), launch.micro_batches[place]
        elif isinstance(record, Recorded):
            yield ("recorded", record.step, record.micro_batch), record
        elif isinstance(record, EvaluationBatch):
            evaluation = record.step, record.phase, record.split
            yield ("evaluation batch", *evaluation, batches[evaluation]), record
            batches[evaluation] += 1
        elif isinstance(record, Evaluated):
            yield ("evaluated", record.step, record.phase), record
            if record.phase == "validation":
                evaluated_step = record.step
        elif isinstance(record, Saved):
            # One update may have a save before its evaluation and one after it. The evaluation
            # changes the state of the best evaluation.
            is_evaluated = record.step == evaluated_step
            yield ("saved", record.step, is_evaluated), record
        elif isinstance(record, Finished):
            yield ("finished",), record
