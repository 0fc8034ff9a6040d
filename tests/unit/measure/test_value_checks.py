"""Values that a recipe measures are numbers, or a sentence names the call and the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.data.samples import Work
from common.errors import UserError
from common.measure.meters import Meters
from common.measure.sums import Sums
from common.measure.training_sums import TrainingSums
from common.measure.value_checks import figure
from tests.ranks import alone


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0.5", "got 'kl' as a value of type str"),
        (None, "got 'kl' as a value of type NoneType"),
        ([1.0], "got 'kl' as a value of type list"),
        (torch.tensor(1j), "got a complex number as the value of 'kl'"),
        (np.array([1j]), "got a complex number as the value of 'kl'"),
        (np.complex128(1j), "got a complex number as the value of 'kl'"),
        (1j, "got a complex number as the value of 'kl'"),
    ],
)
def test_metric_that_is_no_number_is_refused(value: Any, problem: str) -> None:
    """The message names the call and the metric."""
    with pytest.raises(UserError, match=f"run.record {problem}"):
        TrainingSums(torch.device("cpu"), 1).add(torch.tensor(1.0), {"kl": value})
    with pytest.raises(UserError, match=f"sums.add {problem}"):
        Sums(alone()).add(1, kl=value)
    with pytest.raises(UserError, match=f"sums.record {problem}"):
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


@pytest.mark.parametrize("value", [torch.tensor(1j), np.array([1j]), np.complex64(1j), 1j])
def test_complex_figure_is_refused(value: Any) -> None:
    """NumPy would drop the imaginary part with only a warning."""
    with pytest.raises(UserError, match="returned a complex number as 'x'"):
        figure("x", value)


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.array([[0.5]]), torch.tensor([0.5]), np.array(0.5)]
)
def test_single_number_of_any_shape_is_a_figure(value: Any) -> None:
    assert figure("x", value) == 0.5


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0.5, torch.zeros(())), "got a value of type Tensor instead of a dictionary of metrics"),
        ((0.5, torch.ones(3)), "got a value of type Tensor instead of a dictionary of metrics"),
        ((0.5, 0.0), "got a value of type float instead of a dictionary of metrics"),
        ((0.5, []), "got a value of type list instead of a dictionary of metrics"),
        (({"accuracy": 0.5}, torch.tensor(0.5)), "got a dictionary as the loss"),
        (({"accuracy": 0.5}, None), "got a dictionary as the loss"),
    ],
)
def test_metrics_that_are_no_dictionary_are_refused(
    arguments: tuple[Any, Any], problem: str
) -> None:
    """An empty or zero value is not taken for no metrics, and swapped arguments are named."""
    meters = Meters(alone(), 1)
    call = r"call it as run.record\(loss, {name: values}\)"
    with pytest.raises(UserError, match=f"run.record {problem}: {call}"):
        meters.count(*arguments, Work(1, 0), 0.0, True)
    call = r"call it as sums.record\(loss, {name: values}, number_of_samples\)"
    with pytest.raises(UserError, match=f"sums.record {problem}: {call}"):
        Sums(alone()).record(*arguments, 1)
