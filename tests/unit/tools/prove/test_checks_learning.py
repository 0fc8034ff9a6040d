"""The check `learns`, on made-up evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.objective import Objective
from common.tools.prove.bench import RunSpec
from common.tools.prove.checks.learning import answer
from common.tools.prove.observation import AnyObserved, ObservedLaunch, ObservedRun
from tests.unit.tools.prove.observed import evaluated, run, started


class MadeUpBench:
    """Has a reference run and a longer run with made-up accuracies."""

    def __init__(self, short: Sequence[float], longer: Sequence[float], flags: dict[str, Any]):
        self.recipe = SimpleNamespace(objective=Objective("accuracy", "max"))
        self.flags = SimpleNamespace(flags=flags)
        self.reference = observed_run(short)
        self.longer = observed_run(longer)
        self.specs: list[RunSpec] = []

    def run(self, spec: RunSpec) -> ObservedRun:
        self.specs.append(spec)
        return self.longer


def observed_run(accuracies: Sequence[float]) -> ObservedRun:
    """Return a run whose first accuracy is that before training."""
    records: list[AnyObserved] = [started()]
    for number, accuracy in enumerate(accuracies):
        phase = "validation" if number else "rehearsal"
        records.append(evaluated(number, accuracy, phase))
    return run(ObservedLaunch(0, 0, tuple(records)))


@pytest.mark.parametrize(
    ("short", "longer", "passed", "compared"),
    [
        ([0.3, 0.5, 0.4], [], True, "0.3 before training, 0.5 after 1 updates"),
        ([0.3, 0.3, 0.2], [0.3, 0.3, 0.6], True, "0.3 before training, 0.6 after 2 updates"),
        ([0.3, 0.2, 0.1], [0.3, 0.3, 0.2], False, "0.3 before training, 0.3 after 1 updates"),
        ([0.3, float("nan")], [0.3, float("nan")], False, "accuracy on 9 samples of validation"),
        ([0.3], [], False, "accuracy on 9 samples of validation"),
        ([], [], None, "no evaluation before the first update"),
    ],
)
def test_only_a_longer_run_shows_that_a_recipe_does_not_learn(
    short: list[float], longer: list[float], passed: bool | None, compared: str
) -> None:
    bench: Any = MadeUpBench(short, longer, {"--epochs": ["3"]})
    verdict = answer(bench)
    assert verdict.passed is passed
    assert compared in verdict.compared
    expected = [RunSpec("longer", ("--epochs", "12"))] if longer else []
    assert bench.specs == expected


def test_a_run_limited_by_steps_gets_more_steps() -> None:
    bench: Any = MadeUpBench([0.3, 0.3], [0.3, 0.4], {"--max-steps": ["9"]})
    assert answer(bench).passed
    assert bench.specs == [RunSpec("longer", ("--max-steps", "36"))]
