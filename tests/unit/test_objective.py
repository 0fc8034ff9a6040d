"""What a run is for, and which of two values is better."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.objective import Best, Objective

NAN = float("nan")


@pytest.mark.parametrize("text", ["accuracy:max", "rmse:min", "f1/macro:max"])
def test_an_objective_is_read_as_it_is_written(text: str) -> None:
    """As on the command line and in a run's `config.json`."""
    assert str(Objective.parse(text)) == text
    assert Objective.parse(text).best_key == f"val/best_{text.partition(':')[0]}"


@pytest.mark.parametrize("text", ["", "accuracy", ":max", "accuracy:", "accuracy:more", "a:max:b"])
def test_anything_else_is_a_sentence(text: str) -> None:
    """With an example of what would do."""
    with pytest.raises(UserError, match="accuracy:max"):
        Objective.parse(text)


def test_more_or_less_is_better() -> None:
    """Also below zero; NaN is never good."""
    most, least = Objective.parse("score:max"), Objective.parse("rmse:min")
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


def test_best_is_the_first_of_the_best() -> None:
    """One as good is no better, and NaN never is; a resumed run counts on."""
    best, took = Best(Objective.parse("rmse:min")), []
    for step, value in enumerate([NAN, 3.0, 2.0, 2.0, NAN, 2.5]):
        took.append(best.improves(value, step))
    assert took == [False, True, True, False, False, False]
    assert (best.value, best.step, best.later) == (2.0, 2, 3)
    again = Best(best.objective)
    again.load_state_dict(best.state_dict())
    assert again == best
    assert again.improves(1.0, 9)
    assert (again.value, again.step, again.later) == (1.0, 9, 0)
