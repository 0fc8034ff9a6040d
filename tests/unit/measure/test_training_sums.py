"""Sums of the training loss and of metrics, on one rank between two log lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.measure.training_sums import TrainingSums


def taken_means(sums: TrainingSums) -> dict[str, float]:
    """Return the mean of each metric, and reset the sums."""
    return {name: total / count for name, (total, count) in sums.take().items()}


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
        "loss": float(torch.stack(losses).double().mean()),
        "hits": float(torch.cat(hits).double().mean()),
        "errors": float(torch.cat([e.flatten() for e in errors]).double().mean()),
    }
    assert taken_means(sums) == pytest.approx(expected)
    last = torch.stack(losses[-2:]).mean()
    assert sums.last_update_loss().value == pytest.approx(float(last))
    assert taken_means(sums) == {}


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
        assert resumed.last_update_loss() == whole.last_update_loss()
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
    pending = [*sums.pending[0].values(), sums.last_update_losses[-1]]
    assert len(pending) == 4
    assert not any(tensor.requires_grad for tensor in pending)


@pytest.mark.parametrize("changed", ["loss", "metric", "view of the metric"])
@pytest.mark.parametrize("micro_batches", [1, TrainingSums.FOLD_EVERY - 1, TrainingSums.FOLD_EVERY])
def test_tensor_that_changes_after_it_was_recorded_is_refused(
    changed: str, micro_batches: int
) -> None:
    """Its value is added up later, so the logged mean would be wrong."""
    sums = TrainingSums(torch.device("cpu"), accumulation=1)
    loss = torch.ones(())
    metric = torch.ones(3)
    tensors = {"loss": loss, "metric": metric, "view of the metric": metric[1:]}

    def record_and_change() -> None:
        for _ in range(micro_batches):
            sums.add(loss, {"metric": metric})
            tensors[changed].add_(1.0)
        sums.take()

    with pytest.raises(UserError, match=r"'(loss|metric)' in place .* as in \w+.clone\(\)"):
        record_and_change()


def test_values_that_are_copied_may_change() -> None:
    """Clones, numbers and arrays keep the value that was recorded."""
    sums = TrainingSums(torch.device("cpu"), accumulation=1)
    running = torch.zeros(())
    array = np.zeros(2)
    with torch.inference_mode():
        inferred = torch.ones(2)
    for _ in range(4):
        sums.add(running.clone(), {"array": array, "inferred": inferred})
        running += 1.0
        array += 1.0
    assert sums.take() == {"loss": (6.0, 4.0), "array": (12.0, 8.0), "inferred": (8.0, 8.0)}


def test_another_value_of_the_loss_is_refused() -> None:
    """One of the two would replace the other."""
    loss = torch.tensor(2.0, requires_grad=True)
    for another in (torch.tensor(7.0), 7.0):
        with pytest.raises(UserError, match="two values for 'loss'"):
            TrainingSums(torch.device("cpu"), 1).add(loss, {"loss": another})


@pytest.mark.parametrize("loss", [float("nan"), 2.0, np.float32(2.0), np.array([2.0])])
def test_loss_that_is_no_tensor_may_be_repeated(loss: Any) -> None:
    """NaN is not equal to itself, and the values of an array are copied."""
    sums = TrainingSums(torch.device("cpu"), 1)
    sums.add(loss, {"loss": loss})
    total, count = sums.take()["loss"]
    assert count == 1
    assert total == pytest.approx(2.0) or np.isnan(loss)


def test_loss_may_be_repeated_among_the_metrics() -> None:
    """It is the same loss, and counts once."""
    loss = torch.tensor(2.0, requires_grad=True)
    sums = TrainingSums(torch.device("cpu"), 1)
    sums.add(loss, {"loss": loss.detach()})
    assert sums.take() == {"loss": (2.0, 1.0)}
