"""Networks that begin as copies of the model, such as an average, and follow it to `--init-from`.

A recipe makes such a copy before `run.start`, which loads the weights of `--init-from` into the
model only. A copy that kept the model's random weights would ruin what is computed with it, in an
evaluation by `--evaluate-only` above all.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from common.checkpoints.checksums import sums_of_bits
from common.checkpoints.export import whole_tensors
from common.checkpoints.pack import Tensors
from common.checkpoints.shards import fill
from common.errors import UserError


def copies_of(model: nn.Module, networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return by name the networks that have the same weights as the model.

    A network may also hold the copy, as an `AveragedModel` does.

    All ranks must call this if a network is sharded.

    Args:
        networks: the networks that checkpoints hold, by name; the model may be among them.
    """
    state_of_model = model.state_dict()
    copies: dict[str, nn.Module] = {}
    for name, network in networks.items():
        if network is model:
            continue
        for module in network.modules():
            if module is not model and has_same_weights(module.state_dict(), state_of_model):
                copies[name] = module
                break
    return copies


def has_same_weights(
    state: Mapping[str, torch.Tensor], state_of_model: Mapping[str, torch.Tensor]
) -> bool:
    """Whether a network has the model's weights and buffers, perhaps in another dtype."""
    shapes = shapes_of(state)
    if not shapes or None in shapes.values() or shapes != shapes_of(state_of_model):
        return False
    # All tensors are compared, also after a difference, because ranks gather them together.
    values = whole_tensors({name: state[name] for name in state_of_model})
    values_of_model = whole_tensors(dict(state_of_model))
    are_equal = [
        torch.equal(value.to(value_of_model.dtype), value_of_model)
        for value, value_of_model in zip(values, values_of_model, strict=True)
    ]
    return all(are_equal)


def shapes_of(state: Mapping[str, object]) -> dict[str, torch.Size | None]:
    """Return the shape of each tensor of a state by name; None for what is no tensor."""
    return {
        name: value.shape if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


def give_weights(model: nn.Module, networks: Iterable[nn.Module]) -> None:
    """Copy the model's weights and buffers into networks that `copies_of` has returned."""
    state = model.state_dict()
    for network in networks:
        own_state = network.state_dict()
        values = whole_tensors({name: state[name] for name in own_state})
        for own_value, value in zip(own_state.values(), values, strict=True):
            fill(own_value, value)


def checksums_of_matrices(network: nn.Module) -> frozenset[int]:
    """Return the checksums of a network's weights that usually begin with random values.

    Two networks with a checksum in common have these values in common, perhaps in another dtype.
    Vectors, such as biases, and zeros are left out: many networks begin with the same ones.

    All ranks must call this if the network is sharded.
    """
    matrices: Tensors = {}
    for name, value in network.named_parameters():
        if value.ndim > 1:
            matrices[name] = value.detach().float() if value.is_floating_point() else value
    return frozenset(sums_of_bits(matrices).values()) - {0}


@contextmanager
def refusing_replaced_weights(network: nn.Module, replaced: frozenset[int]) -> Iterator[None]:
    """Refuse to evaluate weights that `--init-from` replaced in the model.

    An average in an object of the recipe's own still has such weights. A recipe may copy them into
    the network before the block, or in the block before the first forward pass.

    Args:
        replaced: the checksums of `checksums_of_matrices` that the model had before and lost.

    Raises:
        UserError: the network has such weights.
    """
    refuse_replaced_weights(network, replaced)

    def check_once(*unused: object) -> None:
        hook.remove()
        refuse_replaced_weights(network, replaced)

    hook = network.register_forward_pre_hook(check_once)
    try:
        yield
    finally:
        hook.remove()


def refuse_replaced_weights(network: nn.Module, replaced: frozenset[int]) -> None:
    """Raise a `UserError` if a network has replaced weights; see `refusing_replaced_weights`."""
    if replaced.isdisjoint(checksums_of_matrices(network)):
        return
    raise UserError(
        "the network to evaluate has weights that the model had before --init-from, so its figures "
        "would not be those of the trained model",
        advice=(
            "if the weights come from an average or another copy of the model, copy the model's "
            "weights into it after run.start(...); or pass it to run.keep(...) as a network, such "
            "as average=copy.deepcopy(bare_model), and run.start(...) copies them"
        ),
    )
