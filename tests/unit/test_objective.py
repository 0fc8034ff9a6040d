"""Objectives: parsing them, and comparing values."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import TrainingError, UserError
from common.objective import Objective

NAN = float("nan")


@pytest.mark.parametrize("text", ["accuracy:max", "rmse:min", "f1/macro:max"])
def test_objective_survives_a_round_trip(text: str) -> None:
    """The form is that of the command line and of `config.json`."""
    assert str(Objective.parse(text)) == text
    assert Objective.parse(text).best_key == f"val/best_{text.partition(':')[0]}"


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", ":max", "accuracy:", "accuracy:more", "a:max:b", None, ("accuracy", "max")],
)
def test_invalid_objective_gives_one_sentence(text: Any) -> None:
    """The sentence about an invalid objective has an example."""
    with pytest.raises(UserError, match="accuracy:max"):
        Objective.parse(text)


def test_better_value_depends_on_the_direction() -> None:
    """This holds below zero, and NaN is never good."""
    most = Objective.parse("score:max")
    least = Objective.parse("rmse:min")
    assert (most.sign, least.sign) == (1, -1)
    assert most.best([-3.0, NAN, -2.0]) == -2.0
    assert least.best([-3.0, NAN, -2.0]) == -3.0
    assert most.best([NAN]) is least.best([]) is None
    assert most.reaches(-2.0, -2.0)
    assert most.reaches(-1.0, -2.0)
    assert not most.reaches(-3.0, -2.0)
    assert least.reaches(-2.0, -2.0)
    assert least.reaches(-3.0, -2.0)
    assert not least.reaches(-1.0, -2.0)
    assert not most.reaches(NAN, 0.0)
    assert not least.reaches(NAN, 0.0)


@pytest.mark.parametrize("was_trained", [True, False])
def test_missed_target_has_advice_that_can_be_followed(was_trained: bool) -> None:
    """A resume can't train for longer, and an evaluation does not train."""
    objective = Objective.parse("accuracy:max")
    objective.require_target(0.9, 0.9, was_trained=was_trained)
    objective.require_target(NAN, None, was_trained=was_trained)
    with pytest.raises(TrainingError, match=r"0\.8000 is worse than --target 0\.9") as missed:
        objective.require_target(0.8, 0.9, was_trained=was_trained)
    remedy = "start another run that trains for longer" if was_trained else "evaluate another model"
    assert missed.value.advice == f"{remedy}, or pass another --target"
