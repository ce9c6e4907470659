import math

import pytest
import torch
from scipy import optimize

from batchbayes import BatchbayesError
from batchbayes.calibrate import (
    agreement_temperature,
    conformal_intervals,
    conformal_sets,
    tune_precision,
    tune_temperature,
)
from batchbayes.likelihoods import Categorical, categorical, gaussian
from batchbayes.metrics import best_constant_precision
from batchbayes.scores import mixture_crps


def made(draws, likelihood):
    summary = likelihood.summary()
    summary.add(draws)
    return summary.finish(draws)


@pytest.mark.parametrize("objective", ["log_likelihood", "crps"])
def test_one_draw_has_the_best_constant_precision(objective):
    random = torch.Generator().manual_seed(0)
    mean, target = torch.randn(1, 200, 1, generator=random), torch.randn(200, generator=random)
    found = tune_precision(made(mean, gaussian(1.0)), target, objective)
    assert found == pytest.approx(best_constant_precision(mean[0, :, 0], target, objective), rel=1e-4)


@pytest.mark.parametrize("objective", ["log_likelihood", "crps"])
def test_the_precision_of_a_mixture_is_that_of_a_brute_force_search(objective):
    random = torch.Generator().manual_seed(1)
    draws = torch.randn(6, 80, 1, generator=random, dtype=torch.float64)
    target = draws.mean(0) + 0.3 * torch.randn(80, 1, generator=random, dtype=torch.float64)

    def cost(log_precision):
        if objective == "crps":
            return float(mixture_crps(draws, math.exp(log_precision), target).mean())
        normal = gaussian(math.exp(log_precision))(draws)
        return -float(normal.log_prob(target).logsumexp(0).mean())

    best = optimize.minimize_scalar(cost, bounds=(-5, 10), method="bounded", options={"xatol": 1e-7}).fun
    found = tune_precision(made(draws, gaussian(1.0)), target, objective)
    assert cost(math.log(found)) <= best + 1e-7


def test_an_error_of_zero_has_no_precision():
    with pytest.raises(BatchbayesError, match="not all zero"):
        tune_precision(made(torch.zeros(1, 5, 1), gaussian(1.0)), torch.zeros(5))


@pytest.mark.parametrize("num_draws", [1, 5])
def test_the_temperature_is_that_of_a_brute_force_search(num_draws):
    random = torch.Generator().manual_seed(2)
    logits = 6 * torch.randn(num_draws, 300, 4, generator=random, dtype=torch.float64)
    labels = (logits.mean(0) / 3).softmax(-1).multinomial(1, generator=random)[:, 0]

    def cost(log_temperature):
        return -float(made(logits, categorical(temperature=math.exp(log_temperature))).log_prob(labels).mean())

    best = optimize.minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-7}).fun
    found = tune_temperature(made(logits, categorical()), labels)
    assert cost(math.log(found)) <= best + 1e-7
    assert found > 1.5  # the logits were made three times too large


def test_a_temperature_is_applied_along_any_class_axis():
    outputs = torch.randn(3, 5, 7, 4)  # (S, N, places, K)
    hot = made(outputs, Categorical(class_axis=-1, temperature=2.0))
    torch.testing.assert_close(hot.log_probs.exp(), (outputs / 2).softmax(-1).mean(0))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_must_be_positive(temperature):
    with pytest.raises(BatchbayesError, match="positive, finite temperature"):
        categorical(temperature=temperature)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_conformal_intervals_hold_what_they_promise_for_a_wrong_model(level):
    """Over 300 splits the mean coverage is level up to 1/(n+1), within four standard errors; the std is off by 3."""
    random, held = torch.Generator().manual_seed(3), []
    for _ in range(300):
        target = torch.randn(200, generator=random) * 3
        seen = made(torch.zeros(1, 100, 1), gaussian(1.0))
        lower, upper = conformal_intervals(seen, target[:100], level)(seen)
        held.append(float(((lower[:, 0] <= target[100:]) & (target[100:] <= upper[:, 0])).double().mean()))
    held = torch.tensor(held)
    error = float(held.std()) / len(held) ** 0.5
    assert level - 4 * error <= float(held.mean()) <= level + 1 / 101 + 4 * error


def test_conformal_sets_hold_what_they_promise_for_a_wrong_model():
    random, held = torch.Generator().manual_seed(4), []
    for _ in range(300):
        logits = torch.randn(200, 5, generator=random)
        labels = logits.softmax(-1).multinomial(1, generator=random)[:, 0]
        first, second = (made(5 * part[None], categorical()) for part in logits.split(100))  # far too sure
        sets = conformal_sets(first, labels[:100], 0.9)(second)
        held.append(float(sets.gather(-1, labels[100:, None]).double().mean()))
    held = torch.tensor(held)
    error = float(held.std()) / len(held) ** 0.5
    assert 0.9 - 4 * error <= float(held.mean()) <= 0.9 + 1 / 101 + 4 * error


def test_too_little_calibration_data_gives_everything():
    seen = made(torch.zeros(1, 3, 2), categorical())
    assert conformal_sets(seen, torch.tensor([0, 1, 0]), 0.9)(seen).all()
    wide = made(torch.zeros(1, 3, 1), gaussian(1.0))
    assert conformal_intervals(wide, torch.ones(3), 0.9).width == float("inf")


@pytest.mark.parametrize("average", [1, 2, 3])
def test_confidence_is_the_agreement_of_pairs_of_draws(average):
    random = torch.Generator().manual_seed(2)
    draws = 4 * torch.randn(50, 3, generator=random) + 2 * torch.randn(6, 50, 3, generator=random)
    temperature = agreement_temperature(made(draws, categorical()), average=average)
    answers = draws.argmax(-1)
    pairs = [(answers[i] == answers[j]).double().mean() for i in range(6) for j in range(i)]
    probs = (draws.double().view(-1, average, 50, 3).mean(1) / temperature).softmax(-1).mean(0)
    assert float(probs.amax(-1).mean()) == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-4)


def test_agreement_needs_pairs_of_draws():
    for count, average in ((1, 1), (4, 3), (4, 0)):
        with pytest.raises(BatchbayesError, match=f"a multiple of average={average}; got {count}"):
            agreement_temperature(made(torch.randn(count, 5, 3), categorical()), average=average)
