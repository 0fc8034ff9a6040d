"""Lets a BERT skip padding: its layers only compute the real tokens of a batch.

Before the first layer, the encoder's input [batch, length, width] is packed to [1, tokens, width].
After the last layer it is unpacked. Some padding is packed behind the real tokens, so that the
number of packed tokens is a multiple of `TOKEN_MULTIPLE`. oneDNN compiles and keeps a kernel for
each shape, and the multiple limits the number of shapes.

Only attention looks across positions. It unpacks queries, keys and values, and masks padding as
the padded model does. On CUDA it runs FlashAttention's kernel for sequences of different lengths
instead. The method is that of the Effective Transformer (ByteDance, 2020).

Losses and gradients are those of the padded model within rounding; dropout's masks differ.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification
    from transformers.modeling_outputs import BaseModelOutput

ATTENTION = "packed"  # the name of `packed_attention` in Transformers
# An entry of the batch, which the model's `forward` passes on to its layers; see `token_positions`.
POSITIONS = "token_positions"
# An entry that `pack_input` adds for FlashAttention's kernel: int32 [batch + 2], the position among
# the packed tokens at which each sequence starts, and the end.
STARTS = "sequence_starts"
# The arguments that Transformers passes to the encoder by name: tensors, flags and None. It is the
# type that torch gives the named arguments of a hook.
EncoderArguments = dict[str, Any]
# This was the best of 1, 64, 128, 256 and 512 on two cores of an Intel CPU with AMX, in bf16.
# Compared with 1, the small BERT trains on 1.6 times as many samples per second, and takes half the
# memory (0.7 of it with six layers). On CUDA, 256 rows are a whole number of a matrix product's
# tiles (not measured).
TOKEN_MULTIPLE = 256


def token_positions(lengths: torch.Tensor, padded_length: int) -> torch.Tensor:
    """Return the positions in a flattened batch that `pack_input` keeps.

    The positions of the real tokens come first, and then those of some padding.

    Args:
        lengths: int64 [batch], the tokens of each sample, on the host, so that nothing waits for
            the device.
        padded_length: the tokens of each row of the batch, including padding.

    Returns:
        int64 [positions], each position at most once. Their number is that of the real tokens,
        rounded up to a multiple of `TOKEN_MULTIPLE`, but at most batch × padded_length.
    """
    is_padding = (torch.arange(padded_length) >= lengths[:, None]).flatten()
    real_tokens = len(is_padding) - int(is_padding.sum())
    rounded = math.ceil(real_tokens / TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    # A stable sort puts the real tokens (0) first, in their order, and the padding (1) behind.
    return is_padding.byte().argsort(stable=True)[:rounded]


def leave_out_padding(model: "BertForSequenceClassification") -> None:
    """Make a BERT from Transformers compute packed tokens, in place.

    Batches that have `token_positions` are packed. The model computes other batches as before.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    model.bert.encoder.register_forward_pre_hook(pack_input, with_kwargs=True)
    model.bert.encoder.register_forward_hook(unpack_output, with_kwargs=True)


def pack_input(
    encoder: nn.Module, inputs: tuple[torch.Tensor, ...], arguments: EncoderArguments
) -> tuple[tuple[torch.Tensor], EncoderArguments] | None:
    """Pack the encoder's input [batch, length, width] to [1, tokens, width], as a forward hook.

    For a batch without `POSITIONS`, it returns None, and torch leaves the input as it is.

    Args:
        inputs: the positional arguments of the encoder, of which the first is the input.
        arguments: its named arguments; on CUDA, `STARTS` is added to them.
    """
    if POSITIONS not in arguments:
        return None
    hidden = inputs[0]
    positions = arguments[POSITIONS]
    if has_variable_length_kernel(hidden):
        ends = arguments["attention_mask"].sum((1, 2, 3)).cumsum(0, dtype=torch.int32)
        starts = F.pad(ends, (1, 0))  # a 0 before the ends
        # The packed padding counts as one more sequence behind the real ones; it may be empty. So
        # the last entry is the number of all packed tokens.
        arguments[STARTS] = F.pad(starts, (0, 1), value=len(positions))
    packed = hidden.flatten(0, 1).index_select(0, positions)[None]
    return (packed,), arguments


