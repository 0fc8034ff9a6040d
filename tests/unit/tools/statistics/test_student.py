"""Student's t distribution beside SciPy's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from common.tools.statistics.student import MANY_DEGREES, density, quantile, tail

DEGREES = st.one_of(st.floats(1.0, 50.0), st.floats(1.0, 0.999 * MANY_DEGREES))


@given(probability=st.floats(1e-9, 1 - 1e-9), degrees=DEGREES)
def test_quantile_agrees_with_scipy(probability: float, degrees: float) -> None:
    """They agree far in the tails, and for degrees of freedom that are not an integer."""
    expected = float(special.stdtrit(degrees, probability))
    assert quantile(probability, degrees) == pytest.approx(expected, rel=1e-7, abs=1e-12)


@given(t=st.floats(-1e4, 1e4), degrees=DEGREES)
def test_tail_agrees_with_scipy(t: float, degrees: float) -> None:
    """SciPy has the other side, so the sign of t is reversed."""
    expected = float(special.stdtr(degrees, -t))
    assert tail(t, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@given(probability=st.floats(0.001, 0.999), degrees=DEGREES)
def test_tail_of_a_quantile_is_its_probability(probability: float, degrees: float) -> None:
    """The tail probability is the inverse of the quantile."""
    assert 1 - tail(quantile(probability, degrees), degrees) == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("degrees", [MANY_DEGREES, 1e9, math.inf])
def test_many_degrees_are_the_normal_distribution(degrees: float) -> None:
    """The quantile has no step where the normal distribution stands in."""
    assert quantile(0.975, degrees) == pytest.approx(1.959963984540054, rel=1e-12)
    assert quantile(0.975, 0.999 * MANY_DEGREES) == pytest.approx(1.959963984540054, rel=3e-6)
    assert tail(1.959963984540054, degrees) == pytest.approx(0.025, rel=1e-12)


def test_known_values() -> None:
    """One degree of freedom has a closed form, and the others stand in every textbook."""
    assert quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert quantile(0.5, 3) == 0.0
    assert quantile(0.975, 4) == pytest.approx(2.7764451051977987, rel=1e-12)
    assert quantile(0.025, 4) == -quantile(0.975, 4)
    assert density(0.0, 1) == pytest.approx(1 / math.pi, rel=1e-12)
    assert (tail(0.0, 5), tail(math.inf, 5), tail(-math.inf, 5)) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize(
    ("probability", "degrees"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0.5), (0.9, math.nan)]
)
def test_impossible_arguments_are_refused(probability: float, degrees: float) -> None:
    """A wrong quantile would be a wrong verdict."""
    with pytest.raises(ValueError, match="no quantile"):
        quantile(probability, degrees)
