"""The check of figures, on made-up observations, and the recomputation of evaluations."""

from __future__ import annotations

import json
import math
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch.nn import functional as F

from common.metric_names import THROUGHPUT
from common.tools.prove.checks.figures import (
    checked_evaluations,
    checked_mode,
    checked_rows,
    checked_speeds,
    verdict_of,
)
from common.tools.prove.instruments.loss_calls import LossCall
from common.tools.prove.recomputation.checked_figures import CheckedFigures, coverage_in_words
from common.tools.prove.recomputation.evaluation_figures import compare_figure
from common.tools.prove.recomputation.figure_functions import FIGURE_FUNCTIONS, macro_f1
from common.tools.prove.recomputation.sample_outcomes import SampleOutcome
from common.tools.prove.recomputation.split_passes import SplitPass, split_passes_of
from common.tools.prove.recomputation.training_losses import checked_losses
from common.tools.prove.recomputation.training_metrics import checked_metrics
from common.tools.prove.records.base import ObservedRecord
from common.tools.prove.records.instrument_records import (
    EvaluationLoss,
    LayerInTrainingMode,
    LogInterval,
    TrainingLoss,
)
from common.tools.prove.records.observed_run import ObservedRun
from tests.unit.tools.prove.made_up_records import evaluated, recorded, run_with, started


def outcomes_with(
    losses: Sequence[float], hits: Sequence[float] = (), first_sample: int = 0
) -> list[SampleOutcome]:
    """Return the outcomes of samples with consecutive numbers."""
    outcomes = []
    for number, value in enumerate(losses):
        hit = hits[number] if hits else None
        outcomes.append(SampleOutcome(first_sample + number, loss=value, hit=hit))
    return outcomes


# One process: two batches of 3 samples and one of 1. The mean over samples is 2, over batches 3.
UNEVEN = SplitPass("validation", [[outcomes_with([1, 2, 3]), outcomes_with([1, 0, 1], (), 3),
                                 outcomes_with([6], (), 6)]], calls=1)  # fmt: skip
# Two processes with 2 samples and 1 sample.
RANKS = SplitPass("validation", [[outcomes_with([1, 2])], [outcomes_with([6], (), 2)]], calls=1)


def test_a_correct_figure_is_recognised() -> None:
    assert compare_figure("loss", 2.0, [UNEVEN]).is_correct is True
    assert compare_figure("loss", 3.0, [RANKS]).is_correct is True


@pytest.mark.parametrize(
    ("split_pass", "value", "words"),
    [
        (UNEVEN, fmean([2, 2 / 3, 6]), "mean over batches, not over samples"),
        (UNEVEN, 6.0, "counts only the last batch"),
        (UNEVEN, 2 + 2 / 3 + 6, "added up over batches"),
        (RANKS, (1.5 + 6) / 2, "mean over"),
        (RANKS, 1.5, "only the samples of the first process"),
    ],
)
def test_wrong_means_are_explained(split_pass: SplitPass, value: float, words: str) -> None:
    comparison = compare_figure("loss", value, [split_pass])
    assert comparison.is_correct is False
    assert words in comparison.explanation


@pytest.mark.parametrize("is_weighted", [True, False])
def test_mean_of_perplexities_is_explained(is_weighted: bool) -> None:
    """The perplexity is the exponential of the mean loss, not a mean of exponentials."""
    assert compare_figure("perplexity", math.exp(2), [UNEVEN]).is_correct is True
    figures = [math.exp(mean) for mean in (2, 2 / 3, 6)]
    weights = (3, 3, 1) if is_weighted else (1, 1, 1)
    wrong = sum(map(operator.mul, figures, weights)) / sum(weights)
    comparison = compare_figure("perplexity", wrong, [UNEVEN])
    assert comparison.is_correct is False
    assert "batches" in comparison.explanation


def outcomes_of_classes(pairs: Sequence[tuple[int, int]]) -> list[SampleOutcome]:
    """Return outcomes with these predicted classes and labels, of three classes."""
    return [
        SampleOutcome(number, predicted=predicted, label=label, class_count=3)
        for number, (predicted, label) in enumerate(pairs)
    ]


