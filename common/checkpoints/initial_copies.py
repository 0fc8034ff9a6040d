"""Networks that begin as copies of the model, such as an average, and follow it to `--init-from`.

A recipe makes such a copy before `run.start`, which loads the weights of `--init-from` into the
model only. A copy that kept the model's random weights would ruin what is computed with it, in an
evaluation by `--evaluate-only` above all.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from common.checkpoints.export import whole_tensors
from common.checkpoints.shards import fill


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
    states = [network.state_dict(), model.state_dict()]
    facts, facts_of_model = (
        {name: (value.shape, value.dtype) for name, value in state.items()} for state in states
    )
    if not facts or facts != facts_of_model:
        return False
    # All tensors are compared, also after a difference, because ranks gather them together.
    pairs = zip(*(whole_tensors(dict(sorted(state.items()))) for state in states), strict=True)
    are_equal = [torch.equal(value, value_of_model) for value, value_of_model in pairs]
    return all(are_equal)


def give_weights(model: nn.Module, networks: Iterable[nn.Module]) -> None:
    """Copy the model's weights and buffers into networks that `copies_of` has returned."""
    state = model.state_dict()
    for network in networks:
        own_state = network.state_dict()
        values = whole_tensors({name: state[name] for name in own_state})
        for own_value, value in zip(own_state.values(), values, strict=True):
            fill(own_value, value)
