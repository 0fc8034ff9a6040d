"""Defines records: the typed contents of the JSON files in a run's directory, and their names.

A training process constructs them. A resume and the tools parse them with `StoredRun` (all files of
a run) or `read_record`. Both are strict: a value of another type is an error. Fields with a default
may be missing, because not every run has these facts, and trackers do not keep all of them. Unknown
keys are kept, so a file of a newer version loses nothing when it is written again.

Some readers must go on with a file that was edited or written by hand. They parse an `Excerpt` or
`InitialFacts`, which accept any JSON object.

The files of a profile have no record, because they are for people and no code reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeGuard, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from common.errors import UserError
from common.failures.outcomes import RunStatus
from common.metric_names import STEP
from common.storage.json_files import PUT_BACK, JsonObject, json_safe, read_json_if_there
from common.system.wording import shortened

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
Side = Annotated[int, Field(ge=1, le=2**16)]  # of an image; a larger number is a sign of damage
Figures = dict[str, float | None]  # by metric name; None stands for NaN and infinities
# A row of `metrics.jsonl`: figures by name; null stands for NaN and infinities.
MetricsRow = dict[str, JsonValue]
Flags = dict[str, JsonValue]  # by the field name in the recipe's `Config`
# The states of parts, by the part's name. Pydantic must neither validate nor convert them, because
# it refuses JSON that is nested more than 255 levels deep. This limit must not cost a checkpoint.
PartStates = JsonObject
# A job that was killed leaves the status "running", and readers call the run "stopped".
CurrentStatus = Literal[RunStatus, "stopped"]


class Record(BaseModel):
    """A part of a file. Values must have the stated types: the text "3" is not the integer 3."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    def to_json(self) -> dict[str, JsonValue]:
        """Return the record as JSON, without the fields that were not set."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


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
    changes: list[SourceChange] = Field(default_factory=list)


class RunConfig(Record):
    """`config.json`: a run's flags, data, model and environment, on which its figures depend."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    recipe: str
    objective: str  # such as "accuracy:max"
    # The resolved flags: `auto` is replaced by its value.
    flags: Flags = Field(validation_alias="config", serialization_alias="config")
    # All flags of the first start, before any was resolved.
    given: Flags = Field(default_factory=dict)
    environment: Environment
    data: DataFacts
    architecture: Architecture
    plan: PlanFacts
    memory_plan: MemoryPlanFacts | None = None
    peak: PeakRate = Field(default_factory=PeakRate)
    command: str = ""
    run_id: str | None = None
    wandb_run_id: str = ""
    # By a flag's name, whether `recipes compare` compares the flag. Only those flags are here for
    # which the recipe differs from `TrainingConfig` in this.
    compared: dict[str, bool] = Field(default_factory=dict)
    # By a flag's name, whether a resume may change the flag, because the model learns the same. As
    # above, only flags are here for which the recipe differs from `TrainingConfig`.
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

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

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

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

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

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

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


class WeightsDigest(Record):
    """The entry of `model.json` by which readers notice that the weights beside it have changed.

    The digest is None if a user wrote the file, or removed the digest to change the weights.
    """

    weights_sha256: str | None = None


class ModelFacts(WeightsDigest):
    """`model.json`: how to build a finished model.

    The file also has all further facts that the recipe stated about its model in `run.start`.
    Classifiers state those of `ImageInput` or `TextInput`.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    recipe: str | None = None
    # The file has the key "class", which can't be the name of an attribute.
    class_name: str | None = Field(None, validation_alias="class", serialization_alias="class")
    update: int | None = None  # the update after which the model has these weights
    run_id: str | None = None
    arguments: dict[str, JsonValue] | None = None  # the class's arguments; None: not stated

    @property
    def takes_images(self) -> bool:
        """Whether the model classifies images; only such models state a mean of the pixels."""
        return {"class_names", "mean"} <= self.model_fields_set

    @property
    def takes_texts(self) -> bool:
        """Whether the model classifies texts; only such models state a largest length."""
        return {"class_names", "max_length"} <= self.model_fields_set


class PixelFormat(Record, extra="ignore"):
    """The pixels to which images are decoded: uint8 [image_size, image_size, channels]."""

    channels: int  # 1 or 3
    image_size: int  # height and width
    # The value that becomes 255, in images of more than 8 bits a channel; None: no such images.
    white_level: int | None = None


class ImageFormat(PixelFormat):
    """The images that a model takes: their pixels, and how a batch scales these.

    Its fields are entries of `model.json` and of the facts in the cache of prepared data.
    """

    # The mean and the standard deviation of each channel, of pixels scaled to 0 … 1.
    mean: list[float]
    std: list[float]


class ImageInput(ImageFormat):
    """The input of a classifier of images; a part of `model.json`."""

    class_names: list[object]  # texts, unless a user's copy of a recipe states numbers


class TextInput(Record, extra="ignore"):
    """The input of a classifier of texts; a part of `model.json`."""

    class_names: list[object]  # texts, unless a user's copy of a recipe states numbers
    text_columns: list[str]
    max_length: int  # the number of tokens after which a text is cut


class InitialFacts(Record, extra="ignore"):
    """The known facts about the weights of `--init-from`; a part of a run's `model.json`.

    A user's copy of a recipe may use these names for other facts. So the values may have any type,
    and the code that uses a value checks it.
    """

    class_names: object = None
    channels: object = None
    image_size: object = None
    white_level: object = None
    mean: object = None
    std: object = None
    published_size: int | None = None  # size of the images that published weights had, in pixels

    @property
    def has_scaling(self) -> bool:
        """Whether the facts state how images were scaled."""
        return {"mean", "std", "channels"} <= self.model_fields_set


class PublishedSettings(Record, extra="ignore"):
    """The images on which published weights were trained; a part of timm's `config.json`."""

    input_size: list[Side] = Field(min_length=3, max_length=3)  # channels, height, width
    mean: list[float]  # by channel
    std: list[float]


