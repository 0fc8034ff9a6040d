"""The records of an observed run, and their reader. A record is a JSON object on its own line.

Each rank of each launch writes its own file, `launch-0-rank-0.jsonl`. A run that is interrupted and
resumed has several launches. Digests are short SHA-256 sums: equal digests mean equal bits.

The records of a launch are in the order of time. So the first record in which two runs differ shows
where they began to differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from common.errors import UserError
from common.run_directory.records import mistake_in_words
from common.tools.prove.notes import (
    EvaluationLoss,
    GrowingTensors,
    LogInterval,
    MemoryInUse,
    MissingRows,
    MixingModule,
    OptimizerStep,
    SampleMixing,
    TrainingLoss,
    TrainingMode,
    UnusedRows,
    Wait,
)
from common.tools.prove.observed import Manner, Observed, Phase


class Started(Observed):
    """`run.start` has returned: the run is ready for its loop, and has restored any checkpoint."""

    kind: Literal["started"] = "started"
    step: int  # the number of updates that the restored checkpoint has; 0 without one
    world_size: int
    total_steps: int
    updates_per_epoch: int
    samples_per_update: int  # over all ranks
    batch_size: int  # samples in a micro-batch of one rank
    accumulation: int
    device: str
    precision: str
    split_sizes: dict[str, int]  # the number of samples that this proof uses, by split
    validation_split: str
    test_split: str
    parts: list[str]  # the names that the recipe passed to `run.keep`
    modules: dict[str, int]  # how many modules of each class the kept networks have


# The types of reachable values that need different advice.
ValueType = Literal["generator", "buffer", "network", "stateful", "file", "text", "other"]


OF_RECIPE = "global variable of the recipe"  # ends the text of such a value's `Description`


class Description(Observed):
    """The description of a value that the recipe can reach."""

    type: ValueType
    text: str  # its class and the variable that it belongs to, in words


class MicroBatch(Observed):
    """`run.batches` is about to give a batch to the loop. All digests are from this moment.

    `state` and `parts` are read only at the first micro-batch of an update. They hold only entries
    that have changed since the previous `MicroBatch` of the launch. `ObservedLaunch.micro_batches`
    adds the others.
    """

    kind: Literal["micro_batch"] = "micro_batch"
    step: int  # the number of updates before this batch
    micro_batch: int  # the number of the micro-batch within the update
    epoch: int
    samples: list[int]  # the sample indices of this rank
    batch: str  # the digest of all tensors of the batch
    generators: dict[str, str]  # digests by generator: torch, numpy, python, the device
    parts: dict[str, str]  # digests of the parts that checkpoints hold, by name
    state: dict[str, str]  # digests of all other values that the recipe can reach, by path
    gone: list[str]  # paths of `state` that can no longer be reached
    described: dict[str, Description]  # the descriptions of paths that are new in `state`


class Recorded(Observed):
    """The loop has called `run.record` for a micro-batch."""

    kind: Literal["recorded"] = "recorded"
    step: int  # the number of updates before this batch, as in its `MicroBatch`
    micro_batch: int
    is_update: bool  # whether it was the last micro-batch of its update
    loss: float  # the mean over the elements
    metrics: dict[str, tuple[float, int]]  # the sum and number of this rank's elements, by name
    generators: dict[str, str]  # digests after the loop has used the batch
    learning_rates: list[float]  # one for each group of each kept optimizer, after this batch
    clock: float  # seconds of `time.perf_counter`, for the time of an update


class EvaluationBatch(Observed):
    """A loader has given a batch to an evaluation."""

    kind: Literal["evaluation_batch"] = "evaluation_batch"
    step: int
    phase: Phase  # "final" for the evaluation after the loop
    split: str
    samples: list[int]
    batch: str
    generators: dict[str, str]  # digests before the evaluation uses the batch


class ObservedEvaluation(Observed):
    """The figures of an evaluation, as the recipe passed them to `run.log` or `run.finish`.

    The proof lets the rehearsal before the first update read all samples, so its figures are those
    of the model before training.
    """

    kind: Literal["evaluation"] = "evaluation"
    step: int
    phase: Phase
    split: str
    figures: dict[str, float]


class Saved(Observed):
    """The recipe has called `run.save`. The digests were taken just before."""

    kind: Literal["saved"] = "saved"
    step: int
    parts: dict[str, str]
    generators: dict[str, str]


class Interrupted(Observed):
    """The probe is about to interrupt the run, as the proof has planned."""

    kind: Literal["interrupted"] = "interrupted"
    step: int
    manner: Manner
    place: str  # in words, such as "after update 4"


class Finished(Observed):
    """`run.finish` has returned."""

    kind: Literal["finished"] = "finished"
    step: int
    parts: dict[str, str]


AnyObserved = (
    Started
    | MicroBatch
    | Recorded
    | EvaluationBatch
    | ObservedEvaluation
    | Saved
    | Interrupted
    | Finished
    | SampleMixing
    | MixingModule
    | OptimizerStep
    | TrainingLoss
    | EvaluationLoss
    | TrainingMode
    | UnusedRows
    | MissingRows
    | LogInterval
    | MemoryInUse
    | GrowingTensors
    | Wait
)
RECORD: TypeAdapter[AnyObserved] = TypeAdapter(Annotated[AnyObserved, Field(discriminator="kind")])
RecordType = TypeVar("RecordType", bound=Observed)


@dataclass(frozen=True)
class ObservedLaunch:
    """The records of one rank in one launch, in the order of time."""

    launch: int
    rank: int
    records: tuple[AnyObserved, ...]

    def of(self, record_class: type[RecordType]) -> list[RecordType]:
        """Return the records of one class."""
        return [record for record in self.records if isinstance(record, record_class)]

    @cached_property
    def micro_batches(self) -> dict[tuple[int, int], MicroBatch]:
        """The records by `step` and `micro_batch`, with all entries of `state` and `parts`."""
        state: dict[str, str] = {}
        parts: dict[str, str] = {}
        completed = {}
        for record in self.of(MicroBatch):
            parts = parts | record.parts
            state = {path: digest for path, digest in state.items() if path not in record.gone}
            state = state | record.state
            complete_record = record.model_copy(update={"state": state, "parts": parts})
            completed[record.step, record.micro_batch] = complete_record
        return completed

    @cached_property
    def described(self) -> dict[str, Description]:
        """The description of each path of `state`."""
        merged: dict[str, Description] = {}
        for record in self.of(MicroBatch):
            merged |= record.described
        return merged


@dataclass(frozen=True)
class ObservedRun:
    """A finished run, with all records of its launches.

    `launches` holds one entry for each rank of each launch, sorted by launch and then by rank.
    """

    name: str
    directory: Path  # the run directory: config.json, metrics.jsonl, model/
    launches: tuple[ObservedLaunch, ...]
    seconds: float  # the duration of all launches together
    command: str  # the command of the first launch, for messages

    @property
    def world_size(self) -> int:
        """The number of processes of the first launch."""
        return len(self.of_launch(0))

    def of_launch(self, number: int) -> list[ObservedLaunch]:
        """Return the entries of one launch, one for each rank."""
        return [launch for launch in self.launches if launch.launch == number]

    def of_rank(self, rank: int) -> list[ObservedLaunch]:
        """Return the entries of one rank, one for each launch."""
        return [launch for launch in self.launches if launch.rank == rank]

    def all(self, record_class: type[RecordType]) -> Iterator[tuple[ObservedLaunch, RecordType]]:
        """Yield all records of one class, each with the entry of `launches` that it belongs to."""
        for launch in self.launches:
            for record in launch.of(record_class):
                yield launch, record

    @property
    def started(self) -> Started:
        """The `Started` record of rank 0 in the first launch."""
        return self.launches[0].of(Started)[0]


def read_launches(folder: Path) -> tuple[ObservedLaunch, ...]:
    """Return one `ObservedLaunch` for each rank of each launch that wrote into a folder.

    If a launch was killed, its last line may be incomplete. It is left out then.

    Raises:
        UserError: another line is damaged.
    """
    launches = []
    for path in folder.glob("launch-*-rank-*.jsonl"):
        _, number, _, rank = path.stem.split("-")
        launches.append(ObservedLaunch(int(number), int(rank), tuple(read_observed(path))))
    return tuple(sorted(launches, key=lambda launch: (launch.launch, launch.rank)))


def read_observed(path: Path) -> Iterator[AnyObserved]:
    """Yield the records of one file; see `read_launches`."""
    # The text after the last line feed is empty, or is an incomplete line.
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(complete_lines, start=1):
        try:
            yield RECORD.validate_json(line)
        except ValidationError as problem:
            raise UserError(
                f"line {number} of {path} is not a record of an observed run "
                f"({mistake_in_words(problem.errors()[0])})",
                advice="repeat the proof; if you pass --folder, name a different folder",
            ) from None


def line_of(record: Observed) -> bytes:
    """Return a record as a line of its file."""
    return record.model_dump_json().encode() + b"\n"


def differing_keys(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the keys that both mappings have with different values, in the order of `first`."""
    return [key for key in first if key in second and first[key] != second[key]]