def test_f1_of_several_classes() -> None:
    """The mean over classes is right, its mean over batches is wrong, and others are unknown."""
    batches = [outcomes_of_classes([(0, 0), (1, 2)]), outcomes_of_classes([(2, 2), (1, 1)])]
    batches[1] = [replace(outcome, sample_index=outcome.sample_index + 2) for outcome in batches[1]]
    split_pass = SplitPass("validation", [batches], calls=1)
    figures = [macro_f1(batch) or 0.0 for batch in batches]
    assert compare_figure("f1", macro_f1(split_pass.outcomes) or 0.0, [split_pass]).is_correct
    assert compare_figure("f1", fmean(figures), [split_pass]).is_correct is False
    assert compare_figure("f1", 0.123, [split_pass]).is_correct is None


def test_loss_with_more_terms_is_unknown() -> None:
    """A loss may have a penalty that no function of torch computes; an accuracy has none."""
    assert compare_figure("loss", 2.5, [UNEVEN]).is_correct is None
    hits = SplitPass("validation", [[outcomes_with([1, 2], [1, 0])]], calls=1)
    comparison = compare_figure("accuracy", 0.75, [hits])
    assert comparison.is_correct is False
    assert comparison.expected == 0.5
    assert compare_figure("beauty", 0.75, [hits]).is_correct is None


def test_sample_that_fills_up_a_batch_counts_once() -> None:
    split_pass = SplitPass(
        "validation", [[[*outcomes_with([1, 2]), *outcomes_with([2], (), 1)]]], calls=1
    )
    assert compare_figure("loss", 1.5, [split_pass]).is_correct is True
    comparison = compare_figure("loss", 5 / 3, [split_pass])
    assert "counts samples twice that only fill up a batch" in comparison.explanation


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.integers(2, 4))
def test_f1_is_that_of_scikit_learn(seed: int, ranks: int, batches: int, classes: int) -> None:
    """F1 and accuracy of generated outcomes, for any division into batches and ranks."""
    draws = random.Random(seed)
    sample = 0
    of_ranks = []
    for _ in range(ranks):
        of_batches = []
        for _ in range(batches):
            batch = []
            for _ in range(draws.randint(1, 4)):
                predicted = draws.randrange(classes)
                label = draws.randrange(classes)
                hit = float(predicted == label)
                batch.append(
                    SampleOutcome(
                        sample, hit=hit, predicted=predicted, label=label, class_count=classes
                    )
                )
                sample += 1
            of_batches.append(batch)
        of_ranks.append(of_batches)
    outcomes = SplitPass("validation", of_ranks, calls=1).outcomes
    labels = [outcome.label for outcome in outcomes]
    predicted_classes = [outcome.predicted for outcome in outcomes]
    expected = f1_score(labels, predicted_classes, average="macro", zero_division=0)
    assert macro_f1(outcomes) == pytest.approx(expected)
    assert FIGURE_FUNCTIONS["accuracy"](outcomes) == fmean(
        float(outcome.hit or 0) for outcome in outcomes
    )


def evaluation_loss(
    samples: Sequence[int], losses: Sequence[float], pass_number: int = 0
) -> EvaluationLoss:
    return EvaluationLoss(
        step=2,
        phase="validation",
        split="validation",
        pass_number=pass_number,
        sample_indices=[*samples],
        function="mse_loss",
        loss=fmean(losses),
        sample_losses=[*losses],
    )


def test_losses_become_passes() -> None:
    """Passes over the split, and several losses of a batch, are told apart."""
    losses = [
        evaluation_loss([0, 1], [1, 1], 5),
        evaluation_loss([0, 1], [4, 4], 5),
        evaluation_loss([2], [7], 5),
        evaluation_loss([2], [8], 5),
        evaluation_loss([0, 1], [3, 3], 6),
    ]
    first, second, third = split_passes_of([losses])
    assert [outcome.loss for outcome in first.outcomes] == [1, 1, 7]
    assert [outcome.loss for outcome in second.outcomes] == [4, 4, 8]
    assert [outcome.loss for outcome in third.outcomes] == [3, 3]
    assert (first.calls, third.calls) == (2, 1)


def test_logged_figures_are_checked(tmp_path: Path) -> None:
    """Each process returns its own mean, and the run averages these means."""
    first = [started(world_size=2), evaluation_loss([0, 2], [1, 2]), evaluated({"loss": 1.5})]
    second = [evaluation_loss([1], [6]), evaluated({"loss": 6.0})]
    row = {"progress/global_step": 2, "val/loss": 3.75}
    run = run_with(first, second, directory=tmp_path, rows=[row])
    (cause,) = checked_evaluations(run).causes
    assert (
        "loss of the validation evaluation after update 2 on 2 processes is 3.75" in cause.sentence
    )
    assert "its samples give 3" in cause.sentence
    # If the loss is not a mean of these outcomes on one process, the check ignores it.
    assert checked_evaluations(run, trusted=()).causes == ()
    right = run_with(first, second, directory=tmp_path, rows=[row | {"val/loss": 3.0}])
    assert checked_evaluations(right).causes == ()


