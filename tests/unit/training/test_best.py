"""The best evaluation: equal values, ties by loss, and a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.objective import Objective
from common.training.evaluation.best import Best

NAN = float("nan")


def test_best_is_the_last_of_equal_values() -> None:
    """NaN is never the best, and a resumed run continues the count."""
    best = Best(Objective.parse("rmse:min"))
    assert best.step is None
    again = Best(best.objective)
    again.load_state_dict(best.state_dict())
    assert again == best
    improvements = []
    for step, value in enumerate([NAN, 3.0, 2.0, 2.0, NAN, 2.5]):
        improvements.append(best.consider(value, step))
    assert improvements == [False, True, True, True, False, False]
    assert (best.value, best.step, best.evaluations_since_best) == (2.0, 3, 3)
    again = Best(best.objective)
    again.load_state_dict(best.state_dict())
    assert again == best
    assert again.consider(1.0, 9)
    assert (again.value, again.step, again.evaluations_since_best) == (1.0, 9, 0)


def test_ties_are_broken_by_loss() -> None:
    """The lower loss wins, then the later step. NaN is not lower."""
    best = Best(Objective.parse("accuracy:max"))
    improvements = []
    for step, loss in enumerate([0.354, 0.1, 0.2, 0.1, NAN, None]):
        improvements.append(best.consider(1.0, step, loss))
    assert improvements == [True, True, False, True, False, False]
    assert (best.step, best.evaluations_since_best, best.loss) == (3, 5, 0.1)


def test_checkpoint_without_the_best_model_is_refused(tmp_path: Path) -> None:
    """The message names the file that should list the model."""
    best = Best(Objective.parse("accuracy:max"))
    best.require_best_model([], tmp_path)  # nothing was evaluated yet
    best.consider(1.0, 8)
    best.require_best_model(["best-00000008.safetensors"], tmp_path)
    message = r"manifest\.json does not list the best model, .* called best-00000008: restore"
    with pytest.raises(UserError, match=message):
        best.require_best_model(["best-00000004.safetensors"], tmp_path)
