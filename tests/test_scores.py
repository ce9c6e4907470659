"""Scores against scipy, torch, naive loops and scoringrules.

Its numpy backend: the torch one computes constants in float32.
"""

import math
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import scoringrules
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchbayes import BatchbayesError, metrics, scores
from batchbayes.metrics import (
    absolute_error,
    accuracy,
    brier,
    categorical_log_likelihood,
    classwise_calibration_error,
    crps_optimal_std,
    gaussian_crps,
    gaussian_log_likelihood,
    is_misclassified,
    mixture_crps,
    mixture_log_likelihood,
    sample_crps,
)

TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}


def regression(num_draws: int = 7, shape: tuple[int, ...] = (50,)) -> tuple[Tensor, Tensor, Tensor]:
    """Draws (S, ...), positive spreads (...) and targets (...), away from zero."""
    generator = torch.Generator().manual_seed(3)
    draws = 5 + torch.randn(num_draws, *shape, generator=generator, dtype=torch.float64)
    spread = 0.2 + torch.rand(shape, generator=generator, dtype=torch.float64)
    return draws, spread, 5 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)


def classification(num_classes: int = 4, shape: tuple[int, ...] = (50,)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(*shape, num_classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(num_classes, shape, generator=generator)


def assert_equal(ours: Tensor, oracle: object) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(np.asarray(oracle)), **TOLERANCE)


# Classification


@pytest.mark.parametrize("shape", [(50,), (3, 4, 5)])
def test_categorical_log_likelihood_is_minus_cross_entropy(shape):
    probs, labels = classification(shape=shape)
    expected = -torch.nn.functional.nll_loss(probs.log().movedim(-1, 1), labels, reduction="none")
    assert_equal(scores.categorical_log_likelihood(probs.log(), labels), expected)


def test_brier_is_the_sum_over_classes():
    probs, labels = classification()
    naive = [
        sum((float(p) - (k == int(y))) ** 2 for k, p in enumerate(row)) for row, y in zip(probs, labels, strict=True)
    ]
    assert_equal(scores.brier(probs, labels), naive)


def test_brier_of_two_classes_is_twice_that_of_scoringrules():
    probs, labels = classification(num_classes=2)
    expected = 2 * scoringrules.brier_score(labels.double().numpy(), probs[:, 1].numpy(), backend="numpy")
    assert_equal(scores.brier(probs, labels), expected)


def test_entropy_and_max_probability():
    probs, _ = classification()
    assert_equal(scores.entropy(probs), scipy.stats.entropy(probs.numpy(), axis=-1))
    assert_equal(scores.max_probability(probs), probs.numpy().max(-1))


def test_is_misclassified_takes_the_first_of_equal_classes():
    probs = torch.tensor([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]])
    assert scores.is_misclassified(probs, torch.tensor([0, 1, 2])).tolist() == [False, True, False]


def test_probabilities_of_exactly_zero_and_one():
    probs, labels = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0])
    assert scores.entropy(probs).tolist() == [0, 0, 0]
    assert scores.brier(probs, labels).tolist() == [0, 0, 2]
    assert scores.categorical_log_likelihood(probs.log(), labels).tolist() == [0, 0, -math.inf]


@pytest.mark.parametrize("score", [scores.brier, scores.is_misclassified])
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "between 0 and 1"),
        (torch.tensor([[0.5, 0.1]]), torch.tensor([0]), "sum to one"),
        (torch.tensor([[math.nan, 0.5]]), torch.tensor([0]), "1 NaN"),
        (torch.tensor([[1, 0]]), torch.tensor([0]), "floating-point"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), "labels from 0 to 1; got 2 to 2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), "drop examples that do not count"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "integer labels; got torch.float32"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([[0]]), "labels of shape"),
    ],
)
def test_bad_classification_input_is_refused(score, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        score(probs, labels)


def test_logits_in_place_of_log_probabilities_are_refused():
    with pytest.raises(ValueError, match="log_softmax"):
        scores.categorical_log_likelihood(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="NaN"):
        scores.categorical_log_likelihood(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))


# Regression


