"""The check of samples, on made-up observations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.tools.prove.checks.evaluation_samples import (
    counts_of_elements,
    element_counts_in_words,
)
from common.tools.prove.checks.samples import causes_of
from common.tools.prove.checks.training_samples import completed_epochs
from common.tools.prove.records.base import ObservedRecord
from common.tools.prove.records.instrument_records import (
    EvaluatedSamples,
    MissingSamples,
    UnusedSamples,
)
from common.tools.prove.records.observed_run import ObservedRun
from tests.unit.tools.prove.made_up_records import (
    evaluated,
    evaluation_batch,
    micro_batch,
    recorded,
    run_with,
    started,
)

# Two epochs of two updates of 4 samples out of 10: two samples are dropped in each.
EPOCHS = (
    (0, 0, (0, 1, 2, 3)),
    (1, 0, (4, 5, 6, 7)),
    (2, 1, (9, 8, 7, 6)),
    (3, 1, (5, 4, 3, 2)),
)


def training(updates: Sequence[tuple[int, int, Sequence[int]]] = EPOCHS) -> list[ObservedRecord]:
    """Return the records of updates: number, epoch and samples."""
    records: list[ObservedRecord] = [started()]
    for step, epoch, samples in updates:
        records += [micro_batch(step, samples=samples, epoch=epoch), recorded(step)]
    return records


def sentences(run: ObservedRun, reference: ObservedRun | None = None) -> list[str]:
    """Return the sentences about a run, which is also the reference run by default."""
    element_counts = counts_of_elements(reference or run)
    return [cause.sentence for cause in causes_of(run, element_counts)]


def test_right_run_has_no_causes() -> None:
    """One process uses each sample once an epoch, and evaluates all samples."""
    evaluation = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4]), evaluated({"count": 5})]
    assert sentences(run_with([*training(), *evaluation])) == []


def test_sample_that_comes_twice_is_named() -> None:
    updates = [*EPOCHS[:3], (3, 1, (5, 4, 3, 9))]
    (sentence,) = sentences(run_with(training(updates)))
    assert sentence == "epoch 2 used 1 training samples more than once (9)"


def test_missing_samples_are_counted() -> None:
    """An epoch may leave out only an incomplete batch."""
    updates = [*EPOCHS[:3], (3, 1, (5, 4, 3))]
    (sentence,) = sentences(run_with(training(updates)))
    assert "epoch 2 used 7 of 10 training samples, and only 2 may be left out" in sentence


def rank_of_two(updates: Sequence[tuple[int, int, Sequence[int]]]) -> list[ObservedRecord]:
    """Return the records of one of two processes, each with 2 of the 4 samples of an update."""
    records: list[ObservedRecord] = [started(batch_size=2, world_size=2)]
    for step, epoch, samples in updates:
        records += [micro_batch(step, samples=samples, epoch=epoch), recorded(step)]
    return records


def test_samples_of_a_whole_epoch_are_counted_over_ranks() -> None:
    first = rank_of_two([(0, 0, (0, 1)), (1, 0, (4, 5))])
    second = [(0, 0, (2, 3)), (1, 0, (6, 7))]
    right = run_with(first, rank_of_two(second))
    assert sentences(right) == []
    assert completed_epochs(right) == [0]
    fewer = run_with(first, rank_of_two([second[0], (1, 0, (6,))]))
    assert "epoch 1 used 7 of 10 training samples" in sentences(fewer)[0]
    again = run_with(first, rank_of_two([second[0], (1, 0, (2, 3))]))
    assert sentences(again) == ["epoch 1 used 2 training samples more than once (2, 3)"]
    short = run_with(rank_of_two([(0, 0, (0, 1))]), rank_of_two(second[:1]))
    assert completed_epochs(short) == [], "the second update of the epoch is missing"


def test_epoch_that_was_interrupted_may_be_incomplete() -> None:
    assert sentences(run_with(training(EPOCHS[:3]))) == []


def test_repeated_update_counts_once() -> None:
    """After a kill, a run repeats some updates. Only the last executions count."""
    run = run_with(training(EPOCHS[:2]), later=[training(EPOCHS[1:])])
    assert sentences(run) == []


def test_update_repeated_with_other_samples_is_named() -> None:
    again = [(1, 0, (4, 5, 6, 8)), *EPOCHS[2:]]
    run = run_with(training(EPOCHS[:2]), later=[training(again)])
    assert "update 2 used the samples 4, 5, 6, 7" in sentences(run)[0]
    assert "after the resume 4, 5, 6, 8" in sentences(run)[0]


def test_batch_that_is_not_recorded_is_named() -> None:
    records: list[ObservedRecord] = [
        started(),
        micro_batch(0),
        micro_batch(0, samples=(4, 5, 6, 7)),
    ]
    run = run_with([*records, recorded(0)])
    assert "took a batch for update 1 and did not record it: 4 samples" in sentences(run)[0]


def test_batch_in_which_a_run_was_killed_need_not_be_recorded() -> None:
    first = [*training(EPOCHS[:1]), micro_batch(1, samples=(4, 5, 6, 7))]
    assert sentences(run_with(first, later=[training(EPOCHS[1:])])) == []


def test_ranks_share_an_evaluation() -> None:
    """All ranks together read each sample once."""
    first = [*training(), evaluation_batch([0, 2, 4]), evaluated({"count": 5})]
    second = [evaluation_batch([1, 3]), evaluated({"count": 5})]
    assert sentences(run_with(first, second)) == []
    (sentence,) = sentences(run_with(first, second[1:]))
    assert "read 3 of the 5 samples of validation" in sentence


@pytest.mark.parametrize("count", [6.0, None])
def test_padding_that_counts_is_named(count: float | None) -> None:
    """A sample that only fills up a batch counts; without a count, this is unknown."""
    figures = {} if count is None else {"count": count}
    batches = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4, 4])]
    (sentence,) = sentences(run_with([*training(), *batches, evaluated(figures)]))
    assert "twice or more (4)" in sentence
    assert ("counted 6 samples, and validation has 5" in sentence) == (count is not None)


EACH_SAMPLE_ONCE = ((0, 1, 2), (3, 4))
PASSES = {
    "once": EACH_SAMPLE_ONCE,
    "twice": (*EACH_SAMPLE_ONCE, *EACH_SAMPLE_ONCE),
    "with padding": ((0, 1, 2), (3, 4, 4)),
}


def run_that_counts(count: float, passes: str = "once") -> ObservedRun:
    """Return a run of an evaluation of 5 samples that logs a count."""
    batches = [evaluation_batch(samples) for samples in PASSES[passes]]
    return run_with([*training(), *batches, evaluated({"count": count})])


@pytest.mark.parametrize("passes", ["once", "twice"])
@pytest.mark.parametrize("count", [3, 52])
def test_count_of_elements_is_right(count: float, passes: str) -> None:
    """A tagger counts the labels that it does not ignore, and the check says so."""
    run = run_that_counts(count, passes)
    assert sentences(run) == []
    remark = element_counts_in_words(counts_of_elements(run))
    assert f"`count` of validation is {count:g}, so it counts elements of its samples" in remark


def test_count_of_samples_has_no_remark() -> None:
    assert element_counts_in_words(counts_of_elements(run_that_counts(5))) == ""


@pytest.mark.parametrize(
    ("count", "passes", "words"),
    [
        (52, "with padding", "it read 1 sample twice or more (4): samples that only fill up"),
        (6, "with padding", "it read 1 sample twice or more (4): samples that only fill up"),
        (3.5, "once", "counted 3.5 samples, and validation has 5"),
        (10, "twice", "counted 10 samples, and validation has 5, each of which it read 2 times"),
    ],
)
def test_wrong_count_is_named(count: float, passes: str, words: str) -> None:
    """Only samples that were read too often are said to fill up a batch."""
    (sentence,) = sentences(run_that_counts(count, passes))
    assert words in sentence


def test_a_count_of_samples_holds_on_all_processes() -> None:
    """If one process counts samples, another count on two processes is a mistake."""
    (sentence,) = sentences(run_that_counts(2.5), reference=run_that_counts(5))
    assert "counted 2.5 samples, and validation has 5, each of which it read once" in sentence
    assert sentences(run_that_counts(50), reference=run_that_counts(52)) == []


def test_padding_under_a_mask_is_right() -> None:
    batches = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4, 4])]
    assert sentences(run_with([*training(), *batches, evaluated({"count": 5})])) == []


def test_several_passes_over_a_split_are_right() -> None:
    """A final evaluation may evaluate two models."""
    batches = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4])]
    run = run_with([*training(), *batches, *batches, evaluated({"count": 5})])
    assert sentences(run) == []


def test_evaluation_that_was_interrupted_is_left_out() -> None:
    first = [*training(EPOCHS[:2]), evaluation_batch([0, 1, 2])]
    assert sentences(run_with(first, later=[training(EPOCHS[2:])])) == []


def test_rows_that_the_model_does_not_get_are_named() -> None:
    run = run_with([*training(), MissingSamples(step=0, received_count=3, sample_count=4)])
    assert (
        "the model gets only 3 of the 4 samples of a batch, first in update 1" in sentences(run)[0]
    )


def test_position_without_gradients_is_named() -> None:
    """A position of the batch that never has a gradient, unlike one that has none by chance."""
    rows = [
        UnusedSamples(step=step, sample_count=4, unused_positions=[3, step]) for step in range(3)
    ]
    (sentence,) = sentences(run_with([*training(), *rows]))
    assert "does not depend on 1 of the 4 samples of a batch" in sentence
    assert sentence.endswith("(4)")
    by_chance = [
        UnusedSamples(step=step, sample_count=4, unused_positions=[step]) for step in range(3)
    ]
    assert sentences(run_with([*training(), *by_chance])) == []


def rows_of_evaluation(unseen: Sequence[int], samples: int = 5) -> EvaluatedSamples:
    return EvaluatedSamples(
        step=2,
        phase="validation",
        split="validation",
        sample_count=samples,
        unseen_indices=[*unseen],
        batch_count=2,
        model_calls=2,
    )


@pytest.mark.parametrize("unseen", [[4], [0, 1, 2, 3]])
def test_samples_that_an_evaluation_leaves_out_are_named(unseen: list[int]) -> None:
    evaluation = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4]), evaluated({})]
    (sentence,) = sentences(run_with([*training(), *evaluation, rows_of_evaluation(unseen)]))
    listed = ", ".join(map(str, unseen))
    assert f"did not pass {len(unseen)} of them to the model ({listed})" in sentence


@pytest.mark.parametrize("unseen", [[], [0, 1, 2, 3, 4]])
def test_evaluation_that_passes_all_or_changed_samples_is_right(unseen: list[int]) -> None:
    """If the model gets none of the values, the recipe changes them, which is no mistake."""
    evaluation = [evaluation_batch([0, 1, 2]), evaluation_batch([3, 4]), evaluated({})]
    assert sentences(run_with([*training(), *evaluation, rows_of_evaluation(unseen)])) == []


@pytest.mark.parametrize(
    ("splits", "is_right"),
    [
        (("train",), False),
        (("train", "test"), False),
        (("train", "validation"), True),
        (("",), True),  # a loader of the recipe's own
        (("train", ""), True),
        ((), True),  # no loader at all
    ],
)
def test_evaluation_of_another_split_is_named(splits: tuple[str, ...], is_right: bool) -> None:
    batches = [
        evaluation_batch([0, 1, 2, 3, 4]).model_copy(update={"split": split}) for split in splits
    ]
    causes = sentences(run_with([*training(), *batches, evaluated({})]))
    if is_right:
        assert causes == []
    else:
        (sentence,) = causes
        assert "stands for the split validation, but read only" in sentence
        assert all(split in sentence for split in splits)
