"""Counts a model's floating-point operations once, by running it, for TFLOP/s and MFU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from common.checkpoints.adapters import RandomState
from common.data.samples import Batch, Samples
from common.models.compile import as_written

# A function of the recipe that takes the model and a batch, and returns the loss and the outputs.
# The recipe may state any type of its model and of its batch.
ComputeLoss = Callable[[Any, Any], tuple[torch.Tensor, object]]

# For samples without lengths: how many samples the batch has whose operations are counted.
REAL_SAMPLES = 4


class UnreadableSamplesError(Exception):
    """Samples can't be read before training, so no operations can be counted on them."""


class TrainingFlops(NamedTuple):
    """The operations of a sample's forward and backward pass, in three parts.

    A multiplication and an addition count as two. The operations of matrix products grow with the
    sample's tokens, and those of attention with the square of its tokens. Padding does not count.
    If samples have no tokens, `per_sample` has all operations.
    """

    per_sample: float
    per_token: float = 0.0
    per_squared_token: float = 0.0

    def total(self, samples: float, tokens: float, squared_tokens: float) -> float:
        """Return the operations of `samples` samples that have `tokens` tokens together.

        Args:
            squared_tokens: the sum over samples of the square of their tokens.
        """
        return (
            self.per_sample * samples
            + self.per_token * tokens
            + self.per_squared_token * squared_tokens
        )

    def times(self, passes: int) -> "TrainingFlops":
        """Return the operations of several forward and backward passes with each sample."""
        return TrainingFlops(*(passes * operations for operations in self))


def flops_of_sample(
    model: nn.Module, compute_loss: ComputeLoss, samples: Samples, device: torch.device
) -> TrainingFlops:
    """Count the operations of a sample: on shapes alone, or if that fails, on a few real samples.

    Args:
        model: the model without the wrapper that Accelerate adds for several processes.

    Raises:
        Exception: an error of any class. It is that of the real samples, because the user can mend
            its cause. The first error may only say that the model reads values, which is no
            mistake, so it is raised only if there are no real samples to count on.
    """
    try:
        return training_flops(model, compute_loss, samples)
    except Exception as error:  # a recipe's model may raise anything
        error_on_shapes = error
    try:
        return training_flops_of_real_samples(model, compute_loss, samples, device)
    except UnreadableSamplesError:
        raise error_on_shapes from None


def training_flops(model: nn.Module, compute_loss: ComputeLoss, samples: Samples) -> TrainingFlops:
    """Count the operations of a sample on the meta device, where tensors have no values.

    Recomputation under gradient checkpointing is not counted. Attention is counted as its two
    products, because `torch.utils.flop_counter` does not see all fused kernels.

    Args:
        model: the model without the wrapper that Accelerate adds for several processes.
        compute_loss: the recipe's function; it is called once for each length of samples.
        samples: the training samples, which give the shapes.

    Raises:
        Exception: an error of any class, if the model needs values; see
            `training_flops_of_real_samples`.
    """
    tensors = stand_ins_of_tensors(model, without_values)
    if not samples.has_tokens:
        batches = {0.0: samples.example(1, 0)}
    # `Samples.example` ignores the requested length, so real samples must serve.
    elif samples.lengths is not None and type(samples).example is Samples.example:
        indices_by_length = index_of_each_length(samples.lengths)
        batches = {
            length: samples.shapes_of(indices) for length, indices in indices_by_length.items()
        }
    else:  # three lengths are enough for the parabola of `parabola_through`
        batches = {length: samples.example(1, int(length)) for length in (8.0, 16.0, 32.0)}
    counts = {
        length: count_operations(model, compute_loss, batch, tensors)
        for length, batch in batches.items()
    }
    return parabola_through(counts)


