"""The digest of the weights that training starts with.

`recipes reproduce` compares the digests of the run and of its repetition. They differ, for example,
if a checkpoint of pretrained weights has changed since the run.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from common.checkpoints.shards import is_sharded
from common.storage.value_digests import digest_of_tensors

MAX_BYTES = 2**30  # larger models get no digest; SHA-256 of so many bytes takes some seconds


def digest_of_model(model: nn.Module) -> str | None:
    """Return the SHA-256 of the names and bytes of a model's parameters and buffers.

    The result is None if the model has more than `MAX_BYTES`, or if it has a tensor for which
    `has_plain_bytes` is false. An example is a model that is sharded over ranks.
    """
    entries = model.state_dict()
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    if not all(has_plain_bytes(tensor) for tensor in tensors.values()):
        return None
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES:
        return None
    return digest_of_tensors(tensors)


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether this process has all values of a tensor, as an ordinary array.

    This is false for a tensor that is sharded, on the meta device, quantized or sparse, and for a
    lazy parameter, which has no values yet.
    """
    if is_lazy(tensor) or is_sharded(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided
