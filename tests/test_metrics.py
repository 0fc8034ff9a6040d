"""Figures to trust: what is counted, over which time, and how ranks add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from common.failures import GradientGuard, TrainingError
from common.flops import TrainingFlops, training_flops
from common.images import ImageSamples
from common.metrics import EvaluationSums, TrainingSums
from common.stopwatch import FIRST_UPDATES, Interval, Stopwatch, Work, throughput
from common.text import TextSamples
from recipes.bert import compute_loss as bert_loss
from recipes.mnist_mlp import MLP
from recipes.mnist_mlp import compute_loss as mlp_loss


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def alone(**others: Any) -> Any:
    """Return what stands for an Accelerator of one process on a CPU."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        reduce=lambda tensor, _: tensor,
        scaler=None,
        unscale_gradients=lambda: None,
        **others,
    )


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
    assert stopwatch.train_seconds == pytest.approx(10 + 30 * FIRST_UPDATES)


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
    assert stopwatch.train_seconds == pytest.approx(0.5 * 4 * every)


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
    samples = ImageSamples(images, np.zeros(4, dtype=np.int64), [0.1], [0.3], 0, torch.float32)
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


@pytest.mark.parametrize("micro_batches", [1, 31, 32, 33, 70])
def test_training_sums_are_those_of_all_micro_batches(micro_batches: int) -> None:
    """Loss and right answers are summed over an interval, however it is folded."""
    generator = torch.Generator().manual_seed(0)
    sums = TrainingSums(torch.device("cpu"), accumulation=2)
    expected_loss, expected_correct, losses = 0.0, 0, []
    for _ in range(micro_batches):
        logits = torch.randn(8, 3, generator=generator)
        labels = torch.randint(0, 3, (8,), generator=generator)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        sums.add(loss, logits, labels)
        expected_loss += float(loss)
        expected_correct += int((logits.argmax(-1) == labels).sum())
        losses.append(float(loss))
    taken = sums.take().tolist()
    assert taken == pytest.approx(
        [expected_loss, expected_correct, micro_batches, 8 * micro_batches]
    )
    assert sums.last_loss() == pytest.approx(sum(losses[-2:]) / len(losses[-2:]))
    assert sums.take().tolist() == [0, 0, 0, 0]


def test_training_sums_keep_no_graph() -> None:
    """What is held between log lines is detached."""
    sums = TrainingSums(torch.device("cpu"), accumulation=1)
    weight = torch.ones(2, 2, requires_grad=True)
    logits = torch.ones(4, 2) @ weight
    sums.add(logits.sum(), logits, torch.zeros(4, dtype=torch.int64))
    assert not any(tensor.requires_grad for held in sums.held for tensor in held)
    assert not sums.last_update[-1].requires_grad


def evaluated(predicted: list[int], labels: list[int], classes: int, size: int) -> dict[str, float]:
    """Evaluate predictions in batches of `size`, with a loss of 1, 2, … for each batch."""
    sums = EvaluationSums(alone(), classes)
    pairs = zip(torch.tensor(predicted).split(size), torch.tensor(labels).split(size), strict=True)
    for number, (guesses, truth) in enumerate(pairs, start=1):
        logits = torch.nn.functional.one_hot(guesses, classes).float()
        sums.add(torch.tensor(float(number)), logits, truth)
    return sums.result()


def test_evaluation_weighs_each_sample_alike() -> None:
    """A last, smaller batch counts by its samples, not as a batch."""
    result = evaluated([0, 1, 2, 0, 1], [0, 1, 2, 1, 1], classes=3, size=4)
    assert result == pytest.approx(
        {"eval/loss": (4 * 1 + 1 * 2) / 5, "eval/accuracy": 0.8, "eval/count": 5}
    )


def test_f1_of_two_classes_is_scikit_learn_s() -> None:
    """Two classes have an F1 of the second one, as GLUE defines it."""
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (97,), generator=generator).tolist()
    predicted = torch.randint(0, 2, (97,), generator=generator).tolist()
    result = evaluated(predicted, labels, classes=2, size=10)
    assert result["eval/f1"] == pytest.approx(f1_score(labels, predicted))
    assert evaluated([0, 0], [1, 1], 2, 2)["eval/f1"] == 0
    assert "eval/f1" not in evaluated([0], [0], 3, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update_with_a_broken_gradient_is_not_applied(value: float) -> None:
    """A gradient that is not finite leaves the weights as they were, and stops the run."""
    parameter = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([parameter], lr=0.1, fused=True))
    guard = GradientGuard(alone(), max_grad_norm=1.0)
    parameter.grad = torch.ones(4)
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    kept = parameter.detach().clone()
    assert not torch.equal(kept, torch.ones(4))
    assert guard.check(1, 0.5) == 0
    parameter.grad = torch.tensor([1.0, value, 1.0, 1.0])
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    assert torch.equal(parameter.detach(), kept)
    with pytest.raises(TrainingError) as error:
        guard.check(2, 0.5)
    assert "update 2" in error.value.message
    assert "--learning-rate" in error.value.message


@pytest.mark.parametrize("norm", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_to_the_norm(norm: float) -> None:
    """An update is that of the clipped gradient; 0 turns clipping off; the norm is before it."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD([parameter], lr=1.0, fused=True))
    guard = GradientGuard(alone(), max_grad_norm=norm)
    parameter.grad = torch.full((4,), 2.0)
    guard.clip(model, optimizer)  # type: ignore[arg-type]
    optimizer.optimizer.step()
    expected = 4.0 if norm == 0 else min(4.0, norm)
    assert float(parameter.detach().norm()) == pytest.approx(expected, rel=1e-4)
    assert float(guard.grad_norm) == pytest.approx(4.0)
