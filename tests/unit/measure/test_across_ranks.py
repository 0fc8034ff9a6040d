"""Figures over ranks that record different names, counts and shapes: each value counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.samples import Work
from common.errors import UserError
from common.measure import across_ranks, collected, sums, training_sums
from common.measure.classification import ClassificationSums
from common.measure.meters import Meters
from common.measure.sums import Evaluation, Sums, of_all_ranks
from common.measure.training_sums import TrainingSums
from tests.ranks import gather_from_ranks, on_ranks

NAMES = ("accuracy", "kl", "psnr", "error")
NUMBERS = st.floats(-1e3, 1e3, width=32)
SINGLE = ("number", "numpy", "mean")  # types of values that are one number
# Metrics of a recipe by type and elements. `as_recorded` turns them into values.
VALUES = st.tuples(
    st.sampled_from(["tensor", "half", "bool", "integer", "number", "numpy", "array", "mean"]),
    st.lists(NUMBERS, min_size=0, max_size=5),
)
BATCHES = st.tuples(
    NUMBERS,  # the mean loss
    st.integers(1, 9),  # samples
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
RANKS = st.lists(st.lists(BATCHES, max_size=4), min_size=1, max_size=3)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def as_recorded(type_name: str, numbers: list[float]) -> tuple[Any, list[float]]:
    """Return a value that a recipe records, and its elements."""
    if type_name in SINGLE:
        number = numbers[0] if numbers else 0.5
        values = {"number": number, "numpy": np.float32(number), "mean": torch.tensor(number)}
        return values[type_name], [number]
    array = np.array(numbers, dtype=np.float32)
    if type_name == "array":
        return array, array.tolist()
    types = {"tensor": torch.float32, "half": torch.bfloat16, "bool": torch.bool}
    tensor = torch.tensor(numbers).to(types.get(type_name, torch.int64))
    return tensor.view(-1, 1), tensor.double().tolist()


def batch_total(type_name: str, numbers: list[float]) -> Any:
    """Return the sum of a batch's elements as a recipe adds it, rounded to the elements' type."""
    value, _ = as_recorded(type_name, numbers)
    return value if isinstance(value, (float, np.floating)) else value.sum()


def means_of(elements: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean of each name's elements, if it has any."""
    return {
        name: float(np.mean(np.array(values, dtype=np.float64)))
        for name, values in elements.items()
        if values
    }


@pytest.fixture(autouse=True)
def _simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (across_ranks, collected, sums, training_sums):
        monkeypatch.setattr(module, "gather_from_ranks", gather_from_ranks)


@FEW
@given(RANKS)
def test_training_metrics_are_the_means_over_all_ranks(ranks: Any) -> None:
    """Ranks record any values in two intervals, and exchange names only for new ones."""
    expected: dict[str, list[float]] = {}
    for batches in ranks:
        for loss, _, metrics in batches:
            expected.setdefault("train/loss", []).append(loss)
            for name, value in metrics.items():
                expected.setdefault(f"train/{name}", []).extend(as_recorded(*value)[1])

    def work(accelerator: Any) -> Any:
        meters = Meters(accelerator, 1)
        rows = []
        for _ in range(2):
            for loss, size, metrics in ranks[accelerator.process_index]:
                values = {name: as_recorded(*value)[0] for name, value in metrics.items()}
                meters.count(torch.tensor(loss), values, Work(size), 0.0, True)
            rows.append(meters.end_interval())
        return rows, accelerator.exchanges

    for rows, exchanges in on_ranks(len(ranks), work):
        assert exchanges <= 1  # none for the second interval, which has the same names
        for row in rows:
            learned = {name: value for name, value in row.items() if name.startswith("train/")}
            assert learned == pytest.approx(means_of(expected), rel=1e-9, abs=1e-9)


