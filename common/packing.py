"""BERT without padding: every layer works on the real tokens alone.

The encoder's input, [batch, length, width], is packed to [1, tokens, width] before the first layer
and unpacked after the last, so the pooler finds each sample's first token where it always is. Only
attention looks across positions: it spreads queries, keys and values out again and masks as the
padded model does, or, where nothing is dropped in it, runs torch's variable-length kernel on CUDA
(`torch.nn.attention.varlen`; that path has not been tried, for want of a GPU). Packing for linear
layers and unpacking for attention is from the Effective Transformer (ByteDance, 2020).

Losses and gradients are those of the padded model within rounding; random masks of dropout differ,
as there are fewer activations to drop.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ATTENTION = "packed"  # its name among Transformers' implementations of attention
# What a batch has besides, and the model's `forward` hands down to its layers.
POSITIONS = "token_positions"


def token_positions(lengths: torch.Tensor, padded_length: int) -> torch.Tensor:
    """Return where the real tokens are in a padded batch, row by row.

    Args:
        lengths: int64 [batch], on the host, so that nothing waits for the device.
    Returns:
        int64 [tokens]: places in the batch flattened to [batch × padded_length].
    """
    return torch.nonzero((torch.arange(padded_length) < lengths[:, None]).flatten()).flatten()


def leave_out_padding(model: nn.Module) -> None:
    """Have a BERT from Transformers work on packed tokens, where a batch says which are real."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    bert: Any = model
    bert.set_attn_implementation(ATTENTION)
    encoder: nn.Module = bert.bert.encoder
    encoder.register_forward_pre_hook(pack, with_kwargs=True)
    encoder.register_forward_hook(unpack, with_kwargs=True)


def pack(encoder: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Take the real tokens out of [batch, length, width]."""
    if POSITIONS not in named:
        return None
    (hidden,) = inputs
    return (hidden.flatten(0, 1).index_select(0, named[POSITIONS])[None],), named


def unpack(encoder: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> Any:
    """Put the tokens back to [batch, length, width], with zeros between."""
    if POSITIONS not in named:
        return None
    mask = named["attention_mask"]
    outputs.last_hidden_state = spread(
        outputs.last_hidden_state[0], named[POSITIONS], len(mask), mask.shape[-1]
    )
    return outputs


def spread(packed: torch.Tensor, positions: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return [batch, length, ...] with the rows of `packed`, [tokens, ...], at `positions`."""
    rows = packed.new_zeros(batch * length, *packed.shape[1:])
    return rows.index_copy(0, positions, packed).unflatten(0, (batch, length))


@functools.cache
def has_variable_length_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention runs there: FlashAttention's hardware and types."""
    half = dtype in (torch.float16, torch.bfloat16)
    return half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sample, as Transformers calls an implementation of attention.

    Args:
        query, key, value: [1, heads, tokens, width], or [batch, heads, length, width] in a batch
            without `POSITIONS`.
        attention_mask: bool [batch, 1, 1, length], true for real tokens.
    Returns:
        [1, tokens, heads, width], or [batch, length, heads, width]; and no weights.
    """
    positions = others.get(POSITIONS)
    if positions is None:
        plain = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling
        )
        return plain.transpose(1, 2), None
    assert attention_mask is not None
    batch, length = len(attention_mask), attention_mask.shape[-1]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if dropout == 0.0 and has_variable_length_kernel(query.device, query.dtype):
        from torch.nn.attention.varlen import varlen_attn

        ends = attention_mask.sum((1, 2, 3)).cumsum(0, dtype=torch.int32)
        starts = F.pad(ends, (1, 0))
        attended = varlen_attn(queries, keys, values, starts, starts, length, length, scale=scaling)
        assert isinstance(attended, torch.Tensor)
        return attended[None], None

    def apart(tokens: torch.Tensor) -> torch.Tensor:
        return spread(tokens, positions, batch, length).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        apart(queries), apart(keys), apart(values), attention_mask, dropout, scale=scaling
    )
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, positions)[None], None
