"""The records of a run and its loop that `RunObserver` writes, in every observed run."""

from typing import Literal

from common.tools.prove.records.base import Manner, ObservedRecord, Phase


class Started(ObservedRecord):
    """`run.start` has returned: the run is ready for its loop, and has restored any checkpoint."""

    record_type: Literal["started"] = "started"
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
    workers: int  # worker processes that make the training batches
    parts: list[str]  # the names that the recipe passed to `run.keep`


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

OF_RECIPE = "global variable of the recipe"  # ends the text of such a value's `Description`


class Description(ObservedRecord):
    """The description of a value that the recipe can reach."""

    type: ValueType
    text: str  # its class and the variable that it belongs to, in words


class MicroBatch(ObservedRecord):
    """`run.batches` is about to give a batch to the loop. All digests are from this moment.

    `state` and `parts` are read only at the first micro-batch of an update. They hold only entries
    that have changed since the previous `MicroBatch` of the launch. `ObservedProcess.micro_batches`
    adds the others.
    """

    record_type: Literal["micro_batch"] = "micro_batch"
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


class LoopPass(ObservedRecord):
    """A pass of the loop has ended, and its variables still have their values."""

    record_type: Literal["loop_pass"] = "loop_pass"
    step: int  # the number of updates before the batch of the pass, as in its `MicroBatch`
    micro_batch: int
    # Digests of the variables that the `for` statement has set, except for the batch, by name.
    targets: dict[str, str]
    described: dict[str, Description]  # the descriptions of these variables
    # Variables that a pass reads before it sets them, so they hold state of an earlier pass.
    carried: list[str]


class Recorded(ObservedRecord):
    """The loop has called `run.record` for a micro-batch."""

    record_type: Literal["recorded"] = "recorded"
    step: int  # the number of updates before this batch, as in its `MicroBatch`
    micro_batch: int
    is_update: bool  # whether it was the last micro-batch of its update
    loss: float  # the mean over the elements
    metrics: dict[str, tuple[float, int]]  # the sum and number of this rank's elements, by name
    generators: dict[str, str]  # digests after the loop has used the batch
    learning_rates: list[float]  # one for each group of each kept optimizer, after this batch
    clock: float  # seconds of `time.perf_counter`, for the time of an update


class EvaluationBatch(ObservedRecord):
    """A loader has given a batch to an evaluation."""

    record_type: Literal["evaluation_batch"] = "evaluation_batch"
    step: int
    phase: Phase  # "final" for the evaluation after the loop
    split: str
    samples: list[int]
    batch: str
    generators: dict[str, str]  # digests before the evaluation uses the batch


class ObservedEvaluation(ObservedRecord):
    """The figures of an evaluation, as the recipe passed them to `run.log` or `run.finish`.

    The proof lets the rehearsal before the first update read all samples, so its figures are those
    of the model before training.
    """

    record_type: Literal["evaluation"] = "evaluation"
    step: int
    phase: Phase
    split: str
    samples: int  # of the evaluated split, for all ranks together
    figures: dict[str, float]


class Saved(ObservedRecord):
    """The recipe has called `run.save`. The digests were taken just before."""

    record_type: Literal["saved"] = "saved"
    step: int
    parts: dict[str, str]
    generators: dict[str, str]


class Interrupted(ObservedRecord):
    """The probe is about to interrupt the run, as the proof has planned."""

    record_type: Literal["interrupted"] = "interrupted"
    step: int
    manner: Manner
    place: str  # in words, such as "after update 4"


class Finished(ObservedRecord):
    """`run.finish` has returned."""

    record_type: Literal["finished"] = "finished"
    step: int
    parts: dict[str, str]