def run_that_records(*factors: float, world_size: int = 1, accumulation: int = 1) -> ObservedRun:
    """Return a run that computes losses, and records a sum of their multiples."""
    ranks: list[list[ObservedRecord]] = []
    for rank in range(world_size):
        records: list[ObservedRecord] = [started(world_size=world_size, accumulation=accumulation)]
        for step, value in enumerate([3.0, 2.0, 1.5]):
            total = 0.0
            for number, factor in enumerate(factors):
                computed = value + rank + number * step
                records.append(
                    TrainingLoss(step=step, function="mse_loss", loss=computed, micro_batch=0)
                )
                total += factor * computed
            records.append(recorded(step, loss=total))
        ranks.append(records)
    return run_with(*ranks)


@pytest.mark.parametrize(
    ("whole", "distributed", "words"),
    [
        ([1.0], [1.0], None),
        ([0.5], [0.5], None),  # half of a squared error
        ([1.0], [2.0], "2 times those that were computed, which is the number of processes"),
        ([1.0], [0.5], "0.5 times those that were computed, which is 1 / the number of processes"),
        ([0.5], [1.0], "2 times those that were computed, which is the number of processes"),
        ([1.0], [1.7], None),  # an unknown factor
        ([1.0, 1.0], [1.0, 1.0], None),  # a sum of two losses
        ([0.3, 0.7], [0.3, 0.7], None),  # which has no constant multiple
        ([1.0, 1.0], [2.0, 2.0], "2 times those that were computed"),
    ],
)
def test_multiples_of_losses_are_explained(
    whole: list[float], distributed: list[float], words: str | None
) -> None:
    """A loss may be a multiple of a computed one, if the multiple does not depend on processes."""
    first = run_that_records(*whole)
    second = run_that_records(*distributed, world_size=2)
    checked = checked_losses(first, second)
    causes = [cause.sentence for cause in checked.causes]
    assert checked.compared_names | checked.unknown_names == {"train/loss"}
    assert len(causes) == (words is not None)
    assert words is None or words in causes[0]


def test_loss_that_is_divided_by_the_accumulation_is_explained() -> None:
    second = run_that_records(0.5, accumulation=2)
    (cause,) = checked_losses(run_that_records(1.0), second).causes
    assert "which is 1 / the number of micro-batches of an update" in cause.sentence


def test_rows_are_means_of_what_was_recorded(tmp_path: Path) -> None:
    """Each row covers two updates, and the metric has different numbers of elements."""
    records: list[ObservedRecord] = [started()]
    for step, loss in enumerate([1.0, 3.0, 5.0, 7.0]):
        records.append(recorded(step, loss=loss, metrics={"hits": (step, step + 1)}))
    rows = [
        {"progress/global_step": 2, "train/loss": 2.0, "train/hits": 1 / 3, "progress/samples": 8},
        {"progress/global_step": 4, "train/loss": 6.0, "train/hits": 5 / 7, "progress/samples": 16},
    ]
    checked = checked_rows(run_with(records, directory=tmp_path, rows=rows))
    assert (checked.causes, checked.compared_count) == ((), 6)
    for name, value in (("train/loss", 6.1), ("train/hits", 0.7), ("progress/samples", 12)):
        wrong = [rows[0], rows[1] | {name: value}]
        (cause,) = checked_rows(run_with(records, directory=tmp_path, rows=wrong)).causes
        assert cause.sentence.startswith(f"{name} of update 4 was logged as")


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_rows_and_summaries_may_have_null_and_a_torn_end(
    data: st.DataObject, tmp_path: Path
) -> None:
    """A run stores NaN and infinities as null. Null for a figure that is finite is wrong."""
    records: list[ObservedRecord] = [started(), evaluation_loss([0, 1], [1, 2])]
    rows: list[dict[str, float | None]] = []
    has_wrong_null = []  # by row
    for step in (2, 4):
        losses = [data.draw(st.sampled_from([1.0, math.nan, math.inf])) for _ in range(2)]
        for update, loss in enumerate(losses, start=step - 2):
            records.append(recorded(update, loss=loss, metrics={"hits": (1.0, 2)}))
        records.append(LogInterval(step=step, previous_step=step - 1, seconds=0.5))
        mean = fmean(losses)
        right = {
            "train/loss": mean if math.isfinite(mean) else None,
            "train/hits": 0.5,
            "progress/samples": 4.0 * step,
            THROUGHPUT: 8.0,
            "val/loss": 1.5,
        }
        nulls = data.draw(st.sets(st.sampled_from([*right])))
        finite = {name for name, value in right.items() if value is not None}
        has_wrong_null.append(bool(nulls & finite - {THROUGHPUT, "val/loss"}))
        logged = {name: None if name in nulls else value for name, value in right.items()}
        rows.append({"progress/global_step": step, **logged})
    value = data.draw(st.sampled_from([1.5, math.nan]))
    records.append(evaluated({"loss": value}))
    records.append(evaluated({"loss": value}, phase="final"))
    summary = {"val/loss": data.draw(st.sampled_from([1.5, None]))}
    run = run_with(records, directory=tmp_path, rows=rows, summary=summary)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    torn = data.draw(st.integers(0, len(json.dumps(rows[-1]))))
    path.write_bytes(whole[: len(whole) - torn])
    is_last_row_whole = torn <= 1  # the line feed alone may be missing
    causes = checked_rows(run).causes
    assert bool(causes) == any(has_wrong_null if is_last_row_whole else has_wrong_null[:1])
    assert all("was logged as nan" in cause.sentence for cause in causes)
    checked_evaluations(run)
    checked_speeds(run)


