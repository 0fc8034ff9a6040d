"""Defines records: the typed contents of the JSON files in a run's directory, and their names.

A training process constructs them. A resume and the tools parse them with `StoredRun` (all files of
a run) or `read_record`. Both are strict: a value of another type is an error. Fields with a default
may be missing, because not every run has these facts, and trackers do not keep all of them. Unknown
keys are kept, so a file of a newer version loses nothing when it is written again.

`model_records` has the records of a model. Some readers must tolerate files that were edited or
written by hand: see `excerpts`.

The files of a profile have no record, because they are for people and no code reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

from pydantic import Field, JsonValue

from common.failures.outcomes import RunStatus
from common.metric_names import STEP
from common.run_directory.record_files import Record
from common.storage.json_files import JsonObject

# The files of a run.
CONFIG = "config.json"
STATUS = "status.json"
SUMMARY = "summary.json"
METRICS_FILE = "metrics.jsonl"  # a row of figures for each log line
MEMORY = "memory.json"  # a `PartMemory` for each part
MODEL_JSON = "model.json"  # a file in the folder of a finished model, beside its weights
MODEL_FOLDER = "model"  # the folder of the finished model
CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST = "manifest.json"  # a file in each checkpoint
PROVENANCE = "provenance"  # a folder
ATTEMPTS = f"{PROVENANCE}/attempts.json"
CHECKPOINT_DIGESTS = f"{PROVENANCE}/weights.jsonl"

Count = Annotated[int, Field(ge=1, le=2**53)]  # a larger number is a sign of damage
Figures = dict[str, float | None]  # by metric name; None stands for NaN and infinities
# A row of `metrics.jsonl`: figures by name; null stands for NaN and infinities.
MetricsRow = dict[str, JsonValue]
Flags = dict[str, JsonValue]  # by the field name in the recipe's `Config`
# The states of parts, by the part's name. Pydantic must neither validate nor convert them, because
# it refuses JSON that is nested more than 255 levels deep. This limit must not cost a checkpoint.
PartStates = JsonObject
# A job that was killed leaves the status "running", and readers call the run "stopped".
CurrentStatus = Literal[RunStatus, "stopped"]


class Environment(Record):
    """The device, precision, processes and versions of a run; part of `config.json`."""

    device: str
    device_type: str
    processor: str  # see `processor_kind`
    world_size: Count
    mixed_precision: str  # the precision that really ran; "no" is fp32
    effective_batch_size: Count  # samples of an update over all processes
    sharding: str = "no"
    data_placement: str | None = None
    threads_per_process: int | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    python: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)  # versions of packages, by name
    git_commit: str | None = None
    code_sha256: str | None = None  # of the code beside the recipe; see `digest_of_code_beside`


class DataFacts(Record):
    """The data set that a run read; part of `config.json`."""

    name: str
    reason: str = ""  # why this data set was chosen
    sizes: dict[str, int] = Field(default_factory=dict)  # samples by split
    classes: int | None = None
    fingerprint: str | None = None
    notes: list[str] = Field(default_factory=list)
    unknown_contents: list[str] | None = None  # splits without a fingerprint


class Architecture(Record):
    """The model of a run; part of `config.json`."""

    name: str
    parameters: int


class PlanFacts(Record):
    """The length of a run, its intervals in updates, and its rates; part of `config.json`."""

    total_steps: int
    updates_per_epoch: int
    log_every: int
    eval_every: int
    rate_scale: float = 1.0
    warmup_steps: int | None = None
    peak_learning_rate: float | None = None


class MemoryPlanFacts(Record):
    """The memory that a run was expected to need, in MiB; part of `config.json`.

    A part of unknown size is None.
    """

    total_mib: float
    device_mib: float  # all memory of the device
    weights_mib: float | None = None
    gradients_mib: float | None = None
    optimizer_state_mib: float | None = None
    buffers_mib: float | None = None
    checkpoint_mib: float | None = None
    other_mib: float | None = None


class PeakRate(Record):
    """The peak rate of one device in TFLOP/s. `perf/mfu` is a share of it."""

    tflops: float | None = None
    source: str | None = None


class SourceChange(Record):
    """An edit of the recipe between two attempts of one run; part of `Source`."""

    global_step: int  # the first update with the new text
    sha256: str
    file: str  # the copy of the new text in the run's directory


class Source(Record):
    """The recipe's text; part of `config.json`."""

    sha256: str | None = None  # of the recipe at the run's start
    code_sha256: str | None = None  # of its code alone, without comments and docstrings
    changes: list[SourceChange] = Field(default_factory=list)