@FEW
@given(RANKS, st.data())
def test_training_sums_continue_on_another_number_of_ranks(ranks: Any, data: Any) -> None:
    """One rank continues the sums that all ranks had at a checkpoint."""

    def filled(batches: Any, states: Any = ()) -> TrainingSums:
        sums = TrainingSums(torch.device("cpu"), 1)
        sums.load_from_ranks(states)
        for loss, _, metrics in batches:
            sums.add(loss, {name: as_recorded(*value)[0] for name, value in metrics.items()})
        return sums

    cuts = [data.draw(st.integers(0, len(batches))) for batches in ranks]
    states = []
    rest = []
    for batches, cut in zip(ranks, cuts, strict=True):
        states.append(filled(batches[:cut]).state_dict())
        rest += batches[cut:]
    resumed = filled(rest, states).take()
    whole = filled([batch for batches in ranks for batch in batches]).take()
    assert resumed.keys() == whole.keys()
    for name, pair in whole.items():
        assert resumed[name] == pytest.approx(pair, rel=1e-9, abs=1e-9)


@FEW
@given(RANKS.filter(any))
def test_recorded_evaluations_are_the_means_over_all_ranks(ranks: Any) -> None:
    """`Sums.record` accepts the values of `run.record`, and a rank may have no batch.

    A single number is the mean of its batch, so it counts as often as the batch has samples.
    """
    losses = 0.0
    count = 0
    expected: dict[str, list[float]] = {}
    for batches in ranks:
        for loss, size, metrics in batches:
            losses += size * loss
            count += size
            for name, value in metrics.items():
                repeats = size if value[0] in SINGLE else 1
                expected.setdefault(name, []).extend(as_recorded(*value)[1] * repeats)

    def work(accelerator: Any) -> Evaluation:
        sums = Sums(accelerator)
        for loss, size, metrics in ranks[accelerator.process_index]:
            values = {name: as_recorded(*value)[0] for name, value in metrics.items()}
            sums.record(torch.tensor(loss), values, size)
        return sums.result()

    for figures in on_ranks(len(ranks), work):
        known = {name: value for name, value in figures.items() if value == value}
        means = means_of(expected) | {"loss": losses / count, "count": count}
        assert known == pytest.approx(means, rel=1e-9, abs=1e-9)


@FEW
@given(RANKS.filter(any))
def test_added_totals_cover_all_ranks(ranks: Any) -> None:
    """Some ranks lack some names, and totals are plain numbers or tensors."""
    count = sum(size for batches in ranks for _, size, _ in batches)
    expected = {"count": float(count)}
    for batches in ranks:
        for _, _, metrics in batches:
            for name, value in metrics.items():
                expected[name] = expected.get(name, 0.0) + float(batch_total(*value))

    def work(accelerator: Any) -> Evaluation:
        sums = Sums(accelerator, lambda totals: {f"sum_{n}": t for n, t in totals.items()})
        for _, size, metrics in ranks[accelerator.process_index]:
            sums.add(size, **{name: batch_total(*value) for name, value in metrics.items()})
        return sums.result()

    for figures in on_ranks(len(ranks), work):
        assert figures.pop("count") == count
        assert figures.keys() == {f"sum_{name}" for name in expected}
        for name, total in expected.items():
            assert figures[f"sum_{name}"] == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_metrics_of_single_ranks_are_logged_unchanged() -> None:
    """A constant 100 on one rank does not mix with a constant 1 on the other."""

    def work(accelerator: Any) -> dict[str, float]:
        meters = Meters(accelerator, 1)
        name, value = ("first", 100.0) if accelerator.process_index == 0 else ("second", 1.0)
        for _ in range(40):
            meters.count(torch.tensor(0.5), {name: value}, Work(1), 0.0, True)
        return meters.end_interval()

    for values in on_ranks(2, work):
        assert (values["train/first"], values["train/second"]) == (100.0, 1.0)


def test_ranks_with_differing_shapes_are_refused() -> None:
    """The message names both shapes and a rank."""

    def work(accelerator: Any) -> Evaluation:
        sums = Sums(accelerator)
        sums.add(2, hits=torch.ones(2 + accelerator.process_index))
        return sums.result()

    with pytest.raises(
        UserError, match=r"'hits' with shape \(3,\) on rank 1, but \(2,\) on another rank"
    ):
        on_ranks(2, work)


