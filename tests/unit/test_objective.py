"""What a run is for, and which of two values is better."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from common.objective import Objective

NAN = float("nan")


@pytest.mark.parametrize("text", ["accuracy:max", "rmse:min", "f1/macro:max"])
def test_an_objective_is_read_as_it_is_written(text: str) -> None:
    """As on the command line and in a run's `config.json`."""
    assert str(Objective.parse(text)) == text
    assert Objective.parse(text).best_key == f"val/best_{text.partition(':')[0]}"


@pytest.mark.parametrize(
    "text",
    ["", "accuracy", ":max", "accuracy:", "accuracy:more", "a:max:b", None, ("accuracy", "max")],
)
def test_anything_else_is_a_sentence(text: Any) -> None:
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
