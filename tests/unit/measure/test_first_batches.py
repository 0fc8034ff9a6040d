"""Wrong counts, means and totals that the two batches of a rehearsal show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.lifecycle.evaluation_figures import evident_mistakes
from common.measure.classification import ClassificationSums
from common.measure.first_batches import has_ratio
from common.measure.sums import Sums
from examples import regression
from tests.ranks import alone
from tests.small_run import FLAGS, run

Batch = Callable[[Sums, torch.Tensor], object]  # records a batch of the values of its samples

VALUES = torch.tensor([0.5, 2.5, 3.0, 0.25])


def problems_of(
    add: Callable[[Any, torch.Tensor], object],
    sums: Sums | None = None,
    values: torch.Tensor = VALUES,
    batch_sizes: Sequence[int] | None = None,
) -> list[str]:
    """Return what is evident after a rehearsal on these samples, and on them twice."""
    sums = sums or Sums(alone())
    for batch in (values, torch.cat([values, values])):
        add(sums, batch)
    sizes = [len(values), 2 * len(values)] if batch_sizes is None else batch_sizes
    return [mistake.problem for mistake in evident_mistakes(sums.result(), sizes)]


TOTALS: Mapping[str, Batch] = {
    "number": lambda sums, v: sums.record(v.mean(), {"hits": float(v.sum())}, len(v)),
    "tensor": lambda sums, v: sums.record(v.mean(), {"hits": v.sum()}, len(v)),
    "count of tokens": lambda sums, v: sums.record(v.mean(), {"hits": v.sum()}, 7 * len(v)),
    "loss": lambda sums, v: sums.record(v.sum(), None, len(v)),
}


@pytest.mark.parametrize(
    "add",
    [
        lambda sums, hits: sums.add(8 if hits == 1 else 16, recall=torch.tensor(1)),
        lambda sums, hits: sums.record(
            0.5, {"recall": hits / (8 if hits == 1 else 16)}, 8 if hits == 1 else 16
        ),
    ],
    ids=["as many hits", "four times as many hits"],
)
def test_hits_by_chance_are_no_mistake(add: Callable[[Sums, int], object]) -> None:
    """In an evaluation by random draws, or among the samples of a batch, they do not double."""
    sums = Sums(alone())
    for hits in (1, 4):
        add(sums, hits)
    assert not evident_mistakes(sums.result(), [8, 16])


class OnDeviceWithoutFloat64(torch.Tensor):
    """A stand-in for a tensor on an Apple GPU."""

    def double(self) -> torch.Tensor:  # type: ignore[override]
        raise TypeError("the device has no float64")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("ratio", [1, 2])
def test_values_of_a_device_without_float64_are_compared_on_the_host(ratio: int) -> None:
    """The rehearsal of each recipe compares such values on Apple's GPUs."""
    once, twice = (torch.tensor(x).as_subclass(OnDeviceWithoutFloat64) for x in (0.5, 0.5 * ratio))
    assert has_ratio(once, twice, ratio, 0.001)
    assert not has_ratio(once, twice, 3, 0.001)


@pytest.mark.parametrize("case", TOTALS)
def test_total_in_place_of_a_mean_is_named(case: str) -> None:
    """It doubles with the samples, as no mean does."""
    name = "loss" if case == "loss" else "hits"
    (problem,) = problems_of(TOTALS[case])
    assert problem.startswith(f"the evaluation got the total of {name!r} over a batch where")


def test_total_among_the_metrics_of_a_classification_is_named() -> None:
    """`ClassificationSums.add` records its further metrics as `Sums.record` does."""

    def add(sums: ClassificationSums, values: torch.Tensor) -> None:
        logits = torch.stack([values, 1 - values], 1)
        labels = torch.zeros(len(values), dtype=torch.long)
        sums.add(values.mean(), logits, labels, {"hits": (logits.argmax(-1) == labels).sum()})

    (problem,) = problems_of(add, ClassificationSums(alone(), ["a", "b"]))
    assert "the total of 'hits'" in problem


COUNTS: Mapping[str, Batch] = {
    "one": lambda sums, v: sums.record(v.mean(), {"accuracy": v.mean()}, 1),
    "one with a total": lambda sums, v: sums.record(v.mean(), {"hits": v.sum()}, 1),
    "largest batch": lambda sums, v: sums.record(v.mean(), None, torch.tensor(64)),
    "keys of the batch": lambda sums, v: sums.record(v.mean(), {"hits": v > 1}, 2),
    "add one": lambda sums, v: sums.add(1, loss=v.sum()),
    "add one with a mean": lambda sums, v: sums.add(1, loss=v.mean()),
    "add keys of the batch": lambda sums, v: sums.add(2, loss=v.sum()),
}


