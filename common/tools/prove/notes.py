"""The records that the instruments of single checks write, besides the usual ones."""

from typing import Literal

from common.tools.prove.observed import Observed, Phase


class Note(Observed):
    """What an instrument has seen."""

    step: int  # updates made before it


# Updates


class Mixers(Note):
    """What mixes the samples of a micro-batch."""

    kind: Literal["mixers"] = "mixers"
    layers: list[str]  # their classes
    couples_samples: bool  # whether the recipe says so of its loss


class OptimizerStep(Note):
    """An optimizer is about to make an update."""

    kind: Literal["optimizer_step"] = "optimizer_step"
    optimizer: int  # its number, in the order of first use
    gradient_norm: float  # before gradients are clipped
    learning_rates: list[float]  # of all its groups


# Losses and evaluations


class TrainingLoss(Note):
    """A function of torch has computed a loss in training."""

    kind: Literal["training_loss"] = "training_loss"
    function: str
    value: float  # mean over the elements
    micro_batch: int  # number within the update
    # What the outputs say, as means over the elements: accuracy and error, or mse and mae.
    means: dict[str, float] = {}


class RowOutcomes(Observed):
    """What a model's outputs say of each sample of a batch; None where they say nothing."""

    hits: list[float] | None = None  # shares of a sample's elements that are classified correctly
    squares: list[float] | None = None  # mean squared errors
    distances: list[float] | None = None  # mean absolute errors
    # With one class for each sample:
    predicted: list[int] | None = None
    labels: list[int] | None = None
    classes: int = 0


class Outcome(Note):
    """A function of torch has computed a loss for a batch of an evaluation."""

    kind: Literal["outcome"] = "outcome"
    phase: Phase
    split: str
    reading: int  # an evaluation may read its split several times; they are numbered
    samples: list[int]
    function: str
    value: float  # mean over the elements
    losses: list[float] | None = None  # of each sample; None if they can't be told apart
    of_rows: RowOutcomes = RowOutcomes()


class TrainingMode(Note):
    """A layer that acts differently in training was in that mode in an evaluation."""

    kind: Literal["training_mode"] = "training_mode"
    phase: Phase
    split: str
    layer: str  # its class


# Rows of a batch


class UnusedRows(Note):
    """The positions of a micro-batch on which its loss does not depend."""

    kind: Literal["unused_rows"] = "unused_rows"
    samples: int  # of the micro-batch
    unused: list[int]


class NotGiven(Note):
    """The model got fewer samples than the batch has."""

    kind: Literal["not_given"] = "not_given"
    rows: int  # that it got
    samples: int  # of the batch


# Time and memory


class Interval(Note):
    """The time between two log lines, in which there were only updates."""

    kind: Literal["interval"] = "interval"
    after: int  # the update of the first line
    seconds: float


class MemoryInUse(Note):
    """The memory in use after an update, in bytes; None where it can't be measured."""

    kind: Literal["memory"] = "memory"
    resident: int
    in_use: int | None  # by the C library's allocator
    device: int | None
    tensors: int  # the number of live tensors
    tensor_bytes: int


class GrowingTensors(Note):
    """A kind of tensor of which there are ever more."""

    kind: Literal["growing"] = "growing"
    dtype: str
    shape: list[int]
    count: int
    more: int  # than at the first measurement
    holder: str  # in words


class Wait(Note):
    """The loop has waited for the device."""

    kind: Literal["wait"] = "wait"
    file: str
    line: int
    operation: str  # in words
    caller_file: str  # where the user's code has called that line; its own place if it is there
    caller_line: int
    is_installed: bool  # whether the line is in an installed package
    is_logged: bool  # whether the update ends with a log line
