"""The cause that micro-batches divide their losses by different numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common.tools.prove.instruments.loss_calls import divisor_of
from common.tools.prove.instruments.losses import LossObserver
from common.tools.prove.layouts.compared_runs import UpdateLayout
from common.tools.prove.layouts.loss_divisors import cause_of_divisor
from common.tools.prove.layouts.pairs import RunPair
from common.tools.prove.records.base import ObservedRecord
from common.tools.prove.records.instrument_records import (
    DivisorType,
    SampleGradients,
    TrainingLoss,
)
from common.tools.prove.records.observed_run import ObservedRun
from tests.unit.tools.prove.made_up_records import micro_batch, run_with

WHOLE = UpdateLayout(4, 1)
DIVIDED = UpdateLayout(2, 2)
GRADIENTS = (0.8, 0.4, 0.6, 0.2)  # of the samples in one batch
NO_SHARES = (None, None)


def run_of(
    layout: UpdateLayout,
    gradients: Sequence[Sequence[float] | None],
    divisors: Sequence[float] = (),
    divisor_type: DivisorType = "labels",
    step: int = 0,
) -> ObservedRun:
    """Return a run of one update, with the gradients and the divisor of each micro-batch."""
    records: list[ObservedRecord] = []
    for number, norms in enumerate(gradients):
        first = number * layout.batch_size
        records.append(micro_batch(step, number, samples=range(first, first + layout.batch_size)))
        if divisors:
            records.append(
                TrainingLoss(
                    step=step,
                    function="cross_entropy",
                    loss=1.0,
                    micro_batch=number,
                    divisor_type=divisor_type,
                    divisor=divisors[number],
                )
            )
        if norms is not None:
            records.append(SampleGradients(step=step, micro_batch=number, gradient_norms=[*norms]))
    return run_with(records)


def pair_of(
    shares: Sequence[float | None],
    divisors: Sequence[float] = (),
    divisor_type: DivisorType = "labels",
) -> RunPair:
    """Return a pair whose micro-batches count `shares` times as much as in one batch."""
    halves: list[list[float] | None] = []
    for number, share in enumerate(shares):
        half = GRADIENTS[2 * number : 2 * number + 2]
        halves.append(None if share is None else [share * norm for norm in half])
    variant = run_of(DIVIDED, halves, divisors, divisor_type)
    return RunPair(run_of(WHOLE, [GRADIENTS]), variant, WHOLE, DIVIDED)


def test_a_function_that_divides_by_the_labels_is_named() -> None:
    """Of 8 labels, 5 are in the first micro-batch: 8 / (2 × 5) and 8 / (2 × 3)."""
    cause = cause_of_divisor(pair_of((8 / 10, 8 / 6), (5, 3)))
    assert cause is not None
    assert cause.sentence == (
        "cross_entropy divides the loss by the number of labels that it does not ignore, which is "
        "5 and 3 in the micro-batches of update 1, so their samples count 0.8 and 1.333 times as "
        "much as in one batch"
    )
    assert "examples/tagging.py" in cause.advice
    assert "--skip accumulation" in cause.advice


@pytest.mark.parametrize("divisors", [(), (2, 2), (5, 3)], ids=str)
def test_a_divisor_of_the_recipe_is_recognised(divisors: tuple[int, ...]) -> None:
    """Equal divisors of torch, or ones that do not fit, are not the reason."""
    cause = cause_of_divisor(pair_of((10 / 12, 10 / 8), divisors, "elements"))
    assert cause is not None
    assert "count 0.8333 and 1.25 times as much as in one batch" in cause.sentence
    assert "such as a sum of weights or a number of tokens" in cause.sentence


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0002, 0.9998), (2.0, 2.0), (2.5, 1.7)], ids=str)
def test_other_shares_are_not_those_of_a_mean_of_each(shares: tuple[float, ...]) -> None:
    """Torch's divisors differ, but the recipe corrects them, or makes another mistake."""
    assert cause_of_divisor(pair_of(shares, (5, 3))) is None


