"""Sums of an evaluation in one process. `test_across_ranks.py` tests several."""

from __future__ import annotations

import pytest
import torch

from common.errors import UserError
from common.measure.sums import Sums, of_all_ranks
from tests.ranks import alone


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


def test_torchmetrics_values_are_logged_unchanged() -> None:
    """A value that one of its metrics computes needs no conversion."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    metric.update(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0]))
    assert of_all_ranks(alone(), {"accuracy": metric.compute()}) == {"accuracy": 0.75}


def test_another_value_of_the_loss_is_refused() -> None:
    """One of the two would replace the other."""
    loss = torch.tensor(2.0, requires_grad=True)
    for another in (torch.tensor(7.0), 7.0):
        with pytest.raises(UserError, match="two values for 'loss'"):
            Sums(alone()).record(loss, {"loss": another}, 4)


def test_loss_may_be_repeated_among_the_metrics() -> None:
    """It is the same loss, and counts once."""
    loss = torch.tensor(2.0, requires_grad=True)
    sums = Sums(alone())
    sums.record(loss, {"loss": loss.detach()}, 4)
    sums.record(5.0, {"loss": 5.0}, 2)
    assert sums.result() == {"loss": 3.0, "count": 6}


def test_result_has_one_number_for_each_name() -> None:
    """A vector needs `finish`. The message names the figure."""
    sums = Sums(alone())
    sums.add(1, hits=torch.ones(3))
    with pytest.raises(UserError, match=r"of type Tensor of shape \(3,\) as 'hits' instead of one"):
        sums.result()
    with pytest.raises(UserError, match="a value of type str as 'note' instead of one"):
        of_all_ranks(alone(), {"note": "good"})


def test_batches_of_differing_shapes_are_refused() -> None:
    """A plain number has the shape of a tensor without dimensions."""
    sums = Sums(alone())
    sums.add(2, hits=torch.ones(2))
    with pytest.raises(UserError, match="'hits' with shape"):
        sums.add(2, hits=1.0)


def test_means_and_totals_can_be_combined() -> None:
    """A name is one or the other, and `finish` gets the sums of both."""
    sums = Sums(alone(), lambda totals: {"rmse": (totals["squares"] / totals["count"]) ** 0.5})
    for errors in (torch.tensor([3.0, 4.0]), torch.tensor([0.0])):
        sums.record(errors.mean(), {"error": errors.abs()}, len(errors))
        sums.add(len(errors), squares=errors.square().sum())
    expected = {"loss": 7 / 3, "error": 7 / 3, "rmse": (25 / 3) ** 0.5, "count": 3}
    assert sums.result() == pytest.approx(expected)
    both = Sums(alone())
    both.record(1.0, None, 2)
    message = r"the name 'loss' is used in both sums\.add and sums\.record"
    with pytest.raises(UserError, match=message):
        both.add(2, loss=2.0)


@pytest.mark.parametrize(
    ("adds_mean", "names"), [(True, ["loss"]), (False, [])], ids=["mean", "total"]
)
@pytest.mark.parametrize("has_finish", [False, True])
def test_mean_in_place_of_a_total_is_detected(
    adds_mean: bool, names: list[str], has_finish: bool
) -> None:
    """In a second batch with the same samples twice, a total doubles."""
    finish = (lambda totals: {"loss": totals["loss"] / totals["count"]}) if has_finish else None
    sums = Sums(alone(), finish)
    losses = torch.tensor([0.5, 2.5, 3.0])
    for batch in (losses, torch.cat([losses, losses])):
        sums.add(len(batch), loss=batch.mean() if adds_mean else batch.sum())
    evaluation = sums.result()
    assert evaluation.first_batches.means_for_totals(evaluation.finish) == names


def test_ratio_of_batches_and_zeros_are_no_such_mistake() -> None:
    """Neither is a total over batches of arbitrary sizes."""
    by_batches = Sums(alone(), lambda totals: {"loss": totals["loss"] / totals["batches"]})
    zero = Sums(alone())
    others = Sums(alone())
    for size in (3, 6):
        by_batches.add(size, loss=1.5, batches=1)
        zero.add(size, loss=0.0, hits=0)
        others.add(size + 1, loss=1.5)
    for sums in (by_batches, zero, others):
        evaluation = sums.result()
        assert evaluation.first_batches.means_for_totals(evaluation.finish) == []
