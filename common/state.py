"""What a checkpoint holds of a run's state, and how it is put back, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from common.checkpoint import Tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Split an optimizer's state into tensors and what JSON can hold."""
    state = optimizer.state_dict()
    tensors: Tensors = {}
    others: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                others[f"{index}.{name}"] = value
    return tensors, {"param_groups": state["param_groups"], "others": others}


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Tensors, rest: dict[str, Any]
) -> None:
    """Put back what `optimizer_tensors` took."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["others"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            # Fused kernels walk a parameter and its state side by side: same strides, then.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def random_state(device: torch.device) -> Tensors:
    """Return the state of all global random generators of this rank."""
    kind, keys, *numbers = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    version, words, _ = random.getstate()
    assert version == 3
    states = {
        "random.torch": torch.get_rng_state(),
        "random.numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "random.numpy_numbers": torch.tensor(numbers, dtype=torch.float64),
        "random.python": torch.tensor(words, dtype=torch.int64),
    }
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_random_state(states: Tensors, device: torch.device) -> None:
    """Put back what `random_state` took."""
    torch.set_rng_state(states["random.torch"])
    position, has_gauss, gauss = states["random.numpy_numbers"].tolist()
    keys = states["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    random.setstate((3, tuple(states["random.python"].tolist()), None))
    if device.type == "cuda" and "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"], device)


def buffer_tensors(model: nn.Module) -> Tensors:
    """Return a model's buffers: batch norm's statistics differ between ranks."""
    return {f"buffer.{name}": value for name, value in model.named_buffers()}


def load_buffers(model: nn.Module, tensors: Tensors) -> None:
    """Put back what `buffer_tensors` took."""
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(tensors[f"buffer.{name}"])
