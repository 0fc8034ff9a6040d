"""Explains errors of torch about the values or the shapes of a batch.

Such an error comes from the data or from the model, but torch names neither. The frames of its
traceback hold the batch, in training and in evaluations alike, so the explanation describes it.
"""

import re
from collections.abc import Iterator
from types import FrameType

import torch

from common.data.places import values_with_places
from common.failures.error_causes import is_lost_process, is_out_of_memory
from common.failures.user_frames import is_of_user, package_of, tracebacks_of
from common.system.wording import listed

EXPLAINED_CLASSES = (RuntimeError, IndexError, ValueError, UserWarning, TypeError)
# Python's error for `batch["images"]` if the batch is a list or a tuple.
NAME_AS_INDEX = re.compile(r"^(list|tuple) indices must be integers or slices, not str$")
# Python's error for a step of `ReduceLROnPlateau` without a metric.
NO_METRIC = "ReduceLROnPlateau.step() missing 1 required positional argument"
NO_METRIC_CAUSE = (
    "ReduceLROnPlateau makes a step for each evaluation: call scheduler.step(figures[NAME]) after "
    "run.log(figures), and not in the loop (see docs/make-your-own.md)"
)
# Python's error for a step of `LBFGS` without a closure.
NO_CLOSURE = "'NoneType' object is not callable"
NO_CLOSURE_CAUSE = (
    "this optimizer computes the loss itself, several times in a step: call "
    "optimizer.step(closure), with a function that calls optimizer.zero_grad() and "
    "accelerator.backward(loss), and returns the loss"
)
# Torch's error in the backward pass of a loss without gradient.
NO_GRADIENT = "does not require grad and does not have a grad_fn"
NO_GRADIENT_CAUSE = (
    "the loss depends on no parameter that is trained: set requires_grad of some parameters to "
    "True, and compute the loss without torch.no_grad(), .detach() or .item()"
)
# Torch's error for an operator that got a sharded weight and a whole tensor.
MIXED_WITH_SHARDS = "got mixed torch.Tensor and DTensor"
MIXED_WITH_SHARDS_CAUSE = (
    "the weights of a sharded network (FSDP2) were combined with whole tensors, such as those of a "
    "network that is not sharded: make a second network of the same shape by "
    "copy.deepcopy(accelerator.unwrap_model(model)) after accelerator.prepare, which shards it, "
    "too, or take whole weights by weight.full_tensor() on all processes"
)
# Texts of torch's errors about tensors on two devices.
TWO_DEVICES = re.compile(
    r"^Expected all tensors to be on the same device|^indices should be either on .* same device"
    r"|^Tensor on device \S+ is not on the expected device"
)
TWO_DEVICES_CAUSE = (
    "a tensor is not on the run's device: the batches of a run's loaders are there already, so "
    "move the other tensors by .to(run.device), such as weights of classes or new labels"
)
# Texts of torch's errors about a label, a token or another index.
INDEX_ERROR = re.compile(
    r"^(Target -?\d+ is out of bounds|index -?\d+ is out of bounds for dimension"
    r"|index out of range in self|Class values must be)|device-side assert"
)
# Words of torch's errors about shapes and types.
SHAPE_ERROR = re.compile(
    r"\b(shapes?|sizes?|dtypes?|dim|dimensions?|channels|scalar types?|input type|\dD|batch_size"
    r"|multi-target|should contain \d+ elements)\b",
    re.IGNORECASE,
)
# Texts of torch's errors in an operator that the user's code calls itself, such as in
# `images @ weights`. An operator has no frame in the traceback, so only the text tells its errors
# from those of NumPy or of the user's own checks.
OPERATOR_ERROR = re.compile(
    r"^(index -?\d+ is out of bounds for dimension \d+ with size|index out of range in self"
    r"|Class values must be|mat1 and mat2 shapes cannot|expected m1 and m2 to have"
    r"|The size of tensor a \(|The expanded size of the tensor \(|Sizes of tensors must match"
    r"|Tensors must have same number of dimensions|stack expects each tensor"
    r"|inconsistent tensor size, expected tensor|size mismatch, got input"
    r"|Expected size for first two dimensions of batch2|batch[12] must be a 3D tensor"
    r"|output with shape \[|shape '\[[-\d, ]*\]' is invalid for input|view size is not compatible"
    r"|Dimension out of range \(expected|too many indices for tensor of dimension"
    r"|The shape of the mask \[|shape mismatch: (indexing|value) tensor|Index tensor must have"
    r"|Size does not match at dimension|Expected index \[|expected scalar type \w+ but found"
    r"|Given (groups|transposed|normalized_shape)=|Calculated padded input size per channel"
    r"|Input type \(|Expected tensor for argument|Expected query, key, and value to have"
    r"|running_(mean|var) should contain|\w+\(.*\): (the )?number of (sizes|dimensions)"
    r"|[\w.]+\(\): Expected (dtype|self\.dtype)|t\(\) expects a tensor)"
    r"|^Expected .*\dD .*input to \w+, but got|expected both vectors to have same dtype"
    r"|device-side assert"
)
CLASS_LOSSES = ("cross_entropy", "nll_loss")  # functions of torch that take scores of classes
TensorAtPlace = tuple[str, torch.Tensor]