def test_losses_that_no_function_of_torch_computes_are_not_counted_as_compared() -> None:
    """The check can compute nothing again, so it does not claim to have passed."""
    losses = [recorded(step, loss=3.0 - step) for step in range(3)]
    runs = [run_with([started(), *losses]), run_with([started(world_size=2), *losses])]
    losses_found = checked_losses(*runs)
    assert losses_found.causes == ()
    assert (losses_found.compared_count, losses_found.unknown_names) == (0, {"train/loss"})
    checked = [losses_found, CheckedFigures("means in rows", compared_count=4)]
    verdict = verdict_of(checked, "loss")
    assert verdict.passed is None
    assert verdict.compared == (
        "computed again: 4 means in rows; not checked, as the proof can't tell how to compute "
        "them: train/loss"
    )
    checked.append(CheckedFigures("recorded metrics", compared_count=1))
    assert verdict_of(checked, "loss").passed is True


@pytest.mark.parametrize(
    ("compared", "unknown", "objective", "words"),
    [
        (["val/loss"], [], "loss", ""),
        (
            ["val/loss"],
            ["val/mean_iou", "test/mean_iou"],
            "mean_iou",
            "to compute them: test/mean_iou, val/mean_iou; so this check says nothing about the "
            "objective, mean_iou",
        ),
        (["val/loss"], ["val/mean_iou"], "loss", "to compute them: val/mean_iou"),
        # The objective was computed again on one of the splits.
        (["test/f1"], ["val/f1"], "f1", "to compute them: val/f1"),
        (["val/loss"], ["val/loss"], "loss", "checked only in part: val/loss"),
    ],
)
def test_unchecked_figures_are_named_once(
    compared: list[str], unknown: list[str], objective: str, words: str
) -> None:
    figures = CheckedFigures(
        "figures of evaluations",
        compared_count=len(compared),
        compared_names=frozenset(compared),
        unknown_names=frozenset(unknown),
    )
    text = coverage_in_words([figures, figures], objective)
    if words:
        assert text.endswith((f"; {words}", f"how {words}"))
    else:
        assert ";" not in text


def test_evaluations_name_the_figures_that_they_could_not_check(tmp_path: Path) -> None:
    records = [started(), evaluation_loss([0, 1], [1, 3]), evaluated({"loss": 2.0, "ece": 0.5})]
    checked = checked_evaluations(run_with(records, directory=tmp_path, rows=[]))
    assert checked.causes == ()
    assert checked.compared_names == {"val/loss"}
    assert checked.unknown_names == {"val/ece"}


def trained(*computed: dict[str, float], metrics: dict[str, float]) -> ObservedRun:
    """Return a run of one micro-batch of 4 samples, in which losses were computed."""
    notes = [
        TrainingLoss(step=0, function="f", loss=1.0, micro_batch=0, metrics=means)
        for means in computed
    ]
    sums = {name: (4 * value, 4) for name, value in metrics.items()}
    return run_with([started(), *notes, recorded(0, metrics=sums)])


