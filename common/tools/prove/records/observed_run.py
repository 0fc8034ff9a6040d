"""An observed run as the checks read it: the records of each rank of each launch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from common.errors import UserError
from common.run_directory.records import mistake_in_words
from common.tools.prove.records.base import ObservedRecord
from common.tools.prove.records.instrument_records import (
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
from common.tools.prove.records.run_records import (
    Description,
    EvaluationBatch,
    Finished,
    Interrupted,
    MicroBatch,
    ObservedEvaluation,
    Recorded,
    Saved,
    Started,
)

AnyObservedRecord = (
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
RECORD: TypeAdapter[AnyObservedRecord] = TypeAdapter(
    Annotated[AnyObservedRecord, Field(discriminator="kind")]
)
RecordType = TypeVar("RecordType", bound=ObservedRecord)


@dataclass(frozen=True)
class ObservedLaunch:
    """The records of one rank in one launch, in the order of time."""

    launch: int
    rank: int
    records: tuple[AnyObservedRecord, ...]

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
        launches.append(ObservedLaunch(int(number), int(rank), tuple(read_records(path))))
    return tuple(sorted(launches, key=lambda launch: (launch.launch, launch.rank)))


def read_records(path: Path) -> Iterator[AnyObservedRecord]:
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


def differing_keys(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the keys that both mappings have with different values, in the order of `first`."""
    return [key for key in first if key in second and first[key] != second[key]]
