"""Values that a recipe measures are numbers, or a sentence names the call and the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.measure.sums import Sums
from common.measure.training_sums import TrainingSums
from common.measure.value_checks import figure
from tests.ranks import alone


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.tensor(1j)])
def test_metric_that_is_no_number_is_refused(value: Any) -> None:
    """The message names the call and the metric."""
    with pytest.raises(UserError, match=r"run.record got 'kl' as a"):
        TrainingSums(torch.device("cpu"), 1).add(torch.tensor(1.0), {"kl": value})
    with pytest.raises(UserError, match=r"sums.add got 'kl' as a"):
        Sums(alone()).add(1, kl=value)
    with pytest.raises(UserError, match=r"sums.record got 'kl' as a"):
        Sums(alone()).record(0.5, {"kl": value}, 1)


@pytest.mark.parametrize(
    ("value", "words", "advice"),
    [
        (torch.ones(3), "of type Tensor of shape (3,) as 'x'", ", such as value.mean()"),
        (np.ones((2, 2)), "of type ndarray of shape (2, 2) as 'x'", ", such as value.mean()"),
        ("good", "of type str as 'x' instead", ""),
        (None, "of type NoneType as 'x' instead", ""),
    ],
)
def test_figure_that_is_no_number_is_refused(value: Any, words: str, advice: str) -> None:
    """Only tensors and arrays have a mean."""
    with pytest.raises(UserError) as refused:
        figure("x", value)
    assert words in refused.value.problem
    assert refused.value.advice == f"return one number for each name{advice}"
