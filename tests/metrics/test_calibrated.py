"""Calibrated log-likelihood and the deep-ensemble equivalent."""

import math

import pytest
import torch

from batchbayes import BatchbayesError, metrics


def labelled(count, classes=5, sharpness=1.0, seed=0):
    """Log-probabilities, and labels that are drawn from them at temperature 1; the former are then sharpened."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=random, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]
    return (sharpness * logits).log_softmax(-1), labels


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_calibration_alone_does_not_count(sharpness):
    plain, labels = labelled(4000)
    sharp, _ = labelled(4000, sharpness=sharpness)
    expected = metrics.calibrated_log_likelihood(plain, labels)
    assert metrics.calibrated_log_likelihood(sharp, labels) == pytest.approx(expected, abs=1e-4)
    own = float(plain.gather(1, labels[:, None]).mean())
    assert expected == pytest.approx(own, abs=2e-3)  # the labels have the temperature 1


def test_it_is_the_mean_over_halves_of_a_naive_search():
    log_probs, labels = labelled(60, sharpness=3.0)
    found = metrics.calibrated_log_likelihood(log_probs, labels, repeats=1, seed=3)
    from batchbayes._common.rng import generator

    order = torch.randperm(60, generator=generator(3, "calibrated log-likelihood"))
    temperatures = torch.linspace(-3, 3, 6001).exp()
    scores = (log_probs / temperatures[:, None, None]).log_softmax(-1)[:, torch.arange(60), labels]  # (G, N)
    first, second = order[:30], order[30:]
    naive = [scores[scores[:, a].mean(1).argmax(), b].sum() for a, b in ((first, second), (second, first))]
    assert found == pytest.approx(float(sum(naive)) / 60, abs=1e-4)


def test_no_example_chooses_its_own_temperature():
    """On labels without information the in-sample optimum is above the truth in the mean; this is not."""
    gains = []
    for seed in range(200):
        random = torch.Generator().manual_seed(seed)
        log_probs = torch.randn(20, 2, generator=random).double().log_softmax(-1)
        labels = torch.randint(0, 2, (20,), generator=random)
        gains.append(metrics.calibrated_log_likelihood(log_probs, labels, seed=seed) + math.log(2))
    gains = torch.tensor(gains)
    assert float(gains.mean()) < 2 * float(gains.std()) / len(gains) ** 0.5


def test_the_ensemble_equivalent_is_the_first_crossing():
    sizes, curve = torch.tensor([1, 2, 5, 10]), torch.tensor([-0.5, -0.4, -0.3, -0.28])
    for value, expected in ((-0.9, 1.0), (-0.5, 1.0), (-0.45, 1.5), (-0.3, 5.0), (-0.29, 7.5), (-0.2, math.inf)):
        assert metrics.deep_ensemble_equivalent(value, sizes, curve) == pytest.approx(expected, rel=1e-5)
    dip = torch.tensor([-0.5, -0.3, -0.4, -0.2])
    assert metrics.deep_ensemble_equivalent(-0.35, sizes, dip) == pytest.approx(1.75)


def test_bad_input_says_what_to_do():
    log_probs, labels = labelled(10)
    with pytest.raises(BatchbayesError, match="two examples"):
        metrics.calibrated_log_likelihood(log_probs[:1], labels[:1])
    with pytest.raises(BatchbayesError, match="ascending sizes"):
        metrics.deep_ensemble_equivalent(-0.3, torch.tensor([2, 1]), torch.tensor([-0.5, -0.4]))
    with pytest.raises(BatchbayesError, match="ascending sizes"):
        metrics.deep_ensemble_equivalent(float("nan"), torch.tensor([1, 2]), torch.tensor([-0.5, -0.4]))
