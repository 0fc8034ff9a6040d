"""Student's t distribution: its tail probability, and its quantiles.

The tail probability is half of a regularised incomplete beta function, which is computed by its
continued fraction:

- NIST Digital Library of Mathematical Functions, https://dlmf.nist.gov/8.17, equations 8.17.22 and
  8.17.23 (the fraction), and 8.17.4 (the symmetry)
- W. Lentz, "Generating Bessel functions in Mie scattering calculations using continued fractions",
  Applied Optics 15, 1976, as modified by Thompson and Barnett (its evaluation)

SciPy has the same functions. It comes with scikit-learn, but it loads NumPy, and `recipes compare`
should not wait for that. The tests check these functions against SciPy.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist

# From this number of degrees of freedom on, the normal distribution stands in for Student's. The
# relative difference is about 1e-6 or less.
MANY_DEGREES = 1e6
# For arguments this large, the asymptotic series of `log_gamma_step` is exact in float64, while the
# difference of two values of `lgamma` loses digits.
LARGE_ARGUMENT = 100.0
TINY = 1e-300  # replaces a zero denominator in the continued fraction
PRECISION = 1e-14  # relative change at which an iteration ends
MAX_TERMS = 10_000  # `MANY_DEGREES` needs about 1,000


def tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t is larger than `t`.

    Args:
        t: any number. The value for infinity is 0.
        degrees: degrees of freedom, larger than 0; they need not be an integer.
    """
    if t < 0:
        return 1.0 - tail(-t, degrees)
    if degrees >= MANY_DEGREES:
        return 0.5 * math.erfc(t / math.sqrt(2.0))
    return 0.5 * two_sided_tail(t, degrees)


def quantile(probability: float, degrees: float) -> float:
    """Return the value that Student's t stays below with the given probability.

    Args:
        probability: between 0 and 1, exclusive.
        degrees: degrees of freedom, 1 or more; they need not be an integer.

    Raises:
        ValueError: an argument is outside of its range.
    """
    if not 0.0 < probability < 1.0 or not degrees >= 1.0:
        raise ValueError(f"no quantile for probability {probability} and {degrees} degrees")
    if probability < 0.5:
        return -quantile(1.0 - probability, degrees)
    # The tails of t are heavier than those of the normal distribution, so Newton's method starts
    # below the quantile.
    t = NormalDist().inv_cdf(probability)
    if degrees >= MANY_DEGREES:
        return t
    # The tail is a convex, falling function of t ≥ 0, so Newton's method only steps to the right,
    # and never beyond the quantile. A step to the left can only be rounding, so it is the last.
    step = math.inf
    while step > PRECISION * t:
        step = (tail(t, degrees) - (1.0 - probability)) / density(t, degrees)
        t += step
    return t


def density(t: float, degrees: float) -> float:
    """Return the density of Student's t distribution at `t`."""
    log_scale = log_gamma_step(degrees / 2.0) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_scale - 0.5 * (degrees + 1.0) * math.log1p(t * t / degrees))


def two_sided_tail(t: float, degrees: float) -> float:
    """Return the probability that the absolute value of Student's t is larger than `t` >= 0.

    This is the regularised incomplete beta function I_x(degrees / 2, 1 / 2) at
    x = degrees / (degrees + t²).
    """
    square = t * t / degrees
    if square == 0.0:  # also for a very small t, whose square underflows
        return 1.0
    if math.isinf(square):
        return 0.0
    a = degrees / 2.0
    b = 0.5
    x = 1.0 / (1.0 + square)
    complement = square / (1.0 + square)  # 1 - x, without cancellation
    # The scale is x^a (1 - x)^b / B(a, b), where Γ(1/2) is the square root of π.
    log_scale = log_gamma_step(a) - 0.5 * math.log(math.pi)
    scale = math.exp(log_scale - a * math.log1p(square) + b * math.log(complement))
    # The fraction converges quickly on this side, and its mirror image on the other side.
    if x < (a + 1.0) / (a + b + 2.0):
        return scale / (a * continued_fraction(a, b, x))
    return 1.0 - scale / (b * continued_fraction(b, a, complement))


def log_gamma_step(a: float) -> float:
    """Return the logarithm of gamma(a + 1/2) / gamma(a)."""
    if a < LARGE_ARGUMENT:
        return math.lgamma(a + 0.5) - math.lgamma(a)
    # DLMF 5.11.13 gives the series; the next term is 17 / 14336 / a**7.
    return 0.5 * math.log(a) - 1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5)


def continued_fraction(a: float, b: float, x: float) -> float:
    """Return 1 + d1 / (1 + d2 / (1 + …)), the denominator of DLMF 8.17.22, by Lentz's algorithm."""
    value = 1.0
    ratio = 1.0  # ratio of successive numerators
    inverse = 0.0  # inverse of the ratio of successive denominators
    for coefficient in coefficients(a, b, x):
        ratio = (1.0 + coefficient / ratio) or TINY
        inverse = 1.0 / ((1.0 + coefficient * inverse) or TINY)
        factor = ratio * inverse
        value *= factor
        if abs(factor - 1.0) < PRECISION:
            break
    return value


def coefficients(a: float, b: float, x: float) -> Iterator[float]:
    """Yield d1, d2 and so on, by DLMF 8.17.23."""
    for m in range(MAX_TERMS):
        if m > 0:
            yield m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        yield -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