def likely_cause_of(error: BaseException) -> str | None:
    """Return a sentence with the likely cause of an error about a batch; None for other errors."""
    is_explained = isinstance(error, EXPLAINED_CLASSES)
    if not is_explained or is_out_of_memory(error) or is_lost_process(error):
        return None
    frames = [entry.tb_frame for entry in tracebacks_of(error)]
    own_frames = [frame for frame in frames if is_of_user(frame)]
    if isinstance(error, TypeError):
        return likely_cause_of_type(error, frames)
    if own_frames and isinstance(error, RuntimeError) and NO_GRADIENT in str(error):
        return NO_GRADIENT_CAUSE
    if not own_frames or not is_raised_by_torch(error, frames):
        return None
    if MIXED_WITH_SHARDS in str(error):
        return MIXED_WITH_SHARDS_CAUSE
    if TWO_DEVICES.search(str(error)):
        return TWO_DEVICES_CAUSE
    batch = tensors_of_batch(own_frames)
    if INDEX_ERROR.search(str(error)):
        return likely_cause_of_index(frames, batch)
    if SHAPE_ERROR.search(str(error)):
        return likely_cause_of_shapes(error, batch, tensors_of_loss(frames))
    return None


def likely_cause_of_shapes(
    error: BaseException, batch: list[TensorAtPlace], compared: list[TensorAtPlace]
) -> str:
    """Return the likely cause of an error about shapes or dtypes.

    Args:
        error: torch's error, or its warning about a loss: see `crossed_shapes`.
        batch: the tensors of the batch.
        compared: the tensors that a loss function compares.
    """
    if isinstance(error, UserWarning):
        return (
            "the loss compares each prediction with the targets of all samples"
            f"{shapes_in_words(compared)}: give predictions and targets the same shape, such as by "
            "predictions.squeeze(-1); or expand both to one shape yourself, if all pairs are to be "
            "compared"
        )
    return (
        f"the shapes or dtypes of the batch do not fit the model or the loss"
        f"{shapes_in_words([*batch, *compared])}: change the data, or the sizes that the model is "
        "built with"
    )


def is_raised_by_torch(error: BaseException, frames: list[FrameType]) -> bool:
    """Whether an error comes from torch, called by the user's code or by a model of the library.

    Args:
        frames: the frames of the traceback, the innermost first.
    """
    caller = next(frame for frame in frames if package_of(frame) not in ("torch", "accelerate"))
    if not (is_of_user(caller) or is_of_model(caller)):
        return False
    if caller is not frames[0]:
        return True
    if not isinstance(error, (RuntimeError, IndexError)):
        return False
    text = str(error)
    return OPERATOR_ERROR.search(text) is not None or TWO_DEVICES.search(text) is not None


