"""The check `learns`, on made-up evaluations, and its margins, on simulated models that guess."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.objective import Objective
from common.tools.prove.checks.learning import judge_learning, learning_spec
from common.tools.prove.proof_runs.bench import RunSpec
from common.tools.prove.recomputation.margins import (
    LONGER_STANDARD_ERRORS,
    STANDARD_ERRORS,
    ObjectiveValue,
    improvement,
)
from common.tools.prove.recomputation.sample_outcomes import SampleOutcome
from common.tools.prove.recomputation.split_passes import SplitPass
from common.tools.prove.records.base import ObservedRecord, Phase
from common.tools.prove.records.observed_run import ObservedRun
from tests.unit.tools.prove.made_up_records import evaluated, run_with, started

ACCURACY = Objective("accuracy", "max")
SAMPLES = 400
EXPERIMENTS = 400
MARGINS = (STANDARD_ERRORS, LONGER_STANDARD_ERRORS)  # in the first run and in the longer run
MAX_PASSES = 0.05  # the share of models that guess and may pass


class MadeUpBench:
    """A bench with made-up accuracies of a first run and a longer run."""

    def __init__(self, short: Sequence[float], longer: Sequence[float], flags: dict[str, Any]):
        self.recipe = SimpleNamespace(objective=ACCURACY)
        self.flags = SimpleNamespace(values=flags)
        self.runs = {"learning": observed_run(short), "longer": observed_run(longer)}
        self.specs: list[RunSpec] = []

    def run(self, spec: RunSpec) -> ObservedRun:
        self.specs.append(spec)
        return self.runs[spec.name]


def observed_run(accuracies: Sequence[float]) -> ObservedRun:
    """Return a run whose first accuracy is that before training."""
    records: list[ObservedRecord] = [started(evaluation_samples=SAMPLES)]
    for number, accuracy in enumerate(accuracies):
        phase: Phase = "validation" if number else "rehearsal"
        records.append(evaluated({"accuracy": accuracy}, number, phase))
    return run_with(records)


@pytest.mark.parametrize(
    ("short", "longer", "passed", "compared"),
    [
        ([0.3, 0.4, 0.5], [], True, "0.3 before training, 0.5 after 2 updates"),
        # The last model counts, not the best one.
        ([0.3, 0.5, 0.3], [0.3, 0.5, 0.31], False, "0.3 before training, 0.31 after 2 updates"),
        ([0.3, 0.3, 0.2], [0.3, 0.3, 0.6], True, "0.3 before training, 0.6 after 2 updates"),
        ([0.3, 0.2, 0.1], [0.3, 0.3, 0.2], False, "0.3 before training, 0.2 after 2 updates"),
        # Two standard errors are 0.065.
        ([0.3, 0.36], [0.3, 0.36], False, "0.3 before training, 0.36 after 1 updates (margin: 0.0"),
        ([0.3, float("nan")], [0.3, float("nan")], False, "accuracy on 400 samples of validation"),
        ([0.3], [0.3], False, "accuracy on 400 samples of validation"),
        ([], [], None, "no evaluation before the first update"),
    ],
)
def test_only_a_longer_run_shows_that_a_recipe_does_not_learn(
    short: list[float], longer: list[float], passed: bool | None, compared: str
) -> None:
    bench: Any = MadeUpBench(short, longer, {"--epochs": ["3"]})
    verdict = judge_learning(bench)
    assert verdict.passed is passed
    assert compared in verdict.compared
    if short == [0.3]:  # longer training would not help
        assert verdict.advice.startswith("return the objective from each evaluation; if you pass")
    expected = [learning_spec("learning")]
    if longer:
        expected.append(learning_spec("longer", ("--epochs", "12")))
    assert bench.specs == expected


def test_a_run_limited_by_steps_gets_more_steps() -> None:
    bench: Any = MadeUpBench([0.3, 0.3], [0.3, 0.5], {"--max-steps": ["9"]})
    assert judge_learning(bench).passed
    assert bench.specs[1] == learning_spec("longer", ("--max-steps", "36"))


def test_final_evaluation_may_be_of_the_best_model() -> None:
    """Without a test split, it is on the validation split. The last model was evaluated before."""
    last = observed_run([0.3, 0.5, 0.3])
    (process,) = last.processes
    records = (*process.records, evaluated({"accuracy": 0.5}, 2, "final"))
    bench: Any = MadeUpBench([], [0.3, 0.3], {"--epochs": ["3"]})
    bench.runs["learning"] = run_with(records)
    assert judge_learning(bench).passed is False


def split_pass_of(hits: Sequence[bool], losses: Sequence[float] = ()) -> SplitPass:
    """Return a pass over samples, all in one batch."""
    rows = [
        SampleOutcome(number, hit=float(hit), loss=losses[number] if losses else None)
        for number, hit in enumerate(hits)
    ]
    return SplitPass("validation", [[rows]], calls=1)


def objective_value(hits: Sequence[bool], *, is_paired: bool) -> ObjectiveValue:
    value = sum(hits) / len(hits)
    return ObjectiveValue(value, len(hits), [split_pass_of(hits)] if is_paired else [])


@pytest.mark.parametrize(
    ("samples", "share", "changed", "is_paired"),
    [
        (73, 0.1, 1.0, True),
        (73, 0.1, 1.0, False),
        (73, 0.5, 0.05, True),
        (360, 0.1, 1.0, True),
        (360, 0.1, 0.05, True),
        (360, 0.5, 1.0, False),
    ],
)
def test_a_guesser_rarely_passes(
    samples: int, share: float, changed: float, is_paired: bool
) -> None:
    """If training changes guesses at random, the model rarely passes in either run.

    Args:
        share: the share of correct guesses.
        changed: the share of samples for which training draws a new guess.
    """
    draws = random.Random(0)
    passes = 0
    for _ in range(EXPERIMENTS):
        before = [draws.random() < share for _ in range(samples)]
        results = []
        for errors in MARGINS:
            after = [draws.random() < share if draws.random() < changed else hit for hit in before]
            results.append(
                improvement(
                    ACCURACY,
                    objective_value(before, is_paired=is_paired),
                    objective_value(after, is_paired=is_paired),
                    errors,
                ).is_enough
            )
        passes += any(results)
    assert passes / EXPERIMENTS <= MAX_PASSES


@pytest.mark.parametrize("samples", [73, 360])
def test_a_loss_that_changes_at_random_rarely_passes(samples: int) -> None:
    draws = random.Random(0)
    objective = Objective("loss", "min")
    passes = 0
    for _ in range(EXPERIMENTS):
        before, *later_losses = ([draws.expovariate(1.0) for _ in range(samples)] for _ in range(3))
        first = value_of_losses(before)
        improvements = [
            improvement(objective, first, value_of_losses(after), errors)
            for after, errors in zip(later_losses, MARGINS, strict=True)
        ]
        assert "paired samples" in improvements[0].basis
        passes += any(each.is_enough for each in improvements)
    assert passes / EXPERIMENTS <= MAX_PASSES


def value_of_losses(losses: Sequence[float]) -> ObjectiveValue:
    hits = [False] * len(losses)
    return ObjectiveValue(sum(losses) / len(losses), len(losses), [split_pass_of(hits, losses)])


def test_pairs_show_smaller_improvements() -> None:
    """8 more of 73 samples are correct after training, and none is newly wrong."""
    before = [number < 30 for number in range(73)]
    after = [number < 38 for number in range(73)]
    for is_paired in (True, False):
        first, second = (objective_value(hits, is_paired=is_paired) for hits in (before, after))
        assert (
            improvement(ACCURACY, first, second, standard_errors=STANDARD_ERRORS).is_enough
            is is_paired
        )
        assert not improvement(ACCURACY, second, first, standard_errors=STANDARD_ERRORS).is_enough


def test_objective_of_another_kind_needs_a_relative_margin() -> None:
    objective = Objective("frechet", "min")
    before = ObjectiveValue(60.0, SAMPLES, split_passes=())
    assert not improvement(
        objective,
        before,
        ObjectiveValue(55.0, SAMPLES, split_passes=()),
        standard_errors=STANDARD_ERRORS,
    ).is_enough
    better = improvement(
        objective,
        before,
        ObjectiveValue(50.0, SAMPLES, split_passes=()),
        standard_errors=STANDARD_ERRORS,
    )
    assert better.is_enough
    assert "10% of the value before training" in better.basis


def test_outcomes_that_do_not_give_the_figure_are_not_paired() -> None:
    """A recipe's own accuracy may not be the mean of these hits."""
    hits = [True, False, False, False]
    own = ObjectiveValue(0.9, 4, [split_pass_of(hits)])
    assert (
        "standard errors of a share"
        in improvement(ACCURACY, own, own, standard_errors=STANDARD_ERRORS).basis
    )
