"""Networks that begin as copies of the model, such as an average, and follow it to `--init-from`.

A recipe makes such a copy before `run.start`, which loads the weights of `--init-from` into the
model only. A copy that kept the model's random weights would ruin what is computed with it, in an
evaluation by `--evaluate-only` above all.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from common.checkpoints.checksums import sums_of_bits
from common.checkpoints.export import whole_tensors
from common.checkpoints.pack import Tensors
from common.checkpoints.shards import fill
from common.errors import UserError


def copies_of(model: nn.Module, networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return by name the networks that have the same weights as the model, bit for bit.

    A network may also hold the copy as `module`, as an `AveragedModel` does.

    All ranks must call this if a network is sharded.

    Args:
        networks: the networks that checkpoints hold, by name; the model may be among them.
    """
    copies: dict[str, nn.Module] = {}
    for name, network in networks.items():
        for candidate in (network, getattr(network, "module", None)):
            if not isinstance(candidate, nn.Module) or candidate is model:
                continue
            if has_weights_of(model, candidate):
                copies[name] = candidate
    return copies


def has_weights_of(model: nn.Module, network: nn.Module) -> bool:
    """Whether two networks have the same weights and buffers, by name, shape, dtype and value."""
    state = network.state_dict()
    state_of_model = model.state_dict()
    if not state or shapes_and_dtypes(state) != shapes_and_dtypes(state_of_model):
        return False
    # All tensors are compared, also after a difference, because ranks gather them together.
    values = whole_tensors({name: state[name] for name in state_of_model})
    values_of_model = whole_tensors(state_of_model)
    are_equal = [
        torch.equal(value, value_of_model)
        for value, value_of_model in zip(values, values_of_model, strict=True)
    ]
    return all(are_equal)


def shapes_and_dtypes(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}


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

    Two networks with a checksum in common have these values in common. Vectors, such as biases, and
    zeros are left out: many networks begin with the same ones.

    All ranks must call this if the network is sharded.
    """
    matrices: Tensors = {
        name: value for name, value in network.named_parameters() if value.ndim > 1
    }
    return frozenset(sums_of_bits(matrices).values()) - {0}


def refuse_replaced_weights(network: nn.Module, replaced: frozenset[int]) -> None:
    """Raise a `UserError` if a network still has weights that `--init-from` replaced in the model.

    An average in an object of the recipe's own has such weights, and a recipe may copy them into
    the model to evaluate them.

    Args:
        replaced: the checksums of `checksums_of_matrices` that the model had before and lost.
    """
    if replaced.isdisjoint(checksums_of_matrices(network)):
        return
    raise UserError(
        "the network to evaluate has weights from before --init-from, so its figures would be "
        "those of an untrained model",
        advice=(
            "if the weights come from an average or another copy of the model, copy the model's "
            "weights into it after run.start(...); or pass it to run.keep(...) as a network, such "
            "as average=copy.deepcopy(bare_model), and run.start(...) copies them"
        ),
    )
