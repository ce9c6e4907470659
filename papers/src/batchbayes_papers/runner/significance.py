"""The one-sample t-test in plain Python: is a mean over runs different from a given value?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchbayes import BatchbayesError

_STARS = ((1e-4, "****"), (1e-3, "***"), (1e-2, "**"), (0.05, "*"))


_TINY = 1e-300


_MAX_TERMS = 10_000
"""Enough for a million runs: the fraction needs about as many terms as the square root of its larger parameter."""


def stars(p_value: float) -> str:
    """Return the stars of significance: `****` below 1e-4, `***` below 1e-3, `**` below 1e-2, `*` below 0.05.

    >>> stars(0.03), stars(0.05), stars(1e-9)
    ('*', '', '****')
    """
    return next((mark for limit, mark in _STARS if p_value < limit), "")


@dataclass(frozen=True)
class TTest:
    """A mean over runs, its standard error, the statistic t, its two-sided p-value, and stars of significance."""

    mean: float
    standard_error: float
    t: float
    p_value: float
    stars: str


def one_sample_t_test(values: Sequence[float], null_mean: float = 0.0) -> TTest:
    r"""Test in both directions that the mean is $\mu_0$, by $t = (\bar x - \mu_0) / (s / \sqrt n)$.

    Here s is the standard deviation with divisor n - 1, and t has n - 1 degrees of freedom. Shapes: n numbers -> test.
    Reference: Student, Biometrika 6 (1908).

    >>> test = one_sample_t_test([1.0, 2.0, 3.0, 6.0])
    >>> round(test.t, 4), round(test.p_value, 4), test.stars
    (2.7775, 0.0691, '')
    """
    numbers = [float(value) for value in values]
    count = len(numbers)
    if count < 2 or not all(map(math.isfinite, numbers)):
        raise BatchbayesError(
            expected="at least two finite values",
            got=f"{numbers}",
            fix="repeat the run with other seeds, because one run has no standard error",
        )
    mean = math.fsum(numbers) / count
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (count - 1)
    if variance == 0:
        got = f"{count} times {mean}"
        raise BatchbayesError(expected="values that differ", got=got, fix="check that the seeds were different")
    standard_error = math.sqrt(variance / count)
    t = (mean - null_mean) / standard_error
    p_value = student_t_two_sided(t, count - 1)
    return TTest(mean, standard_error, t, p_value, stars(p_value))


def student_t_two_sided(t: float, degrees_of_freedom: float) -> float:
    r"""Return the probability of an absolute value of at least |t| for Student's t, $I_{\nu/(\nu + t^2)}(\nu/2, 1/2)$.

    The relative error is small even for very small probabilities. Reference: Abramowitz & Stegun, 26.7.1.

    >>> round(student_t_two_sided(2.0, 10), 6)
    0.073388
    """
    if not degrees_of_freedom > 0 or math.isnan(t):
        raise BatchbayesError(
            expected="a number t and degrees of freedom above 0",
            got=f"t {t} and {degrees_of_freedom}",
            fix="test at least two runs",
        )
    square = t * t
    if math.isinf(square):
        return 0.0
    # Both are computed directly, because one minus the larger would lose digits of the smaller.
    share = degrees_of_freedom / (degrees_of_freedom + square)
    rest = square / (degrees_of_freedom + square)
    return _incomplete_beta(0.5 * degrees_of_freedom, 0.5, share, rest)


def _incomplete_beta(a: float, b: float, x: float, one_minus_x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b). The fraction converges fast for x below the mean."""
    if x == 0 or one_minus_x == 0:
        return 0.0 if x == 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, one_minus_x, x)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log(one_minus_x) - log_beta) / a
    return front / _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction 1 + d1/(1 + d2/(1 + ...)) of Abramowitz & Stegun, 26.5.8, term by term.

    It keeps ratios of successive convergents, so that nothing overflows (the modified method of Lentz).
    """
    value = numerator_ratio = 1.0
    denominator_ratio = 0.0
    for term in range(1, _MAX_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator_ratio = 1 / ((1 + d * denominator_ratio) or _TINY)
        numerator_ratio = (1 + d / numerator_ratio) or _TINY
        step = numerator_ratio * denominator_ratio
        value *= step
        if abs(step - 1) < 1e-15:
            return value
    raise BatchbayesError(
        expected="fewer degrees of freedom",
        got=f"{2 * max(a, b)}",
        fix="use the normal distribution for that number of values",
    )