@pytest.mark.parametrize("std", [0.7, None])
def test_gaussian_scores(std):
    draws, spread, target = regression()
    std = spread if std is None else std
    mean, width = draws[0].numpy(), np.asarray(std)
    expected = scipy.stats.norm.logpdf(target.numpy(), mean, width)
    assert_equal(scores.gaussian_log_likelihood(draws[0], std, target), expected)
    expected = scoringrules.crps_normal(target.numpy(), mean, width, backend="numpy")
    assert_equal(scores.gaussian_crps(draws[0], std, target), expected)


def test_gaussian_crps_is_the_integral_of_the_squared_distance_of_distribution_functions():
    grid = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    distribution = torch.special.ndtr((grid - 0.5) / 2)
    expected = torch.trapezoid((distribution - (grid >= 3.0).double()).square(), grid)
    ours = scores.gaussian_crps(grid.new_tensor([0.5]), 2.0, grid.new_tensor([3.0]))
    assert float(ours) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("kind", ["number", "per example", "per draw"])
@pytest.mark.parametrize("shape", [(50,), (6, 3)])
def test_mixture_scores(kind, shape):
    draws, spread, target = regression(shape=shape)
    per_draw = spread * (1 + torch.arange(len(draws), dtype=torch.float64).view(-1, *[1] * len(shape)))
    precision = {"number": 1.7, "per example": spread**-2, "per draw": per_draw**-2}[kind]
    std = torch.as_tensor(precision, dtype=torch.float64).rsqrt().expand_as(draws).numpy()
    density = scipy.stats.norm.pdf(target.numpy(), draws.numpy(), std).mean(0)
    assert_equal(scores.mixture_log_likelihood(draws, precision, target), np.log(density))
    expected = scoringrules.crps_mixnorm(target.numpy(), draws.numpy(), std, m_axis=0, backend="numpy")
    assert_equal(scores.mixture_crps(draws, precision, target), expected)


def test_mixture_log_likelihood_is_the_formula_of_the_paper_and_does_not_underflow():
    draws, tau, target = torch.tensor([[100.0], [101.0]], dtype=torch.float64), 4.0, torch.zeros(1).double()
    exponents = [-tau / 2 * 100.0**2, -tau / 2 * 101.0**2]
    largest = max(exponents)
    total = largest + math.log(sum(math.exp(e - largest) for e in exponents))
    expected = total - math.log(2) - 0.5 * math.log(2 * math.pi) + 0.5 * math.log(tau)
    assert float(scores.mixture_log_likelihood(draws, tau, target)) == pytest.approx(expected, rel=1e-12)


def test_mixture_of_one_draw_is_the_gaussian():
    draws, spread, target = regression()
    one = draws[:1]
    gaussian = scores.gaussian_log_likelihood(one[0], spread, target)
    assert_equal(scores.mixture_log_likelihood(one, spread**-2, target), gaussian)
    assert_equal(scores.mixture_crps(one, spread**-2, target), scores.gaussian_crps(one[0], spread, target))


@pytest.mark.parametrize("estimator", ["nrg", "fair"])
@pytest.mark.parametrize("shape", [(50,), (6, 3)])
def test_sample_crps(estimator, shape):
    draws, _, target = regression(shape=shape)
    expected = scoringrules.crps_ensemble(target.numpy(), draws.numpy(), m_axis=0, estimator=estimator, backend="numpy")
    assert_equal(scores.sample_crps(draws, target, estimator), expected)


small_numbers = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(small_numbers, st.integers(-3, 3).map(float))
def test_sample_crps_with_ties_is_the_double_loop(values, target):
    draws = torch.tensor(values, dtype=torch.float64)[:, None]
    size = len(values)
    distance = sum(abs(value - target) for value in values) / size
    pairs = sum(abs(a - b) for a in values for b in values) / 2
    truth = torch.tensor([target], dtype=torch.float64)
    assert float(scores.sample_crps(draws, truth, "nrg")) == pytest.approx(distance - pairs / size**2, abs=1e-12)
    if size == 1:
        with pytest.raises(ValueError, match="at least two draws"):
            scores.sample_crps(draws, truth, "fair")
    else:
        fair = distance - pairs / (size * (size - 1))
        assert float(scores.sample_crps(draws, truth, "fair")) == pytest.approx(fair, abs=1e-12)


