"""BERT without padding: the results of the padded model, with few different shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.models import packing

KERNEL = "_flash_attention_forward"
FLASH_ATTENTION = getattr(torch.ops.aten, KERNEL)  # the real kernel, used for shapes only
LENGTHS = torch.tensor([24, 3, 17, 9])
MULTIPLES = [1, 8, 32, 64, 256]  # 256 is more than the 96 places of the batch


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_positions_are_real_tokens_then_padding(
    multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real tokens come in order, then padding up to a multiple, and no position twice."""
    monkeypatch.setattr(packing, "TOKEN_MULTIPLE", multiple)
    positions = packing.token_positions(LENGTHS, 24)
    real = [row * 24 + column for row, length in enumerate(LENGTHS) for column in range(length)]
    assert positions[: len(real)].tolist() == real
    assert len(positions) == min(96, -(-len(real) // multiple) * multiple)
    assert len(set(positions.tolist())) == len(positions)
    assert 0 <= positions.min() <= positions.max() < 96


def test_batches_have_few_shapes() -> None:
    """Batches with more than 100 numbers of tokens have at most 8 shapes."""
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


def loss_and_gradients(model: Any, **others: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Return the loss of a batch of `LENGTHS`, and each parameter's gradient."""
    random = torch.Generator().manual_seed(1)
    real = torch.arange(24) < LENGTHS[:, None]
    tokens = torch.randint(1, 50, (4, 24), generator=random) * real
    tokens = tokens.to(model.device)
    mask = real[:, None, None, :].to(model.device)
    logits = model(input_ids=tokens, attention_mask=mask, **others).logits
    loss = F.cross_entropy(logits, torch.tensor([0, 2, 1, 0], device=model.device))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kernel", ["plain", "variable-length"])
@pytest.mark.parametrize("multiple", MULTIPLES)
def test_packed_model_equals_the_padded_one(
    multiple: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients agree for any multiple and for both kinds of attention."""
    monkeypatch.setattr(packing, "TOKEN_MULTIPLE", multiple)
    if kernel == "variable-length":
        monkeypatch.setattr(packing, "has_variable_length_kernel", lambda hidden: True)
        monkeypatch.setattr(torch.ops.aten, KERNEL, attention_by_sequence)
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
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Stand in for the CUDA kernel, and check its arguments."""
    on_meta = [tensor.to("meta") for tensor in (query, key, value, cu_seq_q, cu_seq_k)]
    options = (max_q, max_k, dropout_p, is_causal, return_debug_mask)
    shape_only, *others = FLASH_ATTENTION(*on_meta, *options, scale=scale)
    assert shape_only.shape == query.shape
    assert not is_causal
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[0]) == 0
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().min()) >= 0
    assert int(cu_seq_q.diff().max()) <= max_q == max_k
    attended = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        attention = F.scaled_dot_product_attention(q, k, v, None, dropout_p, scale=scale)
        attended.append(attention.transpose(0, 1))
    return torch.cat(attended), *others


def test_kernel_gets_dropout_and_starts_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout applies in training only, and all layers share one tensor of starts."""
    calls = []

    def recording_kernel(*inputs: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        calls.append((inputs[7], inputs[3]))
        return attention_by_sequence(*inputs, **keywords)

    monkeypatch.setattr(packing, "has_variable_length_kernel", lambda hidden: True)
    monkeypatch.setattr(torch.ops.aten, KERNEL, recording_kernel)
    model = tiny_bert(packed=True)
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.25
    positions = packing.token_positions(LENGTHS, 24)
    dropped, _ = loss_and_gradients(model.train(), token_positions=positions)
    loss, _ = loss_and_gradients(model.eval(), token_positions=positions)
    expected, _ = loss_and_gradients(tiny_bert(packed=False))
    torch.testing.assert_close(loss, expected)
    assert abs(dropped - loss) > 1e-4
    assert [dropout for dropout, _ in calls] == [0.25, 0.25, 0.0, 0.0]
    assert calls[0][1] is calls[1][1]
    assert calls[0][1].tolist() == [0, 24, 27, 44, 53, 96]


def test_real_kernel_accepts_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel runs on the meta device, forward and backward."""
    monkeypatch.setattr(packing, "has_variable_length_kernel", lambda hidden: True)
    model = tiny_bert(packed=True).to("meta", torch.float16)
    model.bert.encoder.layer[0].attention.self.dropout.p = 0.1
    positions = packing.token_positions(LENGTHS, 24).to("meta")
    mask = torch.ones(4, 1, 1, 24, dtype=torch.bool, device="meta")
    tokens = torch.zeros(4, 24, dtype=torch.long, device="meta")
    model(input_ids=tokens, attention_mask=mask, token_positions=positions).logits.sum().backward()
    assert all(p.grad.shape == p.shape for p in model.bert.encoder.parameters())


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_needs_its_hardware_and_data_type(
    device_type: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The data type that autocast gives to products counts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: dtype != torch.float32)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: dtype)
    hidden: Any = SimpleNamespace(device=torch.device(device_type), dtype=torch.float32)
    expected = device_type == "cuda" and dtype != torch.float32 and capability >= (8, 0)
    assert packing.has_variable_length_kernel(hidden) is expected


def test_packed_model_accepts_padded_batches() -> None:
    """Without token positions, a batch is not packed."""
    loss, _ = loss_and_gradients(tiny_bert(packed=False))
    packed_loss, _ = loss_and_gradients(tiny_bert(packed=True))
    torch.testing.assert_close(packed_loss, loss)
