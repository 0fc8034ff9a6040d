"""The records of a run and its loop that `RunObserver` writes, in every observed run."""

from typing import Literal

from common.tools.prove.records.base import Manner, ObservedRecord, Phase


class RunStart(ObservedRecord):
    """`run.start` has returned: the run is ready for its loop, and has restored any checkpoint."""

    record_type: Literal["run_start"] = "run_start"
    step: int  # the number of updates that the restored checkpoint has; 0 without one
    world_size: int
    total_steps: int
    updates_per_epoch: int
    samples_per_update: int  # over all ranks
    batch_size: int  # samples in a micro-batch of one rank
    accumulation: int  # micro-batches of one rank in an update
    device: str
    precision: str
    split_sizes: dict[str, int]  # the number of samples that this proof uses, by split
    validation_split: str
    test_split: str
    worker_count: int  # worker processes that make the training batches
    kept_part_names: list[str]  # the names that the recipe passed to `run.keep`


# The types of reachable values that need different advice.
ValueType = Literal[
    "generator",
    "iterator",
    "buffer",
    "setting",  # of a network's module, such as requires_grad
    "network",
    "stateful",
    "file",
    "attribute",  # of a kept object whose state_dict lacks it
    "target",  # a variable that the loop's `for` statement sets
    "text",
    "other",
]

OF_RECIPE = "global variable of the recipe"  # ends the text of such a value's `ValueDescription`


class ValueDescription(ObservedRecord):
    """The description of a value that the recipe can reach."""

    type: ValueType
    text: str  # its class and the variable that it belongs to, in words


class MicroBatch(ObservedRecord):
    """`run.batches` is about to give a batch to the loop. All digests are from this moment.

    `part_digests` and `value_digests` are read only at the first micro-batch of an update. They
    hold only entries that have changed since the previous `MicroBatch` of the launch.
    `ObservedProcess.micro_batches` adds the others.
    """

    record_type: Literal["micro_batch"] = "micro_batch"
    step: int  # the number of updates before this batch
    micro_batch: int  # the number of the micro-batch within the update, from 0
    epoch: int  # from 0
    sample_indices: list[int]  # of this rank, in the order of the batch
    batch_digest: str  # of all tensors of the batch
    generator_digests: dict[str, str]  # by generator: torch, numpy, python, the device
    part_digests: dict[str, str]  # of the parts that checkpoints hold, by name
    value_digests: dict[str, str]  # of all other values that the recipe can reach, by path
    unreachable_paths: list[str]  # paths of `value_digests` that can no longer be reached
    descriptions: dict[str, ValueDescription]  # of the paths that are new in `value_digests`


class LoopPass(ObservedRecord):
    """A pass of the loop has ended, and its variables still have their values."""

    record_type: Literal["loop_pass"] = "loop_pass"
    step: int  # the number of updates before the batch of the pass, as in its `MicroBatch`
    micro_batch: int  # the number of the micro-batch within the update, from 0
    # Of the variables that the `for` statement has set, except for the batch, by name.
    target_digests: dict[str, str]
    descriptions: dict[str, ValueDescription]  # of these variables, by name
    # Variables that a pass reads before it sets them, so they hold state of an earlier pass.
    carried_variables: list[str]


class RecordedMicroBatch(ObservedRecord):
    """The loop has called `run.record` for a micro-batch."""

    record_type: Literal["recorded_micro_batch"] = "recorded_micro_batch"
    step: int  # the number of updates before this batch, as in its `MicroBatch`
    micro_batch: int  # the number of the micro-batch within the update, from 0
    is_update: bool  # whether it was the last micro-batch of its update
    loss: float  # the mean over the elements
    metrics: dict[str, tuple[float, int]]  # the sum and number of this rank's elements, by name
    generator_digests: dict[str, str]  # after the loop has used the batch, by generator
    learning_rates: list[float]  # one for each group of each kept optimizer, after this batch
    clock_seconds: float  # the value of `time.perf_counter`, for the time of an update


class EvaluationBatch(ObservedRecord):
    """A loader has given a batch to an evaluation."""

    record_type: Literal["evaluation_batch"] = "evaluation_batch"
    step: int  # the number of updates before the evaluation
    phase: Phase
    split: str  # empty for a loader of the recipe's own
    sample_indices: list[int]  # of this rank, in the order of the batch
    batch_digest: str  # of all tensors of the batch
    generator_digests: dict[str, str]  # before the evaluation uses the batch, by generator


class EvaluationFigures(ObservedRecord):
    """The figures of an evaluation, as the recipe passed them to `run.log` or `run.finish`.

    The proof lets the rehearsal before the first update read all samples, so its figures are those
    of the model before training.
    """

    record_type: Literal["evaluation_figures"] = "evaluation_figures"
    step: int  # the number of updates before the evaluation
    phase: Phase
    split: str
    sample_count: int  # of the evaluated split, for all ranks together
    figures: dict[str, float]  # by name, without the prefix of the split


class SavedState(ObservedRecord):
    """The recipe has called `run.save`. The digests were taken just before."""

    record_type: Literal["saved_state"] = "saved_state"
    step: int  # the number of updates before the save
    part_digests: dict[str, str]  # of the parts that checkpoints hold, by name
    generator_digests: dict[str, str]  # by generator


class Interruption(ObservedRecord):
    """The probe is about to interrupt the run, as the proof has planned."""

    record_type: Literal["interruption"] = "interruption"
    step: int  # the number of updates before the interruption
    manner: Manner
    moment: str  # in words, such as "after update 4"


class RunEnd(ObservedRecord):
    """`run.finish` has returned."""

    record_type: Literal["run_end"] = "run_end"
    step: int  # the number of all updates
    part_digests: dict[str, str]  # of the parts that checkpoints hold, by name
