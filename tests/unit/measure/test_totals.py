"""Totals on devices without float64: equal to float64 totals, or nearly so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.measure import totals
from common.measure.classification import ClassificationSums
from common.measure.sums import Sums
from common.measure.training_sums import TrainingSums
from common.ranks.agreement import gather_numbers
from common.system.devices import trials
from common.training.gradients.loss_scale import SharedScaler
from tests.ranks import alone

CPU = torch.device("cpu")
ACCURACY = 1e-13  # of a total, relative to the sum of absolute values
SINGLE = float(np.finfo(np.float32).eps)

floats = st.floats(-1e6, 1e6, width=32)


@pytest.fixture(autouse=True)
def _without_float64() -> Iterator[None]:
    """Let the CPU stand in for a device without float64."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(trials.ANSWERS, ("has_float64", CPU), False)
        yield


def with_float64() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setitem(trials.ANSWERS, ("has_float64", CPU), True)
    return patch


def value(total: Any) -> float:
    assert isinstance(total, totals.PairTotal)
    assert total.high.dtype == total.low.dtype == torch.float32
    return float(totals.on_host({"total": total})["total"])


@given(st.lists(floats, max_size=200))
def test_sum_of_elements_is_exact_beyond_fp32(values: list[float]) -> None:
    """Large values may cancel out and leave small ones."""
    expected = math.fsum(values)
    allowed = ACCURACY * math.fsum(map(abs, values))
    total = totals.elements_total(torch.tensor(values, dtype=torch.float32))
    assert abs(value(total) - expected) <= allowed


@given(st.lists(st.lists(floats, min_size=1, max_size=8), min_size=1, max_size=60))
def test_totals_of_many_batches_are_exact_beyond_fp32(batches: list[list[float]]) -> None:
    """An fp32 total would lose values below its last digit."""
    total: Any = None
    for batch in batches:
        total = totals.total_with(totals.elements_total(torch.tensor(batch)), total)
    elements = [value for batch in batches for value in batch]
    allowed = ACCURACY * math.fsum(map(abs, elements))
    assert abs(value(total) - math.fsum(elements)) <= allowed


def test_ones_add_to_a_total_of_2_to_the_24() -> None:
    """A total in fp32 would no longer grow there."""
    total: Any = totals.elements_total(torch.tensor([2.0**24]))
    for _ in range(100):
        total = total + totals.elements_total(torch.tensor([1.0]))
    assert value(total) == 2**24 + 100


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=50))
def test_counts_are_exact(counts: list[int]) -> None:
    """Integers add up exactly up to 2**48."""
    total: Any = None
    for count in counts:
        total = totals.total_with(totals.elements_total(torch.tensor([count, 1])), total)
    assert value(total) == sum(counts) + len(counts)


@given(st.lists(floats, min_size=1, max_size=60))
def test_saved_parts_restore_the_total_exactly(values: list[float]) -> None:
    """A resumed run logs the same digits as an uninterrupted one."""
    total = totals.elements_total(torch.tensor(values))
    for number in values:
        total = totals.total_with(totals.elements_total(torch.tensor([number * 1e-7])), total)
    (parts,) = totals.parts_on_host([total])
    restored = totals.from_parts(parts, CPU)
    assert totals.parts_on_host([restored]) == [parts]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_stay_as_they_are(number: float) -> None:
    """An infinite loss is shown as infinite, not as NaN."""
    total: Any = totals.elements_total(torch.tensor([1.0, number, 2.0]))
    total = total + totals.elements_total(torch.tensor([1.0]))
    assert str(value(total)) == str(number)


def recorded(batches: list[Any]) -> dict[str, float]:
    """Return the means of training sums over batches of (loss, is_right, length)."""
    sums = TrainingSums(CPU, accumulation=1)
    for loss, is_right, length in batches:
        sums.add(loss, {"accuracy": is_right, "length": length, "numbers": 0.25})
    totals_by_name = sums.take()
    sums.agreed_names = [*totals_by_name]
    return sums.means(torch.tensor([sums.row(totals_by_name)], dtype=torch.float64))