def training_flops_of_real_samples(
    model: nn.Module, compute_loss: ComputeLoss, samples: Samples, device: torch.device
) -> TrainingFlops:
    """Count the operations of a sample on a few real samples.

    Some models need values, for boolean indexing, for example. Random generators, buffers and
    gradients are the same afterwards.

    Raises:
        UnreadableSamplesError: the samples come from a stream, which can't be read ahead, or they
            are texts of unknown length.
        Exception: an error of any class that the recipe's function or its model raises.
    """
    if not samples.is_sized:
        raise UnreadableSamplesError("samples that come from a stream can't be read ahead")
    if samples.has_tokens and samples.lengths is None:
        raise UnreadableSamplesError("the lengths of streamed texts are not known in advance")
    generators = RandomState(device)
    state_before = generators.state_dict()
    try:
        if samples.lengths is None:
            indices_by_length = {0.0: torch.arange(min(REAL_SAMPLES, len(samples)))}
        else:
            indices_by_length = index_of_each_length(samples.lengths)
        counts = {}
        for length, indices in indices_by_length.items():
            batch = samples.values_of(indices, device)
            tensors = stand_ins_of_tensors(model, with_values)
            total = count_operations(model, compute_loss, batch, tensors)
            counts[length] = total / len(indices)
    finally:
        generators.load_state_dict(state_before)
    return parabola_through(counts)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of each module with the names that `functional_call` needs.

    A tensor that two modules share is yielded under both names. A module that has two names is
    yielded under its first name only: with both, `functional_call` would not put the original
    tensor back.
    """
    for prefix, module in model.named_modules():
        own_of_module = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own_of_module:
            yield f"{prefix}.{name}" if prefix else name, tensor


def stand_ins_of_tensors(
    model: nn.Module, stand_in_for: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return stand-ins for a model's tensors by name, so that a pass changes nothing in the model.

    Tied weights share a stand-in.

    Args:
        stand_in_for: makes the stand-in of a tensor: `without_values` or `with_values`.
    """
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    stand_ins_by_name = {}
    for name, tensor in own_tensors(model):
        if tensor not in stand_ins:
            stand_ins[tensor] = stand_in_for(tensor).requires_grad_(tensor.requires_grad)
        stand_ins_by_name[name] = stand_ins[tensor]
    return stand_ins_by_name


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype on the meta device."""
    return torch.empty_like(tensor, device="meta")


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a buffer. A parameter is not copied, but gets a gradient of its own."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.clone()


def index_of_each_length(lengths: np.ndarray) -> dict[float, torch.Tensor]:
    """Return up to three lengths, each with the index of one sample that has it, int64 [1].

    The lengths are the 10 %, 50 % and 90 % quantiles of all lengths, some of which may be equal.
    """
    order = np.argsort(lengths, kind="stable")  # the indices of the samples, shortest first
    shares = (0.1, 0.5, 0.9)
    indices = [int(order[int(share * (len(order) - 1))]) for share in shares]
    return {float(lengths[index]): torch.tensor([index]) for index in indices}


def parabola_through(counts: dict[float, float]) -> TrainingFlops:
    """Find a, b and c such that a sample of L tokens takes a + bL + cL² operations.

    The parabola goes through all points. With fewer than three lengths, it has fewer terms.

    Args:
        counts: the operations of one sample, by its length in tokens; one to three lengths.
    """
    lengths = torch.tensor([*counts], dtype=torch.float64)
    powers = torch.vander(lengths, increasing=True)
    operations = torch.tensor([*counts.values()], dtype=torch.float64)
    coefficients = torch.linalg.solve(powers, operations)
    return TrainingFlops(*coefficients.tolist())


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of each module at the end of the block, its training mode among them.

    A forward pass may keep a tensor in its module, such as a table of positions. On the meta
    device, this tensor has no values, so training must not find it there. If an attribute is a
    dict, a list or a set, its items are restored, too.
    """
    containers: list[Any] = []  # dicts, lists and sets
    for module in model.modules():
        attributes = vars(module)
        containers.append(attributes)
        containers += [
            value for value in attributes.values() if isinstance(value, (dict, list, set))
        ]
    items = [dict(value) if isinstance(value, dict) else [*value] for value in containers]
    try:
        yield
    finally:
        for container, items_before in zip(containers, items, strict=True):
            container.clear()
            if isinstance(container, list):
                container.extend(items_before)
            else:
                container.update(items_before)


def count_operations(
    model: nn.Module, compute_loss: ComputeLoss, batch: Batch, tensors: dict[str, torch.Tensor]
) -> float:
    """Return the operations of one forward and backward pass, which leaves the model unchanged.

    Args:
        batch: one sample, or several, whose operations are all counted.
        tensors: the tensors to use instead of the model's own, by name.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def with_tensors(*inputs: object, **named_inputs: object) -> object:
        """Call the model with `tensors`; `compute_loss` gets this function as its model."""
        return torch.func.functional_call(model, tensors, inputs, named_inputs, tie_weights=False)

    # A model of Transformers has several implementations of attention. The eager one consists of
    # matrix products, which the counter sees.
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    set_attention = getattr(model, "set_attn_implementation", None) if attention else None
    try:
        if set_attention is not None:
            set_attention("eager")
        with (
            unchanged_attributes(model),
            as_written(model),
            torch.enable_grad(),
            FlopCounterMode(display=False) as counter,
        ):
            model.eval()  # gradient checkpointing recomputes only in training mode
            compute_loss(with_tensors, batch)[0].backward()
    finally:
        if set_attention is not None:
            set_attention(attention)
    return float(counter.get_total_flops())
