"""Finds weights that differ between ranks, before a checkpoint saves them."""

from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn

from common.checkpoints.checksums import sums_of_bits
from common.checkpoints.shards import is_sharded
from common.errors import TrainingError
from common.ranks.agreement import differing_positions

ADVICE = (
    "look for a layer that was changed outside of the optimizer or by an optimizer that was not "
    "prepared, a network that was trained without accelerator.prepare(...), or a loss that leaves "
    'out a layer on some ranks (write Run(..., ddp={"find_unused_parameters": True}))'
)


def networks_of(parts: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return the networks among the parts of a checkpoint, by name.

    A part of a checkpoint may wrap its network. The wrapper then has the network as `module`.
    """
    modules = {name: getattr(part, "module", part) for name, part in parts.items()}
    return {name: module for name, module in modules.items() if isinstance(module, nn.Module)}


def require_equal_weights(accelerator: Accelerator, networks: Mapping[str, nn.Module]) -> None:
    """Compare the bits of all parameters over all ranks; called on all ranks.

    Raises:
        TrainingError: a parameter differs. The message names the first such parameter.
    """
    if accelerator.num_processes == 1:
        return
    parameters = dict(whole_parameters(networks))
    sums = [*sums_of_bits(parameters).values()]
    differing = differing_positions(accelerator, sums)
    if differing:
        name = [*parameters][differing[0]]
        raise TrainingError(
            (
                f"the weights differ between ranks, first in {name} ({len(differing)} of "
                f"{len(sums)} parameters), so they were not saved"
            ),
            advice=ADVICE,
        )


def whole_parameters(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the value of each parameter that is not sharded.

    Ranks have different rows of a sharded parameter, so there is nothing to compare.

    A name begins with the network's name, such as ``model.head.weight``.
    """
    for name, network in networks.items():
        bare = extract_model_from_parallel(network)
        for parameter_name, parameter in bare.named_parameters():
            if not is_sharded(parameter):
                yield f"{name}.{parameter_name}", parameter