def test_samples_that_count_differently_within_a_micro_batch_have_no_share() -> None:
    uneven = run_of(DIVIDED, [[0.8, 0.3], [0.6, 0.2]])
    assert cause_of_divisor(RunPair(run_of(WHOLE, [GRADIENTS]), uneven, WHOLE, DIVIDED)) is None


def test_torchs_divisors_are_named_without_gradients() -> None:
    cause = cause_of_divisor(pair_of(NO_SHARES, (5.5, 3.25), "weights"))
    assert cause is not None
    assert cause.sentence == (
        "cross_entropy divides the loss by the sum of the weights of its labels, which is "
        "5.5 and 3.25 in the micro-batches of update 1"
    )
    assert cause_of_divisor(pair_of(NO_SHARES, (4, 4))) is None


def test_divisors_that_differ_later_are_found() -> None:
    """In update 1, both micro-batches have the same number of labels."""
    first = pair_of((1.0, 1.0), (4, 4))
    whole = run_of(WHOLE, [GRADIENTS], step=1)
    divided = run_of(DIVIDED, [[1.0, 0.5], [0.5, 1 / 6]], (4, 6), step=1)
    baseline = run_with([*first.baseline.processes[0].records, *whole.processes[0].records])
    variant = run_with([*first.variant.processes[0].records, *divided.processes[0].records])
    cause = cause_of_divisor(RunPair(baseline, variant, WHOLE, DIVIDED))
    assert cause is not None
    assert "which is 4 and 6 in the micro-batches of update 2" in cause.sentence


LABELS = torch.tensor([0, 2, -100, 1])
WEIGHT = torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("function", "target", "options", "expected"),
    [
        ("cross_entropy", LABELS, {}, ("labels", 3)),
        ("cross_entropy", LABELS, {"weight": WEIGHT}, ("weights", 7)),
        ("cross_entropy", torch.tensor([0, 1, 1, 2]).byte(), {"weight": WEIGHT}, ("weights", 9)),
        ("nll_loss", LABELS, {"ignore_index": 0, "weight": None}, ("labels", 3)),
        ("cross_entropy", LABELS, {"reduction": "sum"}, None),
        ("cross_entropy", LABELS, {"reduce": False}, None),
        ("cross_entropy", torch.ones(4, 3), {"weight": WEIGHT}, ("elements", 12)),
        ("mse_loss", torch.ones(4), {}, ("elements", 4)),
    ],
)
def test_divisor_of_a_loss(
    function: str,
    target: torch.Tensor,
    options: dict[str, object],
    expected: tuple[str, float] | None,
) -> None:
    divisor = divisor_of(function, target, options)
    assert (divisor and (divisor.divisor_type, divisor.value)) == expected


class Notes:
    """A session in training, whose micro-batch has two samples; it keeps what is written."""

    has_started = True
    step = 0
    micro_batch = 0
    sample_indices = (5, 3)

    def __init__(self) -> None:
        self.written: list[TrainingLoss] = []

    def write(self, record: TrainingLoss) -> None:
        self.written.append(record)


def test_options_passed_by_position_are_known() -> None:
    """`F.cross_entropy(logits, labels, weight)` divides by the sum of the weights, too."""
    session: Any = Notes()
    logits = torch.zeros(4, 3, requires_grad=True)
    LossObserver(session).around_loss(F.cross_entropy, logits, LABELS, WEIGHT)
    assert [(loss.divisor_type, loss.divisor) for loss in session.written] == [("weights", 7.0)]


def test_sum_is_divided_by_the_samples_as_a_recipe_divides_it() -> None:
    """Two samples of two tokens each give four elements."""
    session: Any = Notes()
    logits = torch.zeros(4, 3, requires_grad=True)
    LossObserver(session).around_loss(F.cross_entropy, logits, LABELS, reduction="sum")
    kept = int((LABELS != -100).sum())
    assert [loss.loss for loss in session.written] == pytest.approx([kept * math.log(3) / 2])
    assert [loss.divisor for loss in session.written] == [None]
