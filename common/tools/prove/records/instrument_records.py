"""The records that instruments write for single checks, in addition to those of all runs."""

from typing import Literal

from common.tools.prove.records.base import ObservedRecord, Phase


class InstrumentRecord(ObservedRecord):
    """A record that an instrument has written; see `Session` in `prove.observation.session`."""

    step: int  # the number of updates before the record, unless its class says otherwise


# Updates


class SampleMixing(InstrumentRecord):
    """The batch norms, which mix the samples of a micro-batch, and whether the loss does so too."""

    record_type: Literal["sample_mixing"] = "sample_mixing"
    batch_norms: list[str]  # their class names
    # Whether the recipe declares that a sample's loss depends on other samples of the micro-batch.
    couples_samples: bool


class MixingModule(InstrumentRecord):
    """A module other than batch norm mixes samples within a micro-batch."""

    record_type: Literal["mixing_module"] = "mixing_module"
    module_class: str  # the name of its class


class OptimizerStep(InstrumentRecord):
    """An optimizer is about to make an update."""

    record_type: Literal["optimizer_step"] = "optimizer_step"
    optimizer_number: int  # in the order of first use, from 0
    gradient_norm: float  # the L2 norm before gradients are clipped
    learning_rates: list[float]  # one for each parameter group


class GradientChange(InstrumentRecord):
    """Gradients have changed between two micro-batches of an update, outside of a backward pass."""

    record_type: Literal["gradient_change"] = "gradient_change"
    micro_batch: int  # the micro-batch within the update after which they changed, from 0
    norm_before: float  # the L2 norm of all gradients
    norm_after: float
    # The line of the user's code that clipped them; an empty file if no known function did.
    clipping_file: str
    clipping_line: int


class OwnDraw(InstrumentRecord):
    """The loop has drawn random numbers from a generator of its own."""

    record_type: Literal["own_draw"] = "own_draw"
    operation: str  # of torch, such as "randn"


class CollateDraw(InstrumentRecord):
    """A collate function has drawn random numbers. In a worker process, `step` may be too low."""

    record_type: Literal["collate_draw"] = "collate_draw"
    generators: list[str]  # the names of those that have changed: torch, numpy or python


# Losses and evaluations


# What a loss function of torch divides the sum of its elements by, if its result is their mean.
DivisorType = Literal[
    "weights",  # the sum of the weights of the labels' classes
    "labels",  # the number of labels that are not ignored
    "elements",  # the number of elements
]


class TrainingLoss(InstrumentRecord):
    """A function of torch has computed a loss in training."""

    record_type: Literal["training_loss"] = "training_loss"
    function: str  # its name, such as "cross_entropy"
    # The mean over the elements of the function's result, or its sum divided by the samples.
    loss: float
    micro_batch: int  # the number of the micro-batch within the update, from 0
    # Metrics of the micro-batch that follow from the outputs: accuracy and error, or mse and mae.
    metrics: dict[str, float] = {}
    # What the function has divided by, and its value; None if the result is not such a mean.
    divisor_type: DivisorType | None = None
    divisor: float | None = None


class OutcomeColumns(ObservedRecord):
    """The outcomes of a batch: lists with one value for each sample; None if unknown.

    `SampleOutcome` has the values of one sample.
    """

    hits: list[float] | None = None  # shares of a sample's elements that are classified correctly
    squared_errors: list[float] | None = None  # means over a sample's elements
    absolute_errors: list[float] | None = None  # means over a sample's elements
    # Known only if each sample has one class:
    predicted: list[int] | None = None
    labels: list[int] | None = None
    class_count: int = 0


class EvaluationLoss(InstrumentRecord):
    """A function of torch has computed a loss for a batch of an evaluation."""

    record_type: Literal["evaluation_loss"] = "evaluation_loss"
    phase: Phase
    split: str  # empty for a loader of the recipe's own
    # The number of the pass over a split within the launch, from 0. An evaluation may make several
    # passes over its split.
    pass_number: int
    sample_indices: list[int]  # in the order of the batch
    function: str  # its name, such as "cross_entropy"
    loss: float  # the mean over the elements of the function's result
    sample_losses: list[float] | None = None  # one for each sample; None if they are unknown
    outcomes: OutcomeColumns = OutcomeColumns()


