"""Means and sums: every element of every rank counts once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.measure.classification import ClassificationSums
from common.measure.sums import Evaluation, Sums, of_all_ranks
from common.measure.training_sums import TrainingSums
from common.measure.value_checks import figure


def alone() -> Any:
    """Return a stand-in for an Accelerator of one process on a CPU."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        reduce=lambda tensor, _: tensor,
    )


def means_of_ranks(*ranks: TrainingSums) -> dict[str, float]:
    """Return the means over several ranks' sums as `Meters` computes them, and reset the sums."""
    totals_of_ranks = [sums.take() for sums in ranks]
    rows = [sums.row(totals) for sums, totals in zip(ranks, totals_of_ranks, strict=True)]
    if any(row[0] for row in rows):
        names = [*dict.fromkeys(name for totals in totals_of_ranks for name in totals)]
        for sums in ranks:
            sums.agreed = [*dict.fromkeys([*sums.agreed, *names])]
        rows = [sums.row(totals) for sums, totals in zip(ranks, totals_of_ranks, strict=True)]
    return ranks[0].means(torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize("micro_batches", [1, 31, 32, 33, 70])
def test_training_sums_cover_all_micro_batches(micro_batches: int) -> None:
    """Loss and metrics of any shape and type are summed, however an interval is divided."""
    generator = torch.Generator().manual_seed(0)
    sums = TrainingSums(torch.device("cpu"), accumulation=2)
    losses = []
    hits = []
    errors = []
    for number in range(micro_batches):
        hits.append(torch.rand(8, generator=generator) < 0.5)
        errors.append(torch.rand(2, 3 + number % 4, generator=generator))
        losses.append(torch.rand((), generator=generator))
        sums.add(losses[-1], {"hits": hits[-1], "errors": errors[-1]})
    expected = {
        "train/loss": float(torch.stack(losses).double().mean()),
        "train/hits": float(torch.cat(hits).double().mean()),
        "train/errors": float(torch.cat([e.flatten() for e in errors]).double().mean()),
    }
    assert means_of_ranks(sums) == pytest.approx(expected)
    last = torch.stack(losses[-2:]).mean()
    assert sums.last_loss() == pytest.approx(float(last))
    assert means_of_ranks(sums) == {}


def test_training_means_weigh_ranks_by_their_elements() -> None:
    """The mean is that over all elements, not that of the ranks' means."""
    ranks = []
    for values in ([1.0, 1.0, 1.0], [5.0]):
        sums = TrainingSums(torch.device("cpu"), accumulation=1)
        sums.add(torch.tensor(values[0]), {"value": torch.tensor(values)})
        ranks.append(sums)
    assert means_of_ranks(*ranks) == {"train/loss": 3.0, "train/value": 2.0}


def test_training_sums_continue_after_a_restore() -> None:
    """A restore anywhere in an interval, even with other ranks' sums, gives the same totals."""
    batches = [torch.rand(4, generator=torch.Generator().manual_seed(n)) for n in range(9)]

    def filled(part: list[torch.Tensor], *states: Any) -> TrainingSums:
        sums = TrainingSums(torch.device("cpu"), accumulation=2)
        sums.load_from_ranks(states)
        for values in part:
            sums.add(values.mean(), {"value": values})
        return sums

    whole = filled(batches)
    for cut in range(len(batches) + 1):
        resumed = filled(batches[cut:], filled(batches[:cut]).state_dict())
        assert resumed.last_loss() == whole.last_loss()
        totals = resumed.take()
        expected = filled(batches).take()
        assert totals.keys() == expected.keys()
        for name, pair in expected.items():
            assert totals[name] == pytest.approx(pair, rel=1e-12)


def test_training_sums_keep_no_graph() -> None:
    """Tensors kept between log lines are detached, so that activations are freed."""
    sums = TrainingSums(torch.device("cpu"), accumulation=1)
    weight = torch.ones(2, 2, requires_grad=True)
    logits = torch.ones(4, 2) @ weight
    sums.add(logits.sum(), {"mean": logits.mean(), "each": logits})
    pending = [*sums.pending[0].values(), sums.last_update[-1]]
    assert len(pending) == 4
    assert not any(tensor.requires_grad for tensor in pending)


def test_sums_of_any_shape_are_finished_by_the_recipe() -> None:
    """`finish` receives the sums over all batches, vectors and scalars alike."""
    seen: dict[str, torch.Tensor] = {}

    def finish(totals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.update(totals)
        return {"rmse": (totals["squares"].sum() / totals["count"]).sqrt()}

    sums = Sums(alone(), finish)
    sums.add(2, squares=torch.tensor([1.0, 3.0]))
    sums.add(1, squares=torch.tensor([2.0, 6.0], dtype=torch.float16))
    assert sums.result() == {"rmse": pytest.approx(2.0), "count": 3}
    assert seen["squares"].tolist() == [3.0, 9.0]


def test_plain_figures_are_averaged_over_ranks() -> None:
    """The result of `Sums` already covers all ranks, so it stays as it is."""
    two: Any = SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, reduce=lambda mine, how: mine + 1
    )
    assert of_all_ranks(two, {"a": torch.tensor(2.0), "b": 5}) == {"a": 3.0, "b": 6.0}
    assert of_all_ranks(two, Evaluation({"a": 2.0})) == {"a": 2.0}
    assert of_all_ranks(alone(), {"a": 2}) == {"a": 2.0}


def evaluated(predicted: list[int], labels: list[int], classes: int, size: int) -> dict[str, float]:
    """Evaluate predictions in batches of `size`, with a loss of 1, 2, … for each batch."""
    sums = ClassificationSums(alone(), [str(index) for index in range(classes)])
    pairs = zip(torch.tensor(predicted).split(size), torch.tensor(labels).split(size), strict=True)
    for number, (guesses, truth) in enumerate(pairs, start=1):
        logits = torch.nn.functional.one_hot(guesses, classes).float()
        sums.add(torch.tensor(float(number)), logits, truth)
    return sums.result()


def test_evaluation_weighs_each_sample_equally() -> None:
    """A smaller last batch counts by its samples, not as a batch."""
    result = evaluated([0, 1, 2, 0, 1], [0, 1, 2, 1, 1], classes=3, size=4)
    assert result["loss"] == pytest.approx((4 * 1 + 1 * 2) / 5)
    assert result["accuracy"] == pytest.approx(0.8)
    assert result["count"] == 5


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_class_figures_match_scikit_learn(classes: int) -> None:
    """With two classes, F1 is that of the second, as in GLUE. With more, it is the mean."""
    from sklearn.metrics import f1_score, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (97,), generator=generator).tolist()
    predicted = torch.randint(0, classes, (97,), generator=generator).tolist()
    result: Any = evaluated(predicted, labels, classes, size=10)
    name, average = ("f1", "binary") if classes == 2 else ("macro_f1", "macro")
    assert result[name] == pytest.approx(f1_score(labels, predicted, average=average))
    expected = zip(*precision_recall_fscore_support(labels, predicted), strict=True)
    for (_, *class_figures), figures in zip(result.by_class(), expected, strict=True):
        assert class_figures == pytest.approx([*map(float, figures)])
    assert evaluated([0, 0], [1, 1], 2, 2)["f1"] == 0


