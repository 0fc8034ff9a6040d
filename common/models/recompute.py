"""`--gradient-checkpointing`: recomputes activations in the backward pass instead of keeping them.

This saves memory, and costs a second forward pass in each update.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module, *inputs: object) -> Any:
    """Return a module's outputs, and call it again in the backward pass to save memory.

    The second call computes the activations that the first call did not keep.

    `torch.utils.checkpoint` alone would update batch norm's statistics, and any other buffer that
    the module changes, in both calls. Here the second call gets copies of the buffers as they were
    before the first call, and changes only the copies.
    """
    buffers_before = {}
    if not torch.compiler.is_compiling():  # compiled code changes buffers only once
        buffers_before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if not buffers_before:
        return checkpoint(module, *inputs, use_reentrant=False)
    is_called = False

    def call(*inputs: object) -> object:
        nonlocal is_called
        if is_called:
            copies = {name: buffer.clone() for name, buffer in buffers_before.items()}
            return torch.func.functional_call(module, copies, inputs)
        is_called = True
        return module(*inputs)

    return checkpoint(call, *inputs, use_reentrant=False)