class LayerInTrainingMode(InstrumentRecord):
    """A layer that behaves differently in training was in training mode in an evaluation."""

    record_type: Literal["layer_in_training_mode"] = "layer_in_training_mode"
    phase: Phase
    split: str  # empty for a loader of the recipe's own
    layer_class: str  # the name of its class


# Samples that are left out, and how much the others count


class UnusedSamples(InstrumentRecord):
    """The samples of a micro-batch on which its loss does not depend."""

    record_type: Literal["unused_samples"] = "unused_samples"
    sample_count: int  # the size of the micro-batch
    unused_positions: list[int]  # their places in the micro-batch, from 0


class SampleGradients(InstrumentRecord):
    """The gradients of a micro-batch's loss with respect to the model's output, by sample."""

    record_type: Literal["sample_gradients"] = "sample_gradients"
    micro_batch: int  # the number of the micro-batch within the update, from 0
    gradient_norms: list[float]  # the L2 norm for each sample, in the order of the micro-batch


class MissingSamples(InstrumentRecord):
    """The model got fewer samples than the batch has."""

    record_type: Literal["missing_samples"] = "missing_samples"
    received_count: int  # the number of samples that the model got
    sample_count: int  # the size of the batch


class EvaluatedSamples(InstrumentRecord):
    """Which samples of a split an evaluation has passed to its model, on one rank."""

    record_type: Literal["evaluated_samples"] = "evaluated_samples"
    phase: Phase
    split: str  # empty for a loader of the recipe's own
    sample_count: int  # the number of samples that the evaluation has read
    unseen_indices: list[int]  # of those samples that have not reached the model
    batch_count: int  # the number of batches that the evaluation has read, of all splits
    model_calls: int  # how often it has called the model


# Time and memory


class LogInterval(InstrumentRecord):
    """The time between two log lines with only updates between them.

    `step` is the number of updates before the later log line.
    """

    record_type: Literal["log_interval"] = "log_interval"
    previous_step: int  # the number of updates before the earlier log line
    seconds: float


class MemoryInUse(InstrumentRecord):
    """The memory in use after an update; None where it can't be measured."""

    record_type: Literal["memory_in_use"] = "memory_in_use"
    resident_bytes: int  # of this process
    allocator_bytes: int | None  # those that the C library's allocator has given out
    device_bytes: int | None  # those that torch has allocated on the accelerator
    # Of the live tensors that are older than the current batch:
    tensor_count: int
    tensor_bytes: int  # of their storages
    # Of the current batch's own tensors, and of those that were made since the loop got it:
    new_tensor_bytes: int  # of their storages
    batch_bytes: int  # of the storages of the batch's own tensors
    array_bytes: int  # of the NumPy arrays in containers of the recipe


class GrowingTensors(InstrumentRecord):
    """Tensors of one dtype and shape whose number keeps growing."""

    record_type: Literal["growing_tensors"] = "growing_tensors"
    dtype: str
    shape: list[int]
    tensor_count: int  # at the last measurement
    growth: int  # how many were added since the first measurement
    holder: str  # the variable that holds them, in words


class GrowingGraph(InstrumentRecord):
    """A variable whose graph of gradients keeps growing."""

    record_type: Literal["growing_graph"] = "growing_graph"
    variable: str  # in words, such as "`total` of main in train.py"
    operation_count: int  # in the graph at the last measurement
    growth: int  # how many were added since the first measurement


class GrowingContainer(InstrumentRecord):
    """A list, dictionary or set of the recipe that keeps growing."""

    record_type: Literal["growing_container"] = "growing_container"
    variable: str  # in words, such as "the list `history` of main in train.py"
    item_count: int  # at the last measurement
    growth: int  # how many were added since the first measurement
    item_bytes: int  # the size of one of the items, without what it refers to


class Wait(InstrumentRecord):
    """The loop has waited for the device. `step` is the number of updates before the batch."""

    record_type: Literal["wait"] = "wait"
    file: str
    line: int
    operation: str  # the operation that waits, in words, such as ".item()"
    # The line of the user's code that led to the wait. It may be the waiting line itself.
    caller_file: str
    caller_line: int
    is_in_installed_package: bool  # whether the waiting line is
    is_update_logged: bool  # whether the update ends with a log line
