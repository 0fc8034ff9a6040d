"""Throughput and operations: which samples and seconds count, and how ranks add up."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from common.data.images import CachedImages
from common.data.samples import DatasetSamples, TensorSamples, Work
from common.data.text import CachedText
from common.measure.flops import TrainingFlops, training_flops, training_flops_of_real_samples
from common.measure.stopwatch import FIRST_UPDATES, Interval, Stopwatch, throughput
from common.run_directory.records import ImageFormat
from recipes.bert import compute_loss as bert_loss
from recipes.mnist_mlp import MLP
from recipes.mnist_mlp import compute_loss as mlp_loss


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(stopwatch: Stopwatch, clock: Clock, updates: int, seconds: float) -> None:
    """Count updates of two micro-batches of 8 samples, each update of so many seconds."""
    for _ in range(updates):
        for is_update in (False, True):
            clock.now += seconds / 2
            stopwatch.count(Work(8, 80, 800), 0.1 * seconds / 2, is_update)


def test_throughput_leaves_out_the_first_updates() -> None:
    """Slow first updates and time outside training do not count, and all later samples do."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES, seconds=30)
    train(stopwatch, clock, 10, seconds=0.5)
    stopwatch.stop()
    clock.now += 1000  # an evaluation
    stopwatch.start()
    train(stopwatch, clock, 10, seconds=0.5)
    lap = stopwatch.lap()
    assert lap.updates == 20
    whole = stopwatch.whole_run
    assert (whole.updates, whole.samples, whole.tokens) == (20, 320, 3200)
    assert whole.seconds == pytest.approx(10)
    assert whole.wait_seconds == pytest.approx(1)
    assert stopwatch.total.seconds == pytest.approx(10 + 30 * FIRST_UPDATES)


def test_short_run_has_a_throughput() -> None:
    """A run with no more than the first updates counts all of them."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES - 1, seconds=2)
    stopwatch.lap()
    assert stopwatch.whole_run.samples == 16 * (FIRST_UPDATES - 1)
    assert stopwatch.whole_run.seconds == pytest.approx(2 * (FIRST_UPDATES - 1))


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_each_interval_has_its_samples_and_seconds(every: int) -> None:
    """Each log line has the throughput of its own updates, even the first ones."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    for _ in range(4):
        train(stopwatch, clock, every, seconds=0.5)
        lap = stopwatch.lap()
        assert lap.seconds > 0
        assert lap.samples / lap.seconds == pytest.approx(32)
    assert stopwatch.total.seconds == pytest.approx(0.5 * 4 * every)


def test_throughput_covers_all_ranks() -> None:
    """Samples add up over ranks, the slowest rank's time counts, and updates do not add up."""
    fast = Interval(seconds=2.0, wait_seconds=0.2, updates=10, samples=100, tokens=1000)
    slow = Interval(seconds=4.0, wait_seconds=2.0, updates=10, samples=100, tokens=3000)
    rows = torch.tensor([[*vars(fast).values()], [*vars(slow).values()]], dtype=torch.float64)
    assert throughput(rows, flops=None, peak=0.0) == pytest.approx(
        {
            "perf/samples_per_second": 50,
            "perf/samples_per_second_per_device": 25,
            "perf/step_milliseconds": 400,
            "perf/data_wait_fraction": 0.5,
            "perf/tokens_per_second": 1000,
        }
    )
    rows[:, 5] = 0
    assert "perf/tokens_per_second" not in throughput(rows, flops=None, peak=0.0)


def test_flops_and_energy_count_real_samples_and_tokens() -> None:
    """FLOP/s are per device, and energy is per sample of all ranks."""
    interval = Interval(
        2.0, 0.0, joules=30.0, updates=10, samples=100, tokens=1e3, squared_tokens=1e4
    )
    rows = torch.tensor([[*vars(interval).values()]] * 2, dtype=torch.float64)
    flops = TrainingFlops(per_sample=1e9, per_token=1e8, per_squared_token=1e7)
    values = throughput(rows, flops, peak=1.5)
    assert values["perf/tflops_per_device"] == pytest.approx((100e9 + 100e9 + 100e9) / 2 / 1e12)
    assert values["perf/mfu"] == pytest.approx(0.1)
    assert values["perf/joules_per_sample"] == pytest.approx(60 / 200)


def test_useful_time_leaves_out_compilation() -> None:
    """The first updates count as long as later ones take."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES, seconds=30)
    assert stopwatch.useful_seconds == 0
    train(stopwatch, clock, 10, seconds=0.5)
    stopwatch.lap()
    assert stopwatch.useful_seconds == pytest.approx(0.5 * (10 + FIRST_UPDATES))


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