def test_training_means_equal_those_in_float64() -> None:
    """The same batches give the same log line."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.rand((), generator=generator) * 10.0 ** (number % 5),
            torch.rand(7, generator=generator) < 0.3,
            torch.randint(1, 2**40, (3,), generator=generator),
        )
        for number in range(100)
    ]
    without = recorded(batches)
    patch = with_float64()
    assert without == pytest.approx(recorded(batches), rel=1e-12)
    patch.undo()


def test_restored_training_sums_end_in_the_same_bits() -> None:
    """They are saved between two batches."""
    batches = [(torch.tensor(0.1 * number), torch.tensor(3.0 + number)) for number in range(50)]

    def run(stops_at: int | None) -> Any:
        sums = TrainingSums(CPU, accumulation=1)
        for number, (loss, metric) in enumerate(batches):
            if number == stops_at:
                state = sums.state_dict()
                sums = TrainingSums(CPU, accumulation=1)
                sums.load_from_ranks([state])
            elif number % 7 == 0:
                sums.fold()
            sums.add(loss, {"metric": metric})
        return sums.take()

    assert run(21) == run(None)


def evaluated() -> Any:
    """Return the figures of an evaluation of five batches."""
    generator = torch.Generator().manual_seed(1)
    sums = ClassificationSums(alone(), ["a", "b", "c"])
    plain = Sums(alone())
    for _ in range(5):
        logits = torch.randn(11, 3, generator=generator)
        labels = torch.randint(3, (11,), generator=generator)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        sums.add(loss, logits, labels, {"confidence": logits.softmax(-1).amax(-1)})
        plain.add(11, squares=logits.square().sum(0), words=5)
        plain.record(loss, {"right": logits.argmax(-1) == labels}, 11)
    figures = dict(sums.result())
    reduced = plain.over_all_ranks()
    return figures, sums.result().confusion, reduced.totals["squares"], reduced.means


def test_evaluations_equal_those_in_float64() -> None:
    """Counts are equal, and sums agree within the rounding of fp32 products."""
    figures, confusion, squares, means = evaluated()
    patch = with_float64()
    wide_figures, wide_confusion, wide_squares, wide_means = evaluated()
    patch.undo()
    assert squares.dtype == torch.float64
    assert torch.equal(confusion, wide_confusion)
    assert figures == pytest.approx(wide_figures, rel=2 * SINGLE)
    assert means == pytest.approx(wide_means, rel=2 * SINGLE)
    assert squares.tolist() == pytest.approx(wide_squares.tolist(), rel=1e-12)


def test_ranks_exchange_float64_bits_as_integers() -> None:
    """Collectives of some devices cannot send float64."""
    sent: list[torch.Tensor] = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return torch.cat([values, values])

    accelerator: Any = SimpleNamespace(device=CPU, num_processes=2, gather=gather)
    row = torch.tensor([math.pi, -1e300, math.inf, 5e-324], dtype=torch.float64)
    assert torch.equal(gather_numbers(accelerator, row), torch.stack([row, row]))
    assert sent[0].dtype == torch.int64


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_are_unscaled_without_float64(overflows: bool) -> None:
    """The bits equal those of torch, which inverts the scale in float64."""
    results = []
    for has_float64 in (False, True):
        patch = pytest.MonkeyPatch()
        patch.setitem(trials.ANSWERS, ("has_float64", CPU), has_float64)
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = SharedScaler("cpu", init_scale=2.0**13)
        scaler.scale(parameter.sum() * 0.3).backward()
        assert parameter.grad is not None
        if overflows:
            parameter.grad[0] = torch.inf
        scaler.unscale_(optimizer)
        gradient = parameter.grad.clone()
        scaler.unscale_(optimizer)  # a second call does nothing
        assert torch.equal(parameter.grad, gradient)
        scaler.step(optimizer)
        scaler.update()
        results.append((gradient.tolist(), parameter.tolist(), scaler.get_scale()))
        patch.undo()
    assert results[0] == results[1]
    assert (results[0][2] < 2.0**13) is overflows