def unpack_output(
    encoder: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    arguments: EncoderArguments,
    outputs: "BaseModelOutput",
) -> "BaseModelOutput":
    """Unpack the encoder's output to [batch, length, width], as a forward hook.

    Positions that were not packed become zeros. A batch without `POSITIONS` is left as it is.
    """
    if POSITIONS in arguments:
        packed = outputs.last_hidden_state[0]
        mask = arguments["attention_mask"]
        outputs.last_hidden_state = spread(packed, arguments[POSITIONS], len(mask), mask.shape[-1])
    return outputs


def spread(packed: torch.Tensor, positions: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return [batch, length, ...] with the rows of `packed`, [tokens, ...], at `positions`."""
    rows = packed.new_zeros(batch * length, *packed.shape[1:])
    return rows.index_copy_(0, positions, packed).unflatten(0, (batch, length))


def has_variable_length_kernel(hidden: torch.Tensor) -> bool:
    """Whether FlashAttention supports the device of a layer's input and the dtype of attention.

    Under autocast, this is the dtype of autocast and not that of the input.
    """
    device_type = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    if device_type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(hidden.device) >= (8, 0)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    token_positions: torch.Tensor | None = None,
    sequence_starts: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each sample; Transformers calls this in each layer.

    Args:
        query, key, value: [1, heads, tokens, width]; in a batch without `POSITIONS`
            [batch, heads, length, width].
        attention_mask: bool [batch, 1, 1, length], true for real tokens.
        token_positions: the entry `POSITIONS` of the batch, if it has one.
        sequence_starts: the entry `STARTS`, if `pack_input` added it.
        others: further arguments from Transformers, which this function does not need.

    Returns:
        [1, tokens, heads, width] or [batch, length, heads, width]; and None for the attention's
        weights, which are not computed.
    """
    if token_positions is None:
        attended = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling
        )
        return attended.transpose(1, 2), None
    assert attention_mask is not None
    queries = query[0].transpose(0, 1)  # [tokens, heads, width], as keys and values
    keys = key[0].transpose(0, 1)
    values = value[0].transpose(0, 1)
    # FlashAttention needs a head width that is a multiple of 8.
    if sequence_starts is not None and queries.shape[-1] % 8 == 0:
        # The packed padding is a sequence too, of fewer than `TOKEN_MULTIPLE` tokens. So no
        # sequence is longer than this.
        longest = max(attention_mask.shape[-1], TOKEN_MULTIPLE)
        attended = flash_attention(
            queries, keys, values, sequence_starts, longest, dropout, scaling
        )
    else:
        attended = unpacked_attention(
            queries, keys, values, attention_mask, token_positions, dropout, scaling
        )
    return attended[None], None


def unpacked_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor,
    token_positions: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Compute attention within each sample of a padded batch, to which the tokens are unpacked.

    Args:
        queries, keys, values: [tokens, heads, width].
        attention_mask: bool [batch, 1, 1, length], true for real tokens.
        token_positions: int64 [tokens], the positions of the tokens in the flattened batch.

    Returns:
        [tokens, heads, width].
    """
    batch = len(attention_mask)
    length = attention_mask.shape[-1]

    def unpacked(tokens: torch.Tensor) -> torch.Tensor:
        return spread(tokens, token_positions, batch, length).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        unpacked(queries), unpacked(keys), unpacked(values), attention_mask, dropout, scale=scaling
    )
    rows = attended.transpose(1, 2).flatten(0, 1)  # [batch × length, heads, width]
    return rows.index_select(0, token_positions)


def flash_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Compute attention within packed sequences with FlashAttention's kernel.

    Args:
        queries, keys, values: [tokens, heads, width].
        starts: int32 [sequences + 1], the position at which each sequence starts, and the end.
        longest: at least the tokens of the longest sequence.

    Returns:
        [tokens, heads, width].
    """
    is_causal = False
    returns_debug_mask = False  # the mask of dropout
    # `torch.nn.attention.varlen.varlen_attn` calls this, too, but without dropout. Starts and the
    # longest sequence are passed twice: for the queries, and for the keys and values.
    attended, *_ = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        starts,
        starts,
        longest,
        longest,
        dropout,
        is_causal,
        returns_debug_mask,
        scale=scaling,
    )
    return attended
