"""The end of a run by `--early-stopping`."""

from __future__ import annotations

import pytest

from common.config import TrainingConfig
from common.errors import UserError
from common.objective import Objective
from common.training.evaluation.best import Best
from common.training.evaluation.early_stopping import EarlyStopping


def test_run_ends_after_evaluations_without_improvement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An equal value is not an improvement. The line is printed once."""
    best = Best(Objective.parse("accuracy:max"))
    early_stopping = EarlyStopping(TrainingConfig(early_stopping=2), best, "validation")
    due = []
    for step, value in enumerate([0.1, 0.3, 0.2, 0.3], start=1):
        best.consider(value, step)
        due.append(early_stopping.decide(step))
    assert due == [False, False, False, True]
    assert early_stopping.decide(4)
    line = "stopped early after update 4, because accuracy did not improve in 2 evaluations"
    assert capsys.readouterr().out.count(line) == 1


def test_resumed_run_decides_as_before() -> None:
    """The count is part of the best evaluation's state in a checkpoint."""
    best = Best(Objective.parse("accuracy:max"))
    best.load_state_dict({"value": 0.3, "step": 4, "later": 2, "loss": None})
    assert EarlyStopping(TrainingConfig(early_stopping=2), best, "validation").decide(6)
    assert not EarlyStopping(TrainingConfig(early_stopping=3), best, "validation").decide(6)


def test_without_the_flag_no_run_ends_early() -> None:
    """No validation split is needed, either."""
    best = Best(Objective.parse("accuracy:max"), evaluations_since_best=99)
    assert not EarlyStopping(TrainingConfig(), best, "test").decide(100)


def test_early_stopping_on_test_data_is_refused() -> None:
    """Without validation data, the flag is refused before training starts."""
    best = Best(Objective.parse("accuracy:max"))
    with pytest.raises(UserError, match="test data must not decide when to stop"):
        EarlyStopping(TrainingConfig(early_stopping=2), best, "test")


def test_model_trained_with_early_stopping_can_be_evaluated_on_test_data() -> None:
    """`--evaluate-only` takes the flags of the model's run, and does not refuse them."""
    best = Best(Objective.parse("accuracy:max"))
    early_stopping = EarlyStopping(
        TrainingConfig(early_stopping=2, evaluate_only=True), best, "test"
    )
    assert not early_stopping.decide(1)