def test_plain_figures_are_those_of_the_ranks_that_have_them() -> None:
    """A rank may lack a figure, and all ranks get the values of the first rank that has it."""

    def work(accelerator: Any) -> Evaluation:
        ranks = (
            {"a": 1.0, "b": 10.0, "none": float("nan")},
            {"b": torch.tensor(10.000001), "c": 5, "none": float("nan")},
        )
        return of_all_ranks(accelerator, ranks[accelerator.process_index])

    for figures in on_ranks(2, work):
        assert math.isnan(figures.pop("none"))
        assert figures == {"a": 1.0, "b": 10.0, "c": 5.0}


@pytest.mark.parametrize("other", [3.001, float("nan")])
@pytest.mark.parametrize("form", [dict, Evaluation])
def test_figures_of_single_ranks_are_refused(form: Any, other: float) -> None:
    """Their mean would not be the figure of all samples, such as an AUROC."""

    def work(accelerator: Any) -> Evaluation:
        value = 3.0 if accelerator.process_index == 0 else other
        return of_all_ranks(accelerator, form({"loss": 1.0, "auroc": value}))

    with pytest.raises(UserError, match=r"different values of 'auroc' \(3, and .* on rank 1\)"):
        on_ranks(2, work)


@FEW
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=3))
def test_collected_rows_are_those_of_all_ranks(ranks: list[list[int]]) -> None:
    """All ranks get all rows in the same order, and some ranks and batches have none."""
    sizes = [size for batches in ranks for size in batches]
    expected = np.arange(sum(sizes), dtype=np.float32)
    begins = np.cumsum([0, *map(sum, ranks)])

    def work(accelerator: Any) -> dict[str, torch.Tensor]:
        sums = Sums(accelerator)
        begin = begins[accelerator.process_index]
        for size in ranks[accelerator.process_index]:
            rows = torch.arange(begin, begin + size)
            sums.collect(scores=rows.half(), pairs=np.stack([rows, -rows], axis=1))
            begin += size
        return sums.collected()

    for rows in on_ranks(len(ranks), work):
        if not sizes:
            assert rows == {}
            continue
        assert rows["scores"].numpy() == pytest.approx(expected)
        assert rows["scores"].dtype == torch.float32
        assert rows["pairs"].tolist() == [[value, -value] for value in expected]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([{"scores": 0.5}], "'scores' as a value of type float"),
        ([{"scores": torch.tensor(0.5)}], "one number as 'scores'"),
        ([{"scores": np.array(["a"])}], "'scores' as a value of type ndarray"),
        ([{"scores": torch.ones(2), "labels": torch.ones(3)}], "different numbers of rows"),
        ([{"boxes": torch.ones(2, 3)}, {"boxes": torch.ones(1, 4)}], r"shapes \(3,\), \(4,\)"),
    ],
)
def test_rows_that_cannot_be_collected_are_refused(batches: list[Any], words: str) -> None:
    """One sentence says what to pass instead."""

    def work(accelerator: Any) -> Any:
        sums = Sums(accelerator)
        for batch in batches:
            sums.collect(**batch)
        return sums.collected()

    with pytest.raises(UserError, match=words):
        on_ranks(1, work)


def test_classification_accepts_further_metrics() -> None:
    """They are those of `run.record`. `record` itself would lack labels."""

    def work(accelerator: Any) -> Evaluation:
        sums = ClassificationSums(accelerator, ["no", "yes"])
        if accelerator.process_index == 0:
            logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
            sums.add(0.5, logits, torch.tensor([0, 0]), {"margin": torch.tensor([1.0, 3.0])})
        return sums.result()

    for figures in on_ranks(2, work):
        assert (figures["loss"], figures["accuracy"], figures["margin"]) == (0.5, 0.5, 2.0)
    with pytest.raises(UserError, match="labels"):
        on_ranks(1, lambda accelerator: ClassificationSums(accelerator, []).record(1.0, {}, 1))
