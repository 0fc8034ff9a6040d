"""The weights of a model: taken out of its state, and put into it, if they fit."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path

import torch
from torch import nn

from common.checkpoints.pack import Tensors, storage_key
from common.checkpoints.shards import Rows, fill, read_sharded
from common.errors import UserError
from common.run_directory.finished_model import WEIGHTS, model_folder
from common.system.wording import counted


def weights_of(model: nn.Module) -> Tensors:
    """Return a model's state, not copied.

    Tied weights are there once, under their first name, so that a file does not repeat them.
    """
    state = model.state_dict()
    return {name: state[name] for name, *_ in names_by_weight(model)}


def names_by_weight(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor in a model's state; tied weights have several names."""
    names: dict[Hashable, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        names[storage_key(value)].append(name)
    return [*names.values()]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a finished run into a model; a `UserError` if they don't fit."""
    put_weights(model, read_sharded([model_folder(path) / WEIGHTS]), path)


def put_weights(
    model: nn.Module, weights: dict[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Copy weights into a model, in place; a `UserError` if they don't fit.

    Args:
        weights: the weights by name. Tied weights need only one of their names; `put_weights` adds
            the others to the dict.
        path: the file or folder of the weights, for a message.
    """
    state = model.state_dict()
    for names in names_by_weight(model):
        stored = [weights[name] for name in names if name in weights]
        if stored:
            for name in names:
                weights[name] = stored[0]
    refuse_unfit_weights(state, weights, path)
    for name, value in state.items():
        fill(value, weights[name])


def refuse_unfit_weights(
    state: Tensors, weights: Mapping[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Raise a `UserError` that names the first weight that is missing, unknown or of another shape.

    Weights of another model, which have no name in common with this one, are refused first.
    """
    refuse_unrelated_weights(state, weights, path)
    advice = "use the flags and the data set of the run that wrote these weights, or other weights"
    for name in sorted(state.keys() | weights.keys()):
        model_shape = tuple(state[name].shape) if name in state else None
        stored_shape = tuple(weights[name].shape) if name in weights else None
        if model_shape == stored_shape:
            continue
        if model_shape is None:
            count = len(weights.keys() - state.keys())
            tensors = counted(count, "such tensor")
            difference = f"it has {name}, which this model lacks ({tensors})"
        elif stored_shape is None:
            count = len(state.keys() - weights.keys())
            tensors = counted(count, "such tensor")
            difference = f"it has no {name}, which this model needs ({tensors})"
        else:
            difference = (
                f"{name} has the shape {stored_shape} in it, but {model_shape} in this model"
            )
        raise UserError(f"{path} does not fit this model, because {difference}", advice=advice)


def refuse_unrelated_weights(
    state: Tensors, weights: Mapping[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Raise a `UserError` if weights and a model's state have no name in common.

    `load_initial` calls this before it looks for heads, and not only through `put_weights`. Such
    weights lack all heads. Without the early call, `load_initial` would say that each head starts
    with random values, and only then refuse the weights.
    """
    if state and weights and not state.keys() & weights.keys():
        raise UserError(
            (
                f"{path} has weights of another model: this model has none of its "
                f"{counted(len(weights), 'tensor')} ({min(weights)}, for example), but others "
                f"({min(state)}, for example)"
            ),
            advice="pass weights that this recipe wrote, or run the recipe that wrote these",
        )
