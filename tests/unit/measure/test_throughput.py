"""Throughput and operations: what is counted, over which time, and how ranks add up."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from common.data.batch import DatasetSamples, TensorSamples, Work
from common.data.images import ImageSamples
from common.data.text import TextSamples
from common.measure.flops import TrainingFlops, training_flops, training_flops_of_values
from common.measure.stopwatch import FIRST_UPDATES, Interval, Stopwatch, throughput
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
    """Let updates of two micro-batches of 8 samples pass."""
    for _ in range(updates):
        for is_update in (False, True):
            clock.now += seconds / 2
            stopwatch.count(Work(8, 80, 800), 0.1 * seconds / 2, is_update)


def test_throughput_leaves_out_the_first_updates() -> None:
    """Slow first updates and the time outside of training don't count; all samples after do."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock)
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


def test_short_runs_have_a_throughput_too() -> None:
    """A run of fewer updates than are left out is counted as a whole."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES - 1, seconds=2)
    stopwatch.lap()
    assert stopwatch.whole_run.samples == 16 * (FIRST_UPDATES - 1)
    assert stopwatch.whole_run.seconds == pytest.approx(2 * (FIRST_UPDATES - 1))


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_each_interval_has_its_samples_and_seconds(every: int) -> None:
    """Each log line has a throughput of its own updates, also around the first ones."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock)
    stopwatch.start()
    for _ in range(4):
        train(stopwatch, clock, every, seconds=0.5)
        lap = stopwatch.lap()
        assert lap.seconds > 0
        assert lap.samples / lap.seconds == pytest.approx(32)
    assert stopwatch.total.seconds == pytest.approx(0.5 * 4 * every)


def test_throughput_is_of_all_ranks() -> None:
    """Samples of all ranks over the time of the slowest; updates are not added up."""
    fast = Interval(seconds=2.0, wait_seconds=0.2, updates=10, samples=100, tokens=1000)
    slow = Interval(seconds=4.0, wait_seconds=2.0, updates=10, samples=100, tokens=3000)
    rows = torch.tensor([[*vars(fast).values()], [*vars(slow).values()]], dtype=torch.float64)
    assert throughput(rows) == pytest.approx(
        {
            "perf/samples_per_second": 50,
            "perf/samples_per_second_per_device": 25,
            "perf/step_milliseconds": 400,
            "perf/data_wait_fraction": 0.5,
            "perf/tokens_per_second": 1000,
        }
    )
    rows[:, 5] = 0
    assert "perf/tokens_per_second" not in throughput(rows)


def test_work_done_is_of_all_ranks_and_of_one_device() -> None:
    """FLOP/s and energy come from real samples, tokens and their squares."""
    one = Interval(2.0, 0.0, joules=30.0, updates=10, samples=100, tokens=1e3, squared_tokens=1e4)
    rows = torch.tensor([[*vars(one).values()]] * 2, dtype=torch.float64)
    flops = TrainingFlops(per_sample=1e9, per_token=1e8, per_squared_token=1e7)
    values = throughput(rows, flops, peak=1.5)
    assert values["perf/tflops_per_device"] == pytest.approx((100e9 + 100e9 + 100e9) / 2 / 1e12)
    assert values["perf/mfu"] == pytest.approx(0.1)
    assert values["perf/joules_per_sample"] == pytest.approx(60 / 200)


def test_useful_time_leaves_out_compilation() -> None:
    """First updates count as long as later ones take; in a short run, as they took."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES, seconds=30)
    assert stopwatch.useful_seconds == 0
    train(stopwatch, clock, 10, seconds=0.5)
    stopwatch.lap()
    assert stopwatch.useful_seconds == pytest.approx(0.5 * (10 + FIRST_UPDATES))


def test_operations_of_an_mlp_are_those_counted_by_hand() -> None:
    """Two a weight forward, two for its gradient, two for its input's but the first layer's."""
    model = MLP(28 * 28, [512, 512], 10, dropout=0.0)
    images = np.zeros((4, 28, 28, 1), dtype=np.uint8)
    samples = ImageSamples(images, np.zeros(4, dtype=np.int64), [0.1], [0.3], torch.float32)
    weights = [28 * 28 * 512, 512 * 512, 512 * 10]
    expected = 6 * sum(weights) - 2 * weights[0]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    counted = training_flops(model, mlp_loss, samples)
    assert counted == TrainingFlops(expected)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_operations_of_bert_follow_a_samples_length() -> None:
    """Those of all matrices and of attention's two products, for lengths never counted."""
    width, layers, inner = 32, 3, 64
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
    samples = TextSamples(np.zeros(9, dtype=np.int32), np.array([0, 4, 9]), nothing, nothing)
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
    """Two linear layers over the points that a two-dimensional mask has, with buffers and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, points: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [points that the mask has, 2]."""
        self.calls += 1
        hidden = self.norm(self.first(points)[mask])
        return self.second(hidden + 0.1 * torch.randn_like(hidden))


def masked_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss, and the logits."""
    logits = model(batch["points"], batch["mask"])
    return logits.square().mean(), logits


def test_operations_of_a_model_that_looks_at_values() -> None:
    """Counted on real samples where shapes are not enough, without a trace."""
    model, count = MaskedSum(), 4
    model.norm.eval()
    mask = torch.zeros(count, 5, dtype=torch.bool)
    mask[:, :3] = True
    samples = TensorSamples(points=torch.randn(count, 5, 3), mask=mask)
    with pytest.raises(NotImplementedError):
        training_flops(model, masked_loss, samples)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    counted = training_flops_of_values(model, masked_loss, samples, torch.device("cpu"))
    # The first layer needs no gradient of its input.
    assert counted == TrainingFlops(4 * 5 * 3 * 8 + 6 * 3 * 8 * 2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not model.norm.training


@pytest.mark.parametrize("count", [training_flops, training_flops_of_values])
def test_operations_follow_the_lengths_of_a_data_set(count: Any) -> None:
    """Of samples of one's own with `lengths`: a cost for each token, for lengths never counted."""
    layer = nn.Linear(3, 2)
    lengths = [2, 9, 4, 7, 5, 3]
    samples = DatasetSamples([{"points": torch.ones(length, 3)} for length in lengths])
    samples.lengths = np.array(lengths)
    devices = [torch.device("cpu")] if count is training_flops_of_values else []

    def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, None]:
        return model(batch["points"]).sum(), None

    counted = count(layer, loss_of, samples, *devices)
    assert counted.total(1, 100, 100**2) == pytest.approx(100 * 4 * 3 * 2)
