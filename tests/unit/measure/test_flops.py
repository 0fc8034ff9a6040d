"""Operations of a sample: counted on shapes or on real samples, for models of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from common.data.dataset import DatasetSamples
from common.data.image_batches.image_samples import CachedImages
from common.data.stored_samples import TensorSamples
from common.data.text import CachedText
from common.measure.flops import TrainingFlops, training_flops, training_flops_of_real_samples
from common.run_directory.model_records import ImageFormat
from recipes.bert import compute_loss as bert_loss
from recipes.mnist_mlp import MLP
from recipes.mnist_mlp import compute_loss as mlp_loss

SIZE = 6
CLASSES = 6


class Model(nn.Module):
    """Two layers: [batch, SIZE] to [batch, CLASSES]."""

    def __init__(self, sharing: str) -> None:
        super().__init__()
        self.body = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, CLASSES)
        self.register_buffer("scale", torch.ones(SIZE))
        if sharing == "module":
            self.another_name = self.head
        elif sharing == "weight":
            self.head.weight = self.body.weight
        elif sharing == "name":
            self.weight_of_head = self.head.weight
        elif sharing == "buffer":
            self.head.register_buffer("scale", self.scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(rows * self.scale))


def compute_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["rows"])
    return logits.square().mean(), logits


@pytest.mark.parametrize("sharing", ["nothing", "module", "weight", "name", "buffer"])
@pytest.mark.parametrize("count", [training_flops, training_flops_of_real_samples])
def test_counting_operations_leaves_the_model_unchanged(sharing: str, count: Any) -> None:
    """Tensors stay the same, and sharing does not change the count."""
    model = Model(sharing)
    samples = TensorSamples(rows=torch.randn(8, SIZE))
    before = model.state_dict(keep_vars=True)
    device = [torch.device("cpu")] if count is training_flops_of_real_samples else []
    per_sample = count(model, compute_loss, samples, *device).per_sample
    # Both layers count forward and the weights' gradients, the second also its input's gradient.
    assert per_sample == 2 * SIZE * (2 * SIZE + 3 * CLASSES)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.randn(2, SIZE)).device.type == "cpu"


class CachingModel(Model):
    """Keeps tables of its first forward pass, as models with positions do."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.table: torch.Tensor | None = None
        self.register_buffer("buffer", torch.zeros(0))
        self.by_size: dict[int, torch.Tensor] = {}
        self.tables: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.ones(SIZE, device=rows.device)
            self.tables.append(self.table)
            self.buffer = self.table
            self.register_buffer("lazy", self.table.clone(), persistent=False)
        table = self.by_size.setdefault(len(rows), self.table) * self.tables[0]
        return super().forward(rows * table * self.buffer * self.lazy)


@pytest.mark.parametrize("count", [training_flops, training_flops_of_real_samples])
def test_counting_operations_leaves_no_tensor_in_the_model(count: Any) -> None:
    """On the meta device, a table that a forward pass keeps has no values."""
    model = CachingModel()
    names_before = [*vars(model)]
    samples = TensorSamples(rows=torch.randn(8, SIZE))
    device = [torch.device("cpu")] if count is training_flops_of_real_samples else []
    count(model, compute_loss, samples, *device)
    assert [*vars(model)] == names_before
    assert (model.table, model.by_size, model.tables, model.calls) == (None, {}, [], 0)
    assert len(model.buffer) == 0
    assert "lazy" not in dict(model.named_buffers())
    loss, _ = compute_loss(model, {"rows": torch.randn(2, SIZE)})
    loss.backward()
    assert model.body.weight.grad is not None


def test_operations_of_an_mlp_match_a_count_by_hand() -> None:
    """A weight costs 2 operations forward and 4 backward, but 2 backward in the first layer."""
    model = MLP(28 * 28, [512, 512], 10, dropout=0.0)
    images = np.zeros((4, 28, 28, 1), dtype=np.uint8)
    image_format = ImageFormat(channels=1, image_size=28, mean=[0.1], std=[0.3])
    samples = CachedImages(images, np.zeros(4, dtype=np.int64), image_format, torch.float32)
    weights = [28 * 28 * 512, 512 * 512, 512 * 10]
    expected = 6 * sum(weights) - 2 * weights[0]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    counted = training_flops(model, mlp_loss, samples)
    assert counted == TrainingFlops(expected)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_operations_of_bert_depend_on_the_length() -> None:
    """Matrices and attention are extrapolated to lengths that were never counted."""
    width = 32
    layers = 3
    inner = 64
    config = BertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=inner,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    nothing = np.zeros(2, dtype=np.int64)
    samples = CachedText(
        np.zeros(9, dtype=np.int32), np.array([0, 4, 9]), nothing, nothing, token_positions=None
    )
    counted = training_flops(model, bert_loss, samples)
    length = 100
    matrices = layers * (4 * width**2 + 2 * width * inner) * length
    products = layers * 2 * length**2 * width
    head = width**2 + 2 * width
    expected = 6 * (matrices + products + head)
    assert counted.total(1, length, length**2) == pytest.approx(expected, rel=1e-9)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


class MaskedSum(nn.Module):
    """Two linear layers over the points that a 2-D mask selects, with buffers and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, points: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits of shape [selected points, 2]."""
        self.calls += 1
        hidden = self.norm(self.first(points)[mask])
        return self.second(hidden + 0.1 * torch.randn_like(hidden))


def masked_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss, and the logits."""
    logits = model(batch["points"], batch["mask"])
    return logits.square().mean(), logits


def test_operations_of_a_data_dependent_model_are_counted() -> None:
    """Shapes are not enough, so real samples are counted, and the model stays unchanged."""
    model = MaskedSum()
    count = 4
    model.norm.eval()
    mask = torch.zeros(count, 5, dtype=torch.bool)
    mask[:, :3] = True
    samples = TensorSamples(points=torch.randn(count, 5, 3), mask=mask)
    with pytest.raises(NotImplementedError):
        training_flops(model, masked_loss, samples)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    counted = training_flops_of_real_samples(model, masked_loss, samples, torch.device("cpu"))
    # The first layer needs no gradient of its input.
    assert counted == TrainingFlops(4 * 5 * 3 * 8 + 6 * 3 * 8 * 2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not model.norm.training


@pytest.mark.parametrize("count", [training_flops, training_flops_of_real_samples])
def test_operations_depend_on_the_lengths_of_samples(count: Any) -> None:
    """A cost per token extrapolates to lengths that were never counted."""
    layer = nn.Linear(3, 2)
    lengths = [2, 9, 4, 7, 5, 3]
    samples = DatasetSamples([{"points": torch.ones(length, 3)} for length in lengths])
    samples.lengths = np.array(lengths)
    devices = [torch.device("cpu")] if count is training_flops_of_real_samples else []

    def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, None]:
        return model(batch["points"]).sum(), None

    counted = count(layer, loss_of, samples, *devices)
    assert counted.total(1, 100, 100**2) == pytest.approx(100 * 4 * 3 * 2)