class RunConfig(Record):
    """`config.json`: a run's flags, data, model and environment, on which its figures depend."""

    recipe: str
    objective: str  # such as "accuracy:max"
    # The resolved flags: `auto` is replaced by its value.
    flags: Flags = Field(validation_alias="config", serialization_alias="config")
    # All flags of the first start, before any was resolved.
    given_flags: Flags = Field(
        default_factory=dict, validation_alias="given", serialization_alias="given"
    )
    environment: Environment
    data: DataFacts
    architecture: Architecture
    plan: PlanFacts
    memory_plan: MemoryPlanFacts | None = None
    peak: PeakRate = Field(default_factory=PeakRate)
    command: str = ""
    run_id: str | None = None
    wandb_run_id: str = ""
    # By a flag's name, whether `recipes compare` compares the flag. It lists only flags for which
    # the recipe overrides `TrainingConfig`.
    compared: dict[str, bool] = Field(default_factory=dict)
    # By a flag's name, whether a resume may change the flag, because the model learns the same. It
    # lists only flags for which the recipe overrides `TrainingConfig`.
    free_on_resume: dict[str, bool] = Field(default_factory=dict)
    source: Source = Field(default_factory=Source)
    # The SHA-256 of the weights before the first update; None: see `digest_of_model`.
    initial_weights: str | None = None
    sha256: str | None = None  # of everything else in the file


class CodeTree(Record):
    """A folder of code that a run used, and how it differed from a commit.

    The patch is in the format of git. It has the changed files, and the files that the run used and
    that git does not track. Without a commit, it has all files that the run used.
    """

    folder: str  # absolute
    commit: str | None = None  # None: the folder is not a git repository with a commit
    # The name of the patch in the folder `PROVENANCE`. None: the patch is empty or was too large.
    patch: str | None = None
    patch_sha256: str | None = None
    untracked: list[str] = Field(default_factory=list)  # files of the patch that git does not track
    not_saved: list[str] = Field(default_factory=list)  # files or parts, each with the reason


class Attempt(Record):
    """One start of a run: its code, its packages and its machine."""

    global_step: int  # the updates made before this attempt
    recipe: str | None = None  # the recipe's file in the first tree
    # The first tree has the recipe. The second has this library, if that is in another repository.
    trees: list[CodeTree] = Field(default_factory=list)
    problem: str | None = None  # why the code could not be saved
    packages: dict[str, str] = Field(default_factory=dict)  # versions by name
    libraries: dict[str, str] = Field(default_factory=dict)  # versions of torch's libraries
    processor: str | None = None
    cores: int | None = None  # cores that the process could use
    system: str | None = None
    machines: int = 1
    # The environment variables that may change bits of results.
    variables: dict[str, str] = Field(default_factory=dict)
    # Packages that the recipe and the modules beside it import; None if unknown.
    imported: list[str] | None = None
    # How this attempt trained, None if unknown; `config.json` has only the last attempt's.
    world_size: int | None = None
    threads_per_process: int | None = None
    mixed_precision: str | None = None
    # The flags whose values differ from those of the previous attempt.
    changed_flags: Flags = Field(default_factory=dict)


class Provenance(Record):
    """`attempts.json` in the folder `PROVENANCE`: the facts that are needed to repeat a run.

    `config.json` has further facts: the flags, the versions of the main packages, the device and
    the threads.
    """

    # The attempts in order. Each continued from the one before.
    attempts: list[Attempt] = Field(default_factory=list)


class CheckpointDigests(Record):
    """A line of `weights.jsonl` in the folder `PROVENANCE`: the files of one checkpoint.

    A line stays after its checkpoint is removed. `recipes reproduce` compares the lines of runs.
    """

    step: int = Field(validation_alias=STEP, serialization_alias=STEP)
    files: dict[str, str]  # SHA-256 by name