def test_sample_crps_is_the_limit_of_the_mixture_without_noise():
    draws, _, target = regression()
    expected = scores.sample_crps(draws, target, "nrg")
    torch.testing.assert_close(scores.mixture_crps(draws, 1e16, target), expected, atol=1e-6, rtol=0)


def test_absolute_error():
    draws, _, target = regression()
    assert_equal(scores.absolute_error(draws[0], target), np.abs(draws[0].numpy() - target.numpy()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: scores.gaussian_crps(a, 1.0, a[:, None]), "never broadcast"),
        (lambda a: scores.gaussian_log_likelihood(a, 0.0, a), "std above zero"),
        (lambda a: scores.gaussian_crps(a, math.inf, a), "std above zero"),
        (lambda a: scores.gaussian_crps(a, torch.ones(2), a), "std as one number or of shape"),
        (lambda a: scores.gaussian_crps(a * math.nan, 1.0, a), "finite numbers in the prediction"),
        (lambda a: scores.absolute_error(a, a * math.inf), "finite numbers in target"),
        (lambda a: scores.mixture_crps(a, 1.0, a), "draws of shape"),
        (lambda a: scores.mixture_log_likelihood(a[:0, None].expand(0, 3), 1.0, a), "draws of shape"),
        (lambda a: scores.mixture_log_likelihood(a[None], -1.0, a), "precision above zero"),
        (lambda a: scores.sample_crps(a[None], a, "qd"), "nrg"),
    ],
)
def test_bad_regression_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.tensor([1.0, 2.0, 3.0]))


# Optima