def test_torchmetrics_values_are_logged_unchanged() -> None:
    """A value that one of its metrics computes needs no conversion."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    metric.update(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0]))
    assert of_all_ranks(alone(), {"accuracy": metric.compute()}) == {"accuracy": 0.75}


def test_two_values_of_the_loss_are_refused() -> None:
    """Two values of the loss are refused, because one would replace the other."""
    loss = torch.tensor(2.0, requires_grad=True)
    other = torch.tensor(7.0)
    for another in (other, 7.0):
        with pytest.raises(UserError, match="two values for 'loss'"):
            Sums(alone()).record(loss, {"loss": another}, 4)
        with pytest.raises(UserError, match="two values for 'loss'"):
            TrainingSums(torch.device("cpu"), 1).add(loss, {"loss": another})


def test_loss_may_be_repeated_among_the_metrics() -> None:
    """It is the same loss, and counts once."""
    loss = torch.tensor(2.0, requires_grad=True)
    sums = Sums(alone())
    sums.record(loss, {"loss": loss.detach()}, 4)
    sums.record(5.0, {"loss": 5.0}, 2)
    assert sums.result() == {"loss": 3.0, "count": 6}
    training = TrainingSums(torch.device("cpu"), 1)
    training.add(loss, {"loss": loss.detach()})
    assert means_of_ranks(training) == {"train/loss": 2.0}


@pytest.mark.parametrize(
    ("value", "words", "advice"),
    [
        (torch.ones(3), "of type Tensor of shape (3,) as 'x'", ", such as value.mean()"),
        (np.ones((2, 2)), "of type ndarray of shape (2, 2) as 'x'", ", such as value.mean()"),
        ("good", "of type str as 'x' instead", ""),
        (None, "of type NoneType as 'x' instead", ""),
    ],
)
def test_figure_that_is_no_number_is_refused(value: Any, words: str, advice: str) -> None:
    """Only tensors and arrays have a mean."""
    with pytest.raises(UserError) as refused:
        figure("x", value)
    assert words in refused.value.problem
    assert refused.value.advice == f"return one number for each name{advice}"