class Status(Record):
    """`status.json`: whether a run is in progress, or how it ended.

    The status of a run without a readable file is "unknown".
    """

    status: Literal[CurrentStatus, "unknown"] = "unknown"
    resumable: bool | None = None  # whether the same command, given again, may succeed
    reason: str | None = None
    global_step: int = 0
    run_id: str | None = None
    lost_at_steps: list[int] = Field(default_factory=list)  # updates at which a process was lost


class Receipt(Record):
    """The size in bytes and the SHA-256 of a file, by which a resume notices damage."""

    size: int
    sha256: str


class RankReceipt(Record):
    """`receipt-0.json` and so on in an unfinished checkpoint: the files that one rank wrote."""

    files: dict[str, Receipt]  # files in the checkpoint's folder
    lasting: dict[str, Receipt]  # lasting files: see `common.checkpoints.store`
    of_rank: PartStates  # the rank's own parts by name, without their tensors

    def to_json(self) -> dict[str, JsonValue]:
        converted = self.model_dump(mode="json", exclude_unset=True, exclude={"of_rank"})
        return {**converted, "of_rank": self.of_rank}  # not converted: see `PartStates`


class GroupDescription(Record):
    """A parameter group of an optimizer; a part of `PartDescription`."""

    parameters: list[str]  # their names
    # The options before the first update, except those that JSON can't express and those in
    # `NOT_COMPARED` of `common.checkpoints.description`.
    options: dict[str, JsonValue]


class PartDescription(Record):
    """The class and the options of a part of a run; a part of `manifest.json`."""

    # The file has the key "class", which can't be the name of an attribute.
    class_name: str = Field(validation_alias="class", serialization_alias="class")
    # The groups of an optimizer.
    groups: list[GroupDescription] = Field(default_factory=list)
    rates: JsonValue = None  # the base learning rates of a schedule, if JSON can express them
    # The schedules that a schedule is made of.
    schedules: list[PartDescription] = Field(default_factory=list)


class DataIdentity(DataFacts):
    """The data set of a checkpoint's run; a part of `manifest.json`."""

    # None if the data have no classes. Texts, unless a user's copy of a recipe states numbers.
    class_names: list[JsonValue] | None


class RunIdentity(Record):
    """The run and the update that a checkpoint belongs to; a part of `manifest.json`.

    A resume compares most of these values with those of the run as it would go on: see
    `common.checkpoints.same_run`.
    """

    run_id: str
    recipe: str
    model: str
    objective: str
    flags: Flags  # the flags that a resume can't change
    parts_described: dict[str, PartDescription]  # by the part's name
    global_step: int
    global_sample_index: int  # counted within the epoch
    data: DataIdentity
    effective_batch_size: int
    world_size: int
    mixed_precision: str
    versions: dict[str, str]  # versions of packages, by name


class Manifest(RunIdentity):
    """`manifest.json` of a checkpoint: its run, its files, and its parts' state except tensors.

    The JSON in the file must match its own digest before it is made into this record.
    """

    # The shared parts by name, without their tensors; "parts" in the file.
    shared: PartStates = Field(validation_alias="parts", serialization_alias="parts")
    # The own parts of each rank by name, without their tensors; "ranks" in the file.
    of_ranks: list[PartStates] = Field(
        min_length=1, validation_alias="ranks", serialization_alias="ranks"
    )
    files: dict[str, Receipt]  # by path relative to the checkpoint
    sha256: str | None = None  # of everything else in the file; None until the file is signed

    def to_json(self) -> dict[str, JsonValue]:
        converted = self.model_dump(
            mode="json", exclude_unset=True, by_alias=True, exclude={"shared", "of_ranks"}
        )
        # Not converted: see `PartStates`.
        return {**converted, "parts": self.shared, "ranks": [*self.of_ranks]}


class Summary(Record):
    """`summary.json`: the final figures of a run, by metric name.

    The names depend on the recipe, so no figure has a field of its own. `common.track.names` says
    what the shared names mean.
    """

    @property
    def figures(self) -> dict[str, float]:
        """The entries that are numbers. Figures that were NaN, and a user's texts, are left out."""
        return {name: value for name, value in (self.model_extra or {}).items() if is_number(value)}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number; null, which stands for NaN, is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class PartMemory(Record):
    """The memory of one part of a run, such as its weights; an entry of `memory.json`."""

    planned_mib: float | None  # None if it could not be planned
    measured_mib: float | None  # None if it could not be measured
