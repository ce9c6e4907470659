"""Regression summaries, baselines and normalised scores against scikit-learn and one-dimensional searches."""

import math

import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import mean_squared_error

from batchbayes import BatchbayesError, metrics, scores


def predictions(num_examples: int = 300):
    generator = torch.Generator().manual_seed(6)
    mean = torch.randn(num_examples, generator=generator, dtype=torch.float64)
    std = 0.1 + torch.rand(num_examples, generator=generator, dtype=torch.float64).square()
    return mean, std, mean + 3 * std * torch.randn(num_examples, generator=generator, dtype=torch.float64)


def searched_precision(mean, target, loss):
    """The same optimum by a bounded search over the log precision."""

    def objective(log_precision):
        return float(loss(mean, math.exp(-0.5 * log_precision), target).mean())

    found = scipy.optimize.minimize_scalar(objective, bounds=(-10, 10), method="bounded", options={"xatol": 1e-9})
    return math.exp(found.x)


def test_root_mean_squared_error():
    mean, _, target = predictions()
    expected = math.sqrt(mean_squared_error(target, mean))
    assert metrics.root_mean_squared_error(mean, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("objective", ["crps", "log_likelihood"])
def test_best_constant_precision_is_what_a_search_finds(objective):
    mean, _, target = predictions()
    loss = {"crps": scores.gaussian_crps, "log_likelihood": lambda *a: -scores.gaussian_log_likelihood(*a)}[objective]
    ours = metrics.best_constant_precision(mean, target, objective)
    assert ours == pytest.approx(searched_precision(mean, target, loss), rel=1e-6)


def test_the_two_objectives_differ():
    mean, _, target = predictions()
    by_crps = metrics.best_constant_precision(mean, target, "crps")
    assert by_crps > 1.1 * metrics.best_constant_precision(mean, target, "log_likelihood")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 3.0, 1e4]), min_size=1, max_size=12))
def test_best_constant_precision_by_crps_solves_its_equation_for_odd_errors(errors):
    target = torch.tensor(errors, dtype=torch.float64)
    if sum(error == 0 for error in errors) > len(errors) * math.sqrt(0.5):
        with pytest.raises(ValueError, match="would be zero"):
            metrics.best_constant_precision(torch.zeros_like(target), target, "crps")
        return
    precision = metrics.best_constant_precision(torch.zeros_like(target), target, "crps")
    assert float(torch.exp(-0.5 * precision * target**2).mean()) == pytest.approx(math.sqrt(0.5), abs=1e-9)


def test_one_point_has_its_own_optimum_as_constant():
    error = torch.tensor([-1.3], dtype=torch.float64)
    for objective, expected in (
        ("crps", float(scores.crps_optimal_std(error)) ** -2),
        ("log_likelihood", float(scores.log_likelihood_optimal_precision(error))),
    ):
        ours = metrics.best_constant_precision(torch.zeros_like(error), error, objective)
        assert ours == pytest.approx(expected, rel=1e-12)


def test_errors_of_zero_have_no_best_log_likelihood():
    with pytest.raises(ValueError, match="0 of 3"):
        metrics.best_constant_precision(torch.zeros(3), torch.zeros(3), "log_likelihood")
    with pytest.raises(ValueError, match="choose one"):
        metrics.best_constant_precision(torch.zeros(3), torch.ones(3), "pll")


@pytest.mark.parametrize("kind", ["crps", "log_likelihood"])
def test_normalised_score_runs_from_constant_to_optimum(kind):
    mean, std, target = predictions()
    score = {"crps": scores.gaussian_crps, "log_likelihood": scores.gaussian_log_likelihood}[kind]
    optimum = {"crps": scores.crps_optimum, "log_likelihood": scores.log_likelihood_optimum}[kind](target - mean)
    constant = score(mean, metrics.best_constant_precision(mean, target, kind) ** -0.5, target)
    assert metrics.normalised_score(constant, constant, optimum) == 0
    assert metrics.normalised_score(optimum, constant, optimum) == 100
    informed = score(mean, 3 * std, target)
    ours = metrics.normalised_score(informed, constant, optimum)
    ratio_of_means = 100 * (informed.mean() - constant.mean()) / (optimum.mean() - constant.mean())
    assert ours == pytest.approx(float(ratio_of_means), abs=1e-9)
    assert 5 < ours < 100
    assert metrics.normalised_score(score(mean, 30 * std, target), constant, optimum) < 0


@pytest.mark.parametrize(
    ("constant", "optimum", "message"),
    [
        ([1.0, 2.0], [2.0, 1.0], "differs from the constant-variance score"),
        ([1.0, 2.0], [1.0, math.inf], "finite optimum"),
        ([1.0, 2.0], [1.0, math.nan], "NaN"),
        ([1.0], [1.0, 2.0], "never broadcast"),
    ],
)
def test_normalised_score_without_a_scale_is_refused(constant, optimum, message):
    with pytest.raises(ValueError, match=message):
        metrics.normalised_score(torch.zeros(2), torch.tensor(constant), torch.tensor(optimum))


def test_mean_score_sums_in_float64():
    values = torch.ones(1001, dtype=torch.float32)
    values[0] = 2.0**25
    assert metrics.mean_score(values) == (2**25 + 1000) / 1001
    assert metrics.root_mean_squared_error(torch.zeros(1001), values) == math.sqrt((2**50 + 1000) / 1001)


def test_interval_summary():
    mean, std, target = predictions()
    half_width = scipy.stats.norm.ppf(0.95) * 3 * std
    ours = metrics.interval_summary(mean - half_width, mean + half_width, target)
    inside = [float(m - h) <= float(y) <= float(m + h) for m, h, y in zip(mean, half_width, target, strict=True)]
    assert ours.coverage == pytest.approx(sum(inside) / len(inside), abs=1e-12)
    assert abs(ours.coverage - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 300)
    assert ours.mean_width == pytest.approx(float(2 * half_width.mean()), abs=1e-12)


def test_interval_ends_belong_to_the_interval():
    ends, target = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 0.999, 1.001])
    assert metrics.interval_summary(ends, ends, target) == metrics.Intervals(coverage=1 / 3, mean_width=0.0)
    with pytest.raises(ValueError, match="3 the other way round"):
        metrics.interval_summary(ends + 1, ends, target)
    with pytest.raises(ValueError, match="never broadcast"):
        metrics.interval_summary(ends[:, None], ends, target)


def test_sharpness_is_a_root_mean_square():
    _, std, _ = predictions()
    assert metrics.sharpness(std) == pytest.approx(math.sqrt(sum(float(s) ** 2 for s in std) / len(std)), abs=1e-12)
    with pytest.raises(ValueError, match="above zero"):
        metrics.sharpness(torch.tensor([1.0, 0.0]))


def test_intervals_may_be_infinite_but_not_empty():
    """Conformal intervals are, if there are too few held-out examples for their level."""
    infinite, target = torch.tensor([math.inf]), torch.zeros(1)
    assert metrics.interval_summary(-infinite, infinite, target) == metrics.Intervals(1.0, math.inf)
    with pytest.raises(BatchbayesError, match="numbers in the widths"):
        metrics.interval_summary(infinite, infinite, target)