@pytest.mark.parametrize(
    ("computed", "name", "value", "compared", "is_wrong"),
    [
        ([{"accuracy": 0.75, "error": 0.25}], "accuracy", 0.75, 1, False),
        ([{"accuracy": 0.75, "error": 0.25}], "error_rate", 0.25, 1, False),
        ([{"accuracy": 0.75}], "accuracy", 0.25, 1, True),
        ([{"mse": 2.0, "mae": 1.0}], "mae", 1.002, 1, False),  # in bf16
        ([{"mse": 2.0, "mae": 1.0}], "mae", 2.0, 1, True),
        ([{"accuracy": 0.75}], "beauty", 0.25, 0, False),
        ([], "accuracy", 0.25, 0, False),
        ([{"accuracy": 0.75}, {"accuracy": 0.5}], "accuracy", 0.5, 1, False),
        ([{"accuracy": 0.75}, {"accuracy": 0.5}], "accuracy", 0.25, 0, False),
    ],
)
def test_metrics_of_training_are_computed_again(
    computed: list[dict[str, float]], name: str, value: float, compared: int, is_wrong: bool
) -> None:
    checked = checked_metrics(trained(*computed, metrics={name: value}))
    assert checked.compared_count == compared
    assert (checked.compared_names if compared else checked.unknown_names) == {f"train/{name}"}
    assert bool(checked.causes) == is_wrong
    expected = f"recorded {name} {value:.6g} in update 1"
    assert all(expected in cause.sentence for cause in checked.causes)


def test_outputs_of_a_micro_batch_give_means() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    means = LossCall(F.cross_entropy, logits, labels).metrics()
    assert means == {"accuracy": 0.75, "error": 0.25}
    errors = LossCall(F.mse_loss, torch.tensor([1.0, 3.0]), torch.zeros(2)).metrics()
    assert errors == {"mse": 5.0, "mae": 2.0}
    soft = LossCall(F.cross_entropy, logits, torch.full((4, 2), 0.5)).metrics()
    assert soft == {}, "mixed labels have no right class"


@pytest.mark.parametrize("ignored", [-100, 0, 2])
def test_losses_with_ignored_labels_are_not_computed_again(ignored: int) -> None:
    """A batch's loss is then not the mean over its samples, whichever label the recipe ignores."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    named: dict[str, object] = {"ignore_index": ignored}
    for labels in (torch.tensor([1, ignored]), torch.tensor([1, 1])):
        call = LossCall(F.cross_entropy, logits, labels, named=named)
        is_ignored = ignored in labels.tolist()
        assert (call.losses_of_samples() is None) == is_ignored
        assert (call.metrics() == {}) == is_ignored


def test_accuracy_of_several_binary_outputs_is_unknown() -> None:
    """It may be the share of right outputs, or of samples whose outputs are all right."""
    for function in (F.binary_cross_entropy_with_logits, F.binary_cross_entropy):
        for shape in ((4,), (4, 1)):
            call = LossCall(function, torch.full(shape, 0.9), torch.ones(shape))
            assert call.metrics()["accuracy"] == 1.0
        several = LossCall(function, torch.full((4, 2), 0.9), torch.ones(4, 2))
        assert several.metrics() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_give_large_means(value: float) -> None:
    """A model that diverges must not make its observation fail."""
    means = LossCall(F.mse_loss, torch.tensor([value, value]), torch.zeros(2)).metrics()
    assert {name: abs(mean) for name, mean in means.items()} == {"mse": 1e150, "mae": 1e150}


def test_training_mode_is_named() -> None:
    notes = [
        LayerInTrainingMode(step=2, phase="validation", split="validation", layer_class=layer)
        for layer in ("Dropout", "BatchNorm1d")
    ]
    (cause,) = checked_mode(run_with(notes)).causes
    assert "act as in training: BatchNorm1d, Dropout" in cause.sentence


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.0, False), (1.05, False), (1.5, True)])
def test_speed_is_compared_with_the_clock(factor: float, is_wrong: bool, tmp_path: Path) -> None:
    """Two updates of 4 samples take 0.5 s: 16 samples a second."""
    notes = [LogInterval(step=step, previous_step=step - 2, seconds=0.5) for step in (4, 6, 8, 10)]
    rows = [
        {"progress/global_step": step, "perf/samples_per_second": 16.0 * factor}
        for step in (4, 6, 8, 10)
    ]
    run = run_with([started(), *notes], directory=tmp_path, rows=rows)
    assert bool(checked_speeds(run).causes) == is_wrong
