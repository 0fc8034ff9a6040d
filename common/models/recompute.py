"""`--gradient-checkpointing`: activations are computed again in the backward pass, not kept."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module, *inputs: Any) -> Any:
    """Call `module` as it is, and once more in the backward pass instead of keeping activations.

    `torch.utils.checkpoint` alone updates batch norm's statistics, and any buffer that a module
    changes, in both calls. Here the second one finds copies of what the first has found, and
    leaves nothing behind.
    """
    found = {}
    if not torch.compiler.is_compiling():  # compiled code does not repeat such changes
        found = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if not found:
        return checkpoint(module, *inputs, use_reentrant=False)
    is_called = False

    def call(*inputs: Any) -> Any:
        nonlocal is_called
        if is_called:
            copies = {name: buffer.clone() for name, buffer in found.items()}
            return torch.func.functional_call(module, copies, inputs)
        is_called = True
        return module(*inputs)

    return checkpoint(call, *inputs, use_reentrant=False)
