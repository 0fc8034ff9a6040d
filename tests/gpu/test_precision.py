"""Precision of matrix products, attention without padding, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.harness.isolation import default_device
from common.models import packing
from common.training.precision import set_kernels
from tests.gpu.conftest import HAS_GPU, as_flags
from tests.gpu.launching import Launcher
from tests.launch import REPOSITORY
from tests.unit.models.test_packing import LENGTHS, loss_and_gradients, tiny_bert


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Restore torch's settings after each test."""
    yield
    set_kernels("no", deterministic=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["no", "tf32", "fp16"])
def test_products_are_as_exact_as_their_precision(precision: str, compiled: bool) -> None:
    """TF32 keeps 10 of 23 bits, so its error is large; other precisions leave fp32 exact."""
    set_kernels(precision, deterministic=False)
    random = torch.Generator().manual_seed(0)
    device = default_device()
    left, right = (torch.randn(512, 512, generator=random) for _ in range(2))
    images = torch.randn(8, 32, 16, 16, generator=random)
    kernels = torch.randn(32, 32, 3, 3, generator=random)
    operations: list[tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]] = [
        (torch.matmul, left, right),
        (F.conv2d, images, kernels),
    ]
    for operation, first, second in operations:
        exact = operation(first.double(), second.double())
        run = torch.compile(operation) if compiled else operation
        product = run(first.to(device), second.to(device)).cpu()
        error = (product - exact).abs().max() / exact.std()
        assert (error > 1e-4) == (precision == "tf32" and HAS_GPU), operation


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_bert_is_the_padded_one_and_drops(compiled: bool) -> None:
    """FlashAttention's kernel for packed sequences gives the same loss and gradients as padding."""
    device = default_device()
    positions = packing.token_positions(LENGTHS, 24).to(device)

    def train(packed: bool, dropped: float = 0.0) -> tuple[torch.Tensor, dict[str, Any]]:
        model = tiny_bert(packed).train()
        for layer in model.bert.encoder.layer:
            layer.attention.self.dropout.p = dropped
            if compiled:
                layer.compile(dynamic=True)
        others = {packing.POSITIONS: positions} if packed else {}
        torch.manual_seed(1)
        with torch.autocast(device.type, torch.bfloat16):
            if HAS_GPU:
                assert packing.has_variable_length_kernel(positions.float())
            return loss_and_gradients(model.to(device), **others)

    loss, gradients = train(packed=False)
    packed_loss, packed = train(packed=True)
    torch.testing.assert_close(packed_loss, loss, rtol=0.02, atol=0.02)
    for name, gradient in gradients.items():
        size = gradient.norm() + 1e-3
        assert (packed[name] - gradient).norm() < 0.1 * size, name
    loss_with_dropout, first = train(packed=True, dropped=0.5)
    loss_again, second = train(packed=True, dropped=0.5)
    assert loss_with_dropout == loss_again
    assert (loss_with_dropout - packed_loss).abs() > 1e-3
    assert all(gradient.isfinite().all() for gradient in first.values())
    name = "bert.encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(first[name], second[name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("flag", ["--no-compile", "--compile"])
def test_batch_size_is_found(
    flag: str, launcher: Launcher, small: Callable[[str], dict[str, object]], tmp_path: Path
) -> None:
    """The chosen micro-batch divides the update, and the run prints the fastest flags."""
    script = REPOSITORY / "recipes" / "mnist_mlp.py"
    directory = tmp_path / "run"
    settings = {**small("mnist_mlp"), "gradient_accumulation_steps": 4, "max_steps": 6}
    flags = [*as_flags(settings), "--auto-batch-size", flag, "--tracker", "none", "--log-every", 1]
    run = launcher.run(script, *flags, "--output-dir", directory, directory=directory)
    config = run.config["config"]
    assert config["batch_size"] * config["gradient_accumulation_steps"] == 256
    assert "fastest --batch-size" in run.output
