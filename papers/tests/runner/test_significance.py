"""The t-test in plain Python against scipy, far into the tails."""

import math
import random

import pytest
import scipy.stats
from batchbayes_papers.runner import significance
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("degrees_of_freedom", [1, 2, 3, 24, 101, 1000, 10**6])
@pytest.mark.parametrize("t", [0.0, 1e-8, -0.3, 1.0, 2.5, -7.0, 26.6, 1e3])
def test_two_sided_p_value(t, degrees_of_freedom):
    expected = 2 * scipy.stats.t.sf(abs(t), degrees_of_freedom)
    assert significance.student_t_two_sided(t, degrees_of_freedom) == pytest.approx(expected, rel=1e-7, abs=1e-300)


@settings(max_examples=200, deadline=None)
@given(st.floats(-60, 60), st.floats(0.3, 300))
def test_two_sided_p_value_anywhere(t, degrees_of_freedom):
    expected = 2 * scipy.stats.t.sf(abs(t), degrees_of_freedom)
    ours = significance.student_t_two_sided(t, degrees_of_freedom)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_t_without_limit_has_no_p_value_left():
    assert significance.student_t_two_sided(math.inf, 3) == 0
    assert significance.student_t_two_sided(-1e200, 3) == 0
    for t, degrees_of_freedom in ((math.nan, 3), (1.0, 0)):
        with pytest.raises(ValueError, match="degrees of freedom above 0"):
            significance.student_t_two_sided(t, degrees_of_freedom)


@pytest.mark.parametrize("shift", [-0.5, 0.02, 3.0])
@pytest.mark.parametrize("count", [2, 25])
@pytest.mark.parametrize("null_mean", [0.0, 0.7])
def test_one_sample_t_test(shift, count, null_mean):
    generator = random.Random(11)
    values = [generator.gauss(shift, 1) for _ in range(count)]
    expected = scipy.stats.ttest_1samp(values, null_mean)
    ours = significance.one_sample_t_test(values, null_mean)
    assert ours.t == pytest.approx(expected.statistic, rel=1e-9)
    assert ours.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert ours.mean == pytest.approx(sum(values) / count)
    assert ours.standard_error == pytest.approx(scipy.stats.sem(values), rel=1e-9)
    assert ours.stars == significance.stars(ours.p_value)


def test_the_protein_row_of_the_paper_is_a_misprint():
    """2.66 +- 0.10 over 25 runs cannot be the printed 2.77-12; the digits fit 2.77E-19."""
    assert 1e-19 < significance.student_t_two_sided(2.66 / 0.10, 24) < 1e-18


def test_stars_change_at_their_limits():
    limits = {1e-4: "****", 1e-3: "***", 1e-2: "**", 0.05: "*"}
    weaker = ["***", "**", "*", ""]
    for (limit, mark), at_limit in zip(limits.items(), weaker, strict=True):
        assert significance.stars(limit * (1 - 1e-12)) == mark
        assert significance.stars(limit) == at_limit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "two finite values"),
        ([1.0], "other seeds"),
        ([1.0, math.nan], "two finite"),
        ([2.0, 2.0], "values that differ"),
    ],
)
def test_runs_without_spread_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        significance.one_sample_t_test(values)
