"""BERT without padding: every layer works on the real tokens alone.

The encoder's input, [batch, length, width], is packed to [1, tokens, width] before the first layer
and unpacked after the last. So much padding is packed behind the real tokens as makes them a
multiple of `TOKEN_MULTIPLE`, as oneDNN compiles and keeps a kernel for each shape. Only attention
looks across positions: it spreads queries, keys and values out again and masks as the padded model
does, or runs FlashAttention's kernel for sequences of any lengths on CUDA (not tried, for want of a
GPU). This is the Effective Transformer's way (ByteDance, 2020).

Losses and gradients are those of the padded model within rounding; dropout's masks differ.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ATTENTION = "packed"  # its name among Transformers' implementations of attention
# What a batch has besides, and the model's `forward` hands down to its layers; and what `pack` adds
# where the kernel runs: int32 [batch + 2], where each sequence starts among the packed tokens.
POSITIONS, STARTS = "token_positions", "sequence_starts"
# Of 1, 64, 128, 256 and 512, on two cores of an Intel CPU with AMX, in bf16: 1.6 times the samples
# a second of 1 and half the memory with the small BERT, 0.7 of it with six layers. On CUDA it is a
# whole number of matrix products' tiles, of 128 or 256 rows (not measured).
TOKEN_MULTIPLE = 256


def token_positions(lengths: torch.Tensor, padded_length: int) -> torch.Tensor:
    """Return where the real tokens are in a padded batch, row by row; then the first of padding.

    From int64 [batch], on the host, so that nothing waits for the device, to int64 [tokens rounded
    up to `TOKEN_MULTIPLE`, or all there are]: places in the flattened batch, each at most once.
    """
    is_padding = (torch.arange(padded_length) >= lengths[:, None]).flatten()
    tokens = len(is_padding) - int(is_padding.sum())
    rounded = -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    return is_padding.byte().argsort(stable=True)[:rounded]


def leave_out_padding(model: nn.Module) -> None:
    """Have a BERT from Transformers work on packed tokens, where a batch says which are real."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    bert: Any = model
    bert.set_attn_implementation(ATTENTION)
    bert.bert.encoder.register_forward_pre_hook(pack, with_kwargs=True)
    bert.bert.encoder.register_forward_hook(unpack, with_kwargs=True)


def pack(encoder: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Take the real tokens out of [batch, length, width]."""
    if POSITIONS not in named:
        return None
    hidden, positions = inputs[0], named[POSITIONS]
    if has_variable_length_kernel(hidden):
        ends = named["attention_mask"].sum((1, 2, 3)).cumsum(0, dtype=torch.int32)
        # The positions of padding are one more sequence, behind the real ones; it may be empty.
        named[STARTS] = F.pad(F.pad(ends, (1, 0)), (0, 1), value=len(positions))
    return (hidden.flatten(0, 1).index_select(0, positions)[None],), named


def unpack(encoder: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> Any:
    """Put the tokens back to [batch, length, width], with zeros where none was packed."""
    if POSITIONS in named:
        packed, mask = outputs.last_hidden_state[0], named["attention_mask"]
        outputs.last_hidden_state = spread(packed, named[POSITIONS], len(mask), mask.shape[-1])
    return outputs


def spread(packed: torch.Tensor, positions: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return [batch, length, ...] with the rows of `packed`, [tokens, ...], at `positions`."""
    rows = packed.new_zeros(batch * length, *packed.shape[1:])
    return rows.index_copy_(0, positions, packed).unflatten(0, (batch, length))


def has_variable_length_kernel(hidden: torch.Tensor) -> bool:
    """Whether FlashAttention runs where a layer's input lies, in the type that products have."""
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    half = dtype in (torch.float16, torch.bfloat16)
    return kind == "cuda" and half and torch.cuda.get_device_capability(hidden.device) >= (8, 0)


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

    From [1, heads, tokens, width], or [batch, heads, length, width] in a batch without `POSITIONS`,
    to [1, tokens, heads, width], or [batch, length, heads, width]. The mask is bool
    [batch, 1, 1, length], true for real tokens.
    """
    positions, starts = others.get(POSITIONS), others.get(STARTS)
    attend = functools.partial(F.scaled_dot_product_attention, scale=scaling)
    if positions is None:
        return attend(query, key, value, attention_mask, dropout).transpose(1, 2), None
    assert attention_mask is not None
    batch, length = len(attention_mask), attention_mask.shape[-1]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if starts is not None and queries.shape[-1] % 8 == 0:  # which the kernel asks for
        longest = max(length, TOKEN_MULTIPLE)
        # What `varlen_attn` calls, which drops nothing.
        attended, *_ = torch.ops.aten._flash_attention_forward(
            *(queries, keys, values, starts, starts, longest, longest),
            *(dropout, False, False),  # neither causal, nor with the mask of what was dropped
            scale=scaling,
        )
        return attended[None], None

    def apart(tokens: torch.Tensor) -> torch.Tensor:
        return spread(tokens, positions, batch, length).transpose(1, 2)

    attended = attend(apart(queries), apart(keys), apart(values), attention_mask, dropout)
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, positions)[None], None
