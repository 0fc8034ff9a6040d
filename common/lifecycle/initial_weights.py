"""The digest of the weights that a training starts with.

A reproduction compares it, because a checkpoint of pretrained weights may have changed since.
"""

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

MOST_BYTES = 2**30  # of a model whose digest is taken; SHA-256 takes some seconds for these


def digest_of_model(model: nn.Module) -> str | None:
    """Return the SHA-256 of the names and bytes of a model's parameters and buffers.

    None for a model of more than `MOST_BYTES`, one that is sharded over ranks, and one with weights
    that do not exist yet.
    """
    entries = model.state_dict()
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    if not all(has_plain_bytes(tensor) for tensor in tensors.values()):
        return None
    if sum(tensor.nbytes for tensor in tensors.values()) > MOST_BYTES:
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether all values of a tensor are in the memory of this process, one after another."""
    if is_lazy(tensor) or isinstance(tensor, DTensor) or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided
