"""An observed run as the checks read it: the records of each of its processes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from common.errors import UserError
from common.run_directory.record_files import mistake_in_words
from common.tools.prove.records.base import ObservedRecord
from common.tools.prove.records.instrument_records import (
    CollateDraw,
    EvaluatedSamples,
    EvaluationLoss,
    GradientChange,
    GrowingContainer,
    GrowingGraph,
    GrowingTensors,
    LayerInTrainingMode,
    LogInterval,
    MemoryInUse,
    MissingSamples,
    MixingModule,
    OptimizerStep,
    OwnDraw,
    SampleGradients,
    SampleMixing,
    TrainingLoss,
    UnusedSamples,
    Wait,
)
from common.tools.prove.records.run_records import (
    EvaluationBatch,
    EvaluationFigures,
    Interruption,
    LoopPass,
    MicroBatch,
    RecordedMicroBatch,
    RunEnd,
    RunStart,
    SavedState,
    ValueDescription,
)

AnyObservedRecord = (
    RunStart
    | MicroBatch
    | LoopPass
    | RecordedMicroBatch
    | EvaluationBatch
    | EvaluationFigures
    | SavedState
    | Interruption
    | RunEnd
    | SampleMixing
    | MixingModule
    | OptimizerStep
    | GradientChange
    | OwnDraw
    | CollateDraw
    | TrainingLoss
    | EvaluationLoss
    | LayerInTrainingMode
    | UnusedSamples
    | SampleGradients
    | MissingSamples
    | EvaluatedSamples
    | LogInterval
    | MemoryInUse
    | GrowingTensors
    | GrowingContainer
    | GrowingGraph
    | Wait
)
RECORD: TypeAdapter[AnyObservedRecord] = TypeAdapter(
    Annotated[AnyObservedRecord, Field(discriminator="record_type")]
)
RecordType = TypeVar("RecordType", bound=ObservedRecord)


@dataclass(frozen=True)
class ObservedProcess:
    """The records of one process, in the order of time: of one rank in one launch."""

    launch: int  # the number of the launch, from 0
    rank: int
    records: tuple[AnyObservedRecord, ...]

    def of(self, record_class: type[RecordType]) -> list[RecordType]:
        """Return the records of one class."""
        return [record for record in self.records if isinstance(record, record_class)]

    @cached_property
    def micro_batches(self) -> dict[tuple[int, int], MicroBatch]:
        """The records by `step` and `micro_batch`, with all entries of their digests.

        The records in the file hold only the entries that have changed; see `MicroBatch`.
        """
        part_digests: dict[str, str] = {}
        value_digests: dict[str, str] = {}
        complete_records = {}
        for record in self.of(MicroBatch):
            part_digests = part_digests | record.part_digests
            value_digests = value_digests | record.value_digests
            for path in record.unreachable_paths:
                value_digests.pop(path, None)
            digests = {"part_digests": part_digests, "value_digests": value_digests}
            complete_record = record.model_copy(update=digests)
            complete_records[record.step, record.micro_batch] = complete_record
        return complete_records

    @cached_property
    def descriptions(self) -> dict[str, ValueDescription]:
        """The description of each path of `MicroBatch.value_digests`."""
        descriptions: dict[str, ValueDescription] = {}
        for record in self.of(MicroBatch):
            descriptions |= record.descriptions
        return descriptions


@dataclass(frozen=True)
class ObservedRun:
    """A finished run, with all records of its processes.

    A run that was interrupted has several launches, and a launch has a process for each rank.
    """

    name: str
    directory: Path  # the run directory: config.json, metrics.jsonl, model/
    processes: tuple[ObservedProcess, ...]  # sorted by launch, and then by rank
    seconds: float  # the duration of all launches together
    command: str  # the command of the first launch, for messages

    @property
    def world_size(self) -> int:
        """The number of processes of the first launch."""
        return len(self.processes_of_launch(0))

    def processes_of_launch(self, number: int) -> list[ObservedProcess]:
        """Return the processes of one launch, one for each rank."""
        return [process for process in self.processes if process.launch == number]

    def processes_of_rank(self, rank: int) -> list[ObservedProcess]:
        """Return the processes of one rank, one for each launch."""
        return [process for process in self.processes if process.rank == rank]

    def all(self, record_class: type[RecordType]) -> Iterator[tuple[ObservedProcess, RecordType]]:
        """Yield all records of one class, each with the process that wrote it."""
        for process in self.processes:
            for record in process.of(record_class):
                yield process, record

    @property
    def start_record(self) -> RunStart:
        """The `RunStart` record of rank 0 in the first launch."""
        return self.processes[0].of(RunStart)[0]


def read_processes(folder: Path) -> tuple[ObservedProcess, ...]:
    """Return the processes that wrote records into a folder, sorted by launch and then by rank.

    If a process was killed, the last line of its file may be incomplete. This line is left out.

    Raises:
        UserError: another line is damaged.
    """
    processes = []
    for path in folder.glob("launch-*-rank-*.jsonl"):
        _, number, _, rank = path.stem.split("-")
        processes.append(ObservedProcess(int(number), int(rank), tuple(read_records(path))))
    return tuple(sorted(processes, key=lambda process: (process.launch, process.rank)))


def read_records(path: Path) -> Iterator[AnyObservedRecord]:
    """Yield the records of one file; see `read_processes`."""
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


def differing_common_keys(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the keys that both mappings have with different values, in the order of `first`."""
    return [key for key in first if key in second and first[key] != second[key]]