def is_of_model(frame: FrameType) -> bool:
    """Whether a frame runs a model of the library."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("common.models.")


def tensors_of_batch(own_frames: list[FrameType]) -> list[TensorAtPlace]:
    """Return the tensors of the batch, each after its place.

    The batch is the variable `batch` of the innermost frame that has one. Without any, the tensors
    are those in the variables of the innermost frame.

    Args:
        own_frames: the frames of the user's code, the innermost first.
    """
    for frame in own_frames:
        if "batch" in frame.f_locals:
            tensors = [*tensors_with_places(frame.f_locals["batch"], "batch")]
            if tensors:
                return tensors
    innermost = own_frames[0].f_locals
    return [pair for name, value in innermost.items() for pair in tensors_with_places(value, name)]


def tensors_of_loss(frames: list[FrameType]) -> list[TensorAtPlace]:
    """Return what a loss function of torch in the traceback compares; empty if there is none.

    Args:
        frames: the frames of the traceback, the innermost first.
    """
    for frame in frames:
        values = frame.f_locals
        if package_of(frame) == "torch" and {"input", "target"} <= values.keys():
            predictions = tensors_with_places(values["input"], "predictions of the loss")
            return [*predictions, *tensors_with_places(values["target"], "targets of the loss")]
    return []


def tensors_with_places(value: object, name: str) -> Iterator[TensorAtPlace]:
    """Yield the tensors in a value, each after its place."""
    for place, item in values_with_places(value, name):
        if isinstance(item, torch.Tensor):
            yield place, item


def likely_cause_of_index(frames: list[FrameType], batch: list[TensorAtPlace]) -> str:
    """Return a sentence with the likely cause of an index that is out of range.

    Args:
        frames: the frames of the traceback, the innermost first.
    """
    ranges = [
        f"{place}{range_in_words(tensor)}" for place, tensor in batch if holds_indices(tensor)
    ]
    values = f" ({listed(ranges)})" if ranges else ""
    class_count = number_of_classes(frames)
    if class_count is None:
        return (
            f"an index, such as a token or a label, is outside of what it selects from{values}: "
            "correct it in the data, or give the model as many embeddings or outputs as there are "
            "values"
        )
    return (
        f"a label is not one of the {class_count} classes of the loss, 0 to {class_count - 1}"
        f"{values}: number the labels from 0, set those to ignore to -100, or give the model one "
        "output for each class"
    )


def likely_cause_of_type(error: TypeError, frames: list[FrameType]) -> str | None:
    """Return a sentence for a step that lacks its argument, or for a batch that is a list.

    Args:
        frames: the frames of the traceback, the innermost first.
    """
    if NO_METRIC in str(error):
        return NO_METRIC_CAUSE
    is_in_step = any(map(is_step_of_optimizer, frames)) and not is_of_user(frames[0])
    if NO_CLOSURE in str(error) and is_in_step:
        return NO_CLOSURE_CAUSE
    return likely_cause_of_name(error, frames)


def is_step_of_optimizer(frame: FrameType) -> bool:
    """Whether a frame runs the step of an optimizer of torch, which takes a closure."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("torch.optim.") and "closure" in frame.f_locals


def likely_cause_of_name(error: TypeError, frames: list[FrameType]) -> str | None:
    """Return a sentence for a batch that is a list or a tuple but is read by a name.

    Args:
        frames: the frames of the traceback, the innermost first.
    """
    batch = frames[0].f_locals.get("batch") if frames and is_of_user(frames[0]) else None
    if not NAME_AS_INDEX.search(str(error)) or not isinstance(batch, list | tuple):
        return None
    return (
        f"the batch is a {type(batch).__name__} of {len(batch)} values"
        f"{shapes_in_words([*tensors_with_places(batch, 'batch')])}, because the data set returns "
        'its samples as tuples: return a dictionary from __getitem__, such as {"images": image, '
        '"labels": label}'
    )


def number_of_classes(frames: list[FrameType]) -> int | None:
    """Return how many classes the loss in the traceback has; None if there is no such loss."""
    for frame in frames:
        scores = frame.f_locals.get("input")
        if frame.f_code.co_name in CLASS_LOSSES and isinstance(scores, torch.Tensor):
            return scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    return None


def holds_indices(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold labels, tokens or other indices."""
    is_number = not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )
    return is_number and tensor.numel() > 0


def range_in_words(tensor: torch.Tensor) -> str:
    """Return the smallest and the largest value of a tensor; empty if it can't be read.

    After a failed assertion on a GPU, no tensor there can be read.
    """
    try:
        return f" from {int(tensor.min())} to {int(tensor.max())}"
    except RuntimeError:
        return ""


def shapes_in_words(tensors: list[TensorAtPlace]) -> str:
    """Return the places, dtypes and shapes of tensors in brackets; empty if there are none."""
    phrases = [
        f"{place} {str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
        for place, tensor in tensors
    ]
    return f" ({listed(phrases)})" if phrases else ""