def none_if_invalid(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return a value of an excerpt, or None if its type is not the one that the excerpt states."""
    try:
        return validate(value)
    except ValidationError:
        return None


Value = TypeVar("Value")
Lenient = Annotated[Value | None, WrapValidator(none_if_invalid)]


class DataExcerpt(Record, extra="ignore"):
    """The values that tolerant readers take from the entry `data` of a `config.json`."""

    fingerprint: Lenient[str] = None
    sizes: Lenient[dict[str, int]] = None  # samples by split


class Excerpt(Record, extra="ignore"):
    """The values that tolerant readers take from `config.json`, `status.json` or a manifest.

    No value is required, and a value of another type counts as missing. For example, `--config`
    accepts a file that has only flags, and an edited file must still be recognised.
    """

    run_id: object = None  # a text, unless the file was edited
    recipe: object = None  # a text, unless the file was edited
    # Values of flags are not validated: the type of a flag is in the recipe's `Config`.
    config: Lenient[JsonObject] = None  # the flags in `config.json`
    flags: Lenient[JsonObject] = None  # the flags in a manifest
    data: Lenient[DataExcerpt] = None


def excerpt_of(contents: Mapping[str, object]) -> Excerpt:
    """Return the excerpt of a file's contents, which may be any JSON object."""
    return Excerpt.model_validate(dict(contents))


AnyRecord = TypeVar("AnyRecord", bound=Record)
MAX_CHARACTERS = 60  # characters of a wrong value that a sentence repeats


def read_record(path: Path, record_class: type[AnyRecord], advice: str = PUT_BACK) -> AnyRecord:
    """Return the record in a JSON file.

    Args:
        advice: what to do if the file is missing or damaged.

    Raises:
        UserError: the file is missing or can't be read, or its contents do not have the record's
            structure.
    """
    record = read_record_if_there(path, record_class, advice)
    if record is None:
        raise UserError(f"{path} does not exist", advice=advice)
    return record


def read_record_if_there(
    path: Path, record_class: type[AnyRecord], advice: str = PUT_BACK
) -> AnyRecord | None:
    """Return the record in a JSON file; None if there is no such file.

    Args:
        advice: what to do if the file is damaged.

    Raises:
        UserError: the file can't be read, or its contents do not have the record's structure.
    """
    contents = read_json_if_there(path, advice)
    return None if contents is None else parse_record(contents, record_class, str(path), advice)


def parse_record(
    contents: Mapping[str, object],
    record_class: type[AnyRecord],
    source: str,
    advice: str = PUT_BACK,
) -> AnyRecord:
    """Return a record from the contents of a JSON file.

    Args:
        source: the file's path or address, for a message.
        advice: what to do if the contents are damaged.

    Raises:
        UserError: a key is missing, or its value has another type.
    """
    try:
        return record_class.model_validate(json_safe(contents))
    except ValidationError as problem:
        mistake = mistake_in_words(problem.errors()[0])
        raise damaged_record_error(source, mistake, advice) from None


def damaged_record_error(source: str, mistake: str, advice: str = PUT_BACK) -> UserError:
    """Return the error for a file of which an entry is wrong; see `parse_record`.

    Args:
        mistake: the wrong entry, in words.
    """
    return UserError(f"{source} is damaged or was edited ({mistake})", advice=advice)


def mistake_in_words(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as a clause without a full stop."""
    place = ".".join(str(name) for name in error["loc"])
    if error["type"] == "missing":
        return f"{place} is missing"
    value = shortened(repr(error["input"]), MAX_CHARACTERS)
    # After these words comes the parser's reason, which tells a user nothing new.
    message = error["msg"].partition(", unable to parse")[0]
    expected = message.removeprefix("Input should be ")
    if expected == message:  # a whole sentence, such as one on the length of a list
        return f"{place} is {value}: {message}"
    return f"{place} is {value}, but should be {expected}"