@pytest.mark.parametrize("case", COUNTS)
def test_wrong_number_of_samples_is_named(case: str) -> None:
    """It is the same for both batches, and can't be the number of samples."""
    (problem,) = problems_of(COUNTS[case])
    assert "as the number of samples both of a batch of 4 and of one of 8" in problem
    assert problem.startswith("sums.add" if case.startswith("add") else "sums.record")


@pytest.mark.parametrize(
    ("function", "is_named"),
    [
        (lambda totals: {"loss": totals["loss"] / totals["count"]}, True),
        (lambda totals: {"mean": totals["loss"] / totals["count"]}, False),  # may be any number
        (lambda totals: {"loss": totals["loss"] / totals["samples"]}, False),
    ],
    ids=["loss", "another figure", "another divisor"],
)
def test_wrong_number_of_samples_is_named_by_the_loss_of_a_function(
    function: Any, is_named: bool
) -> None:
    """A loss that doubles with the samples is no mean."""
    problems = problems_of(
        lambda sums, v: sums.add(1, loss=v.sum(), samples=len(v)), Sums(alone(), function)
    )
    named = [problem for problem in problems if problem.startswith("sums.add got 1 as the number")]
    assert bool(named) is is_named


CORRECT: Mapping[str, Batch] = {
    "means": lambda sums, v: sums.record(v.mean(), {"a": v.mean(), "b": v, "c": 0}, len(v)),
    "zeros": lambda sums, v: sums.record(0.0, {"hits": (v > 9).sum()}, len(v)),
    "totals": lambda sums, v: sums.add(len(v), loss=v.sum(), hits=(v > 1).sum()),
    "tokens": lambda sums, v: sums.record(v.mean(), {"hits": v > 1}, torch.tensor(7 * len(v))),
    "groups": lambda sums, v: sums.record(v.mean(), {"recall": v.unique()}, len(v.unique()) - 1),
    "one sample at a time": lambda sums, v: [sums.record(x, {"x": x}, 1) for x in v],
    "contrastive loss": lambda sums, v: sums.record(math.log(len(v)), None, len(v)),
    "no sample that counts": lambda sums, v: sums.record(0.0, None, 0),
    "loss of another size": lambda sums, v: sums.record(v.sum() + 1, None, len(v)),
    "generated samples": lambda sums, v: sums.add(64, fake=torch.rand(64).sum()),
    "hits among generated samples": lambda sums, v: sums.add(64, fake=torch.tensor(len(v))),
    "the same generated samples": lambda sums, v: sums.add(64, fake=torch.tensor(9.5)),
    "mean of generated samples": lambda sums, v: sums.record(torch.rand(64).mean(), None, 64),
    "count for finish": lambda sums, v: sums.add(1, loss=v.sum(), samples=len(v)),
}


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CORRECT)
def test_correct_calls_are_not_refused(case: str, samples: int) -> None:
    """Neither are unusual ones, at any size of the batch."""
    torch.manual_seed(0)
    sums = Sums(alone(), lambda totals: {"loss": totals["loss"] / totals["samples"]})
    sums = sums if case == "count for finish" else Sums(alone())
    assert problems_of(CORRECT[case], sums, VALUES[:samples]) == []


@pytest.mark.parametrize("sizes", [[], [4], [4, 4], [4, 8, 4, 8]])
def test_other_batches_say_nothing_about_a_count(sizes: list[int]) -> None:
    """An evaluation may read several splits, or batches that it made itself."""
    assert problems_of(COUNTS["one"], batch_sizes=sizes) == []


@pytest.mark.usefixtures("quick_runs")
def test_wrong_count_ends_a_run_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader tells the run the sizes of the two batches."""

    def evaluate(recipe_run: Any, model: Any, loader: Any) -> dict[str, float]:
        sums = Sums(recipe_run.accelerator)
        with recipe_run.evaluating(model) as bare_model:
            for batch in loader:
                loss, _ = regression.compute_loss(bare_model, batch)
                sums.record(loss, {"rmse": loss.sqrt(), "r2": 0.5}, 1)
        return sums.result()

    monkeypatch.setattr(regression, "evaluate", evaluate)
    error, output = run(*FLAGS, "--output-dir", tmp_path)
    assert "sums.record got 1 as the number of samples both of a batch of 32" in str(error)
    assert "step 2/4" not in output