def test_crps_optimum_is_the_minimum_over_std():
    for error in (-1.7, 0.3):
        truth, mean = torch.tensor([error], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        found = scipy.optimize.minimize_scalar(
            lambda std, mean=mean, truth=truth: float(scores.gaussian_crps(mean, std, truth)),
            bounds=(1e-3, 10),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert float(scores.crps_optimal_std(truth)) == pytest.approx(found.x, abs=1e-6)
        assert float(scores.crps_optimum(truth)) == pytest.approx(found.fun, abs=1e-12)


def test_log_likelihood_optimum_is_the_maximum_over_precision():
    error, mean = torch.tensor([-1.7], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    best = float(scores.log_likelihood_optimal_precision(error))
    at = [float(scores.mixture_log_likelihood(mean[None], best * factor, error)) for factor in (0.99, 1.0, 1.01)]
    assert at[1] > max(at[0], at[2])
    assert float(scores.log_likelihood_optimum(error)) == pytest.approx(at[1], abs=1e-12)


def test_an_error_of_zero_has_no_log_likelihood_optimum_but_a_crps_of_zero():
    error = torch.tensor([0.0, 1.0])
    assert scores.crps_optimum(error)[0] == 0
    for optimum in (scores.log_likelihood_optimum, scores.log_likelihood_optimal_precision):
        with pytest.raises(ValueError, match="1 zero"):
            optimum(error)


# Precision and gradients


def test_scores_keep_float32_and_agree_with_float64():
    draws, spread, target = regression()
    probs, labels = classification()
    calls = {
        "mixture_log_likelihood": (scores.mixture_log_likelihood, (draws, 2.0, target)),
        "mixture_crps": (scores.mixture_crps, (draws, 2.0, target)),
        "gaussian_log_likelihood": (scores.gaussian_log_likelihood, (draws[0], spread, target)),
        "gaussian_crps": (scores.gaussian_crps, (draws[0], spread, target)),
        "crps_optimum": (scores.crps_optimum, (target,)),
        "brier": (scores.brier, (probs, labels)),
        "entropy": (scores.entropy, (probs,)),
        "categorical": (scores.categorical_log_likelihood, (probs.log(), labels)),
    }
    for name, (score, arguments) in calls.items():
        halved = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
        single = score(*halved)
        assert single.dtype == torch.float32, name
        torch.testing.assert_close(single.double(), score(*arguments), atol=1e-5, rtol=1e-5, msg=name)


def test_scores_can_be_tuned_by_gradient():
    draws, _, target = regression(shape=(4,))
    precision = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for score in (scores.mixture_crps, scores.mixture_log_likelihood):
        assert torch.autograd.gradcheck(lambda tau, score=score: score(draws, tau, target), (precision,))
    probs, labels = classification(shape=(5,))
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for tempered in (
        lambda t: scores.categorical_log_likelihood((probs.log() / t).log_softmax(-1), labels),
        lambda t: scores.brier((probs.log() / t).softmax(-1), labels),
        lambda t: scores.entropy((probs.log() / t).softmax(-1)),
    ):
        assert torch.autograd.gradcheck(tempered, (temperature,))


def test_a_mean_score_of_a_loss_with_gradient_warns_of_nothing():
    precision = torch.tensor(1.5, requires_grad=True)
    loss = scores.gaussian_crps(torch.zeros(3), precision, torch.ones(3))
    assert metrics.mean_score(loss) == pytest.approx(float(loss.detach().mean()))


# Odd dtypes and containers


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.bool])
def test_integers_are_scored_as_real_numbers(dtype):
    draws, target = torch.tensor([[0], [1], [3]]).to(dtype), torch.tensor([1]).to(dtype)
    real_draws, real_target = draws.double(), target.double()
    for score in (partial(sample_crps, estimator="nrg"), partial(sample_crps, estimator="fair")):
        torch.testing.assert_close(score(draws, target), score(real_draws, real_target))
    for score in (mixture_crps, mixture_log_likelihood):
        torch.testing.assert_close(score(draws, 0.5, target), score(real_draws, 0.5, real_target))
    for score in (gaussian_crps, gaussian_log_likelihood):
        torch.testing.assert_close(score(draws[0], 0.5, target), score(real_draws[0], 0.5, real_target))
    torch.testing.assert_close(absolute_error(draws[2], target), absolute_error(real_draws[2], real_target))


def test_a_score_has_the_dtype_of_the_prediction():
    mean, target = torch.zeros(2), torch.ones(2, dtype=torch.float64)
    for score in (gaussian_crps, gaussian_log_likelihood):
        assert score(mean, 0.5, target).dtype == torch.float32
    for score in (mixture_crps, mixture_log_likelihood):
        assert score(mean[None], 0.5, target).dtype == torch.float32
    assert absolute_error(mean, target).dtype == torch.float32


def test_unsigned_differences_do_not_wrap_around():
    five, seven = torch.tensor([5], dtype=torch.uint8), torch.tensor([7], dtype=torch.uint8)
    assert absolute_error(seven, five).tolist() == [2.0]
    assert crps_optimal_std(torch.tensor([-2])).tolist() == pytest.approx([2.4022], rel=1e-4)


def test_numpy_arrays_and_lists_are_scored_as_tensors():
    assert absolute_error(np.array([1.0, 2.0]), [1.5, 0.0]).tolist() == [0.5, 2.0]
    assert brier(np.array([[0.25, 0.75]]), np.array([0], dtype=np.uint16)).tolist() == [1.125]


@pytest.mark.parametrize("bad", [None, "text", 3, np.array(["a"]), torch.tensor([1j])])
def test_other_objects_are_refused_in_words(bad):
    with pytest.raises(BatchbayesError, match=r"as a tensor or an array of numbers|real numbers"):
        absolute_error(bad, torch.tensor([1.0]))
    with pytest.raises(BatchbayesError, match=r"as a tensor or an array of numbers|real numbers"):
        absolute_error(torch.tensor([1.0]), bad)


def test_ignored_labels_are_left_out():
    probs = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    labels = torch.arange(24).view(2, 3, 4) % 5
    labels[0] = 255
    kept = labels != 255
    for score, values in ((brier, probs), (categorical_log_likelihood, probs.log()), (is_misclassified, probs)):
        assert torch.equal(score(values, labels, ignore_index=255), score(values[kept], labels[kept]))
    assert accuracy(probs, labels, ignore_index=255) == accuracy(probs[kept], labels[kept])
    own = classwise_calibration_error(probs, labels, ignore_index=255)
    assert own == classwise_calibration_error(probs[kept], labels[kept])
    with pytest.raises(BatchbayesError, match="labels from 0 to 4"):
        brier(probs, labels)
