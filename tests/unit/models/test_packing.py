"""BERT without padding: the padded model's figures, from few shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.models import packing

LENGTHS = torch.tensor([24, 3, 17, 9])
MULTIPLES = [1, 8, 32, 64, 256]  # 256 is more than the 96 places that there are


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_positions_are_real_tokens_then_padding(
    multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a multiple, or all there are: real ones in their order, and none twice."""
    monkeypatch.setattr(packing, "TOKEN_MULTIPLE", multiple)
    positions = packing.token_positions(LENGTHS, 24)
    real = [row * 24 + column for row, length in enumerate(LENGTHS) for column in range(length)]
    assert positions[: len(real)].tolist() == real
    assert len(positions) == min(96, -(-len(real) // multiple) * multiple)
    assert len(set(positions.tolist())) == len(positions)
    assert 0 <= positions.min() <= positions.max() < 96


def test_shapes_are_few() -> None:
    """Batches whose tokens all differ in number have a handful of shapes."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 129, (200, 32), generator=random)
    shapes = {len(packing.token_positions(row, 128)) for row in lengths}
    assert len({int(row.sum()) for row in lengths}) > 100
    assert len(shapes) <= 8
    assert all(shape % packing.TOKEN_MULTIPLE == 0 for shape in shapes)


def tiny_bert(packed: bool) -> Any:
    """Return a BERT with weights that are always the same, and without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 3,
        "initializer_range": 0.3,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "sdpa",
    }
    model = BertForSequenceClassification(BertConfig(**settings))
    if packed:
        packing.leave_out_padding(model)
    return model


def loss_and_gradients(model: nn.Module, **others: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Return the loss of a batch of `LENGTHS`, and each parameter's gradient."""
    random = torch.Generator().manual_seed(1)
    real = torch.arange(24) < LENGTHS[:, None]
    tokens = torch.randint(1, 50, (4, 24), generator=random) * real
    logits = model(input_ids=tokens, attention_mask=real[:, None, None, :], **others).logits
    loss = F.cross_entropy(logits, torch.tensor([0, 2, 1, 0]))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kernel", ["plain", "variable-length"])
@pytest.mark.parametrize("multiple", MULTIPLES)
def test_packed_model_is_the_padded_one(
    multiple: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients are the same, whatever padding is packed, and by either attention."""
    monkeypatch.setattr(packing, "TOKEN_MULTIPLE", multiple)
    if kernel == "variable-length":
        monkeypatch.setattr(packing, "has_variable_length_kernel", lambda *_: True)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_sequence)
    positions = packing.token_positions(LENGTHS, 24)
    loss, gradients = loss_and_gradients(tiny_bert(packed=False))
    packed_loss, packed_gradients = loss_and_gradients(
        tiny_bert(packed=True), token_positions=positions
    )
    torch.testing.assert_close(packed_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def attention_by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
) -> torch.Tensor:
    """Stand in for CUDA's `varlen_attn`, and hold the call to what it asks for."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[0]) == 0
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().min()) >= 0
    assert int(cu_seq_q.diff().max()) <= max_q == max_k
    attended = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        attended.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1))
    return torch.cat(attended)


def test_model_takes_padded_batches_too() -> None:
    """A batch that does not say where its tokens are goes through unpacked."""
    loss, _ = loss_and_gradients(tiny_bert(packed=False))
    packed_loss, _ = loss_and_gradients(tiny_bert(packed=True))
    torch.testing.assert_close(packed_loss, loss)
