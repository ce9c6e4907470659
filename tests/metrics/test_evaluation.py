"""`evaluate` against naive loops in float64, for each kind of predictive, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import nn

import batchbayes as bb
from batchbayes.metrics import evaluate
from batchbayes.predictive import summarised

CLASS_NAMES = ["nll", "accuracy", "brier", "ece", "mean_entropy", "mean_mutual_information", "error_auroc"]
VALUE_NAMES = ["nll", "rmse", "crps", "coverage_90", "width_90"]


def normal(*shape: int, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_entropy(row):
    return -sum(p * math.log(p) for p in row if p > 0)


def naive_of_classes(drawn, labels):
    """Loop over examples. Shapes: probabilities of each draw (S, N, K), labels (N,)."""
    probs, rows = drawn.mean(0), range(len(labels))
    answers, confidence = probs.argmax(-1), probs.max(-1)
    entropy = [naive_entropy(probs[n]) for n in rows]
    within = [np.mean([naive_entropy(one[n]) for one in drawn]) for n in rows]
    gap = 0.0
    for b in range(15):
        inside = [n for n in rows if b / 15 < confidence[n] <= (b + 1) / 15]
        gap += abs(sum(confidence[n] - (answers[n] == labels[n]) for n in inside))
    return {
        "nll": log_loss(labels, probs, labels=range(probs.shape[-1])),
        "accuracy": accuracy_score(labels, answers),
        "brier": np.mean([sum((p - (k == labels[n])) ** 2 for k, p in enumerate(probs[n])) for n in rows]),
        "ece": gap / len(labels),
        "mean_entropy": np.mean(entropy),
        "mean_mutual_information": np.mean(np.array(entropy) - within),
        "error_auroc": roc_auc_score(answers != labels, entropy),
    }


def naive_of_values(means, stds, targets):
    """Integrate and search for roots, example by example. Shapes: means and stds (S, N), targets (N,)."""
    densities, crps, ends = [], [], []
    for mean, std, target in zip(means.T, stds.T, targets, strict=True):
        densities.append(np.mean(stats.norm.pdf(target, mean, std)))

        def cdf(y, mean=mean, std=std):
            return np.mean(stats.norm.cdf(y, mean, std))

        low, high = (mean - 10 * std).min(), (mean + 10 * std).max()
        left = integrate.quad(lambda y, cdf=cdf: cdf(y) ** 2, min(low, target), target, epsabs=1e-10)[0]
        right = integrate.quad(lambda y, cdf=cdf: (1 - cdf(y)) ** 2, target, max(high, target), epsabs=1e-10)[0]
        crps.append(left + right)
        ends.append([optimize.brentq(lambda y, cdf=cdf, q=q: cdf(y) - q, low, high, xtol=1e-12) for q in (0.05, 0.95)])
    lower, upper = np.array(ends).T
    return {
        "nll": -np.mean(np.log(densities)),
        "rmse": np.mean((targets - means.mean(0)) ** 2) ** 0.5,
        "crps": np.mean(crps),
        "coverage_90": np.mean((lower <= targets) & (targets <= upper)),
        "width_90": np.mean(upper - lower),
    }


def naive_joint(means, stds, targets):
    """Loop over examples and draws. Shapes: means (S, N, D), stds (D,), targets (N, D)."""
    found = []
    for n, target in enumerate(targets):
        each = [np.prod(stats.norm.pdf(target, drawn[n], stds)) for drawn in means]
        found.append(-math.log(np.mean(each)))
    return np.mean(found)


def test_classes():
    draws, labels = 2 * normal(3, 60, 4), torch.arange(60) % 4
    found = evaluate(summarised(bb.categorical().summary(), draws), labels)
    assert list(found) == CLASS_NAMES
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(naive_of_classes(draws.softmax(-1).numpy(), labels.numpy()), abs=1e-9)
    again = evaluate(summarised(bb.categorical().summary(), draws.float()), labels.numpy())
    assert again == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (20, 3), (5, 1, 4, 3)])
def test_yes_or_no(shape):
    draws, targets = 2 * normal(3, *shape), (normal(*shape, seed=1) > 0.3).double()
    found = evaluate(summarised(bb.bernoulli().summary(), draws), targets)
    yes = draws.sigmoid().flatten(1)
    expected = naive_of_classes(torch.stack([1 - yes, yes], -1).numpy(), targets.flatten().long().numpy())
    assert found == pytest.approx(expected, abs=1e-9)
    if len(shape) > 1 and shape[1] == 1:
        assert evaluate(summarised(bb.bernoulli().summary(), draws), targets.squeeze(1)) == found


def test_pixels_of_the_ignored_label_do_not_count():
    draws, labels = 2 * normal(3, 4, 3, 5, 6), (normal(4, 5, 6, seed=1) > 0).long()  # (S, N, K, H, W), (N, H, W)
    labels[:, :2] = 255
    found = evaluate(summarised(bb.categorical(ignore_index=255).summary(), draws), labels)
    probs = draws.softmax(2).movedim(2, -1)[:, labels != 255]  # (S, n, K)
    assert found == pytest.approx(naive_of_classes(probs.numpy(), labels[labels != 255].numpy()), abs=1e-9)


def test_an_auroc_needs_right_and_wrong_answers():
    seen = summarised(bb.categorical().summary(), torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
    for labels, share in (([0, 1], 1.0), ([1, 0], 0.0)):
        found = evaluate(seen, labels)
        assert found["accuracy"] == share
        assert math.isnan(found["error_auroc"])


def test_a_truth_of_probability_zero_is_infinitely_surprising():
    seen = summarised(bb.categorical().summary(), torch.tensor([[[1e4, 0.0]]]))
    assert evaluate(seen, [1])["nll"] == math.inf


@pytest.mark.parametrize("shape", [(12,), (12, 1), (6, 2)])
def test_real_values(shape):
    draws, targets = normal(4, *shape), 1.5 * normal(*shape, seed=1)
    found = evaluate(summarised(bb.gaussian(precision=4.0).summary(), draws), targets)
    if shape == (6, 2):
        joint = naive_joint(draws.numpy(), [0.5, 0.5], targets.numpy())
        assert found.pop("joint_nll") == pytest.approx(joint, abs=1e-9)
    assert list(found) == VALUE_NAMES
    assert all(type(value) is float for value in found.values())
    means = draws.flatten(1).numpy()
    assert found == pytest.approx(naive_of_values(means, np.full_like(means, 0.5), targets.flatten().numpy()), abs=1e-7)
    if shape[-1] == 1:
        assert evaluate(summarised(bb.gaussian(precision=4.0).summary(), draws), targets[:, 0]) == found


def test_noise_that_the_network_predicts():
    draws, targets = normal(4, 12, 2), 1.5 * normal(12, 1, seed=1)  # a mean and a log variance
    found = evaluate(summarised(bb.heteroscedastic_gaussian().summary(), draws), targets)
    means, stds = draws[..., 0].numpy(), (0.5 * draws[..., 1]).exp().numpy()
    assert found == pytest.approx(naive_of_values(means, stds, targets[:, 0].numpy()), abs=1e-7)


def test_each_output_has_its_own_noise():
    draws, targets = normal(4, 6, 2), 1.5 * normal(6, 2, seed=1)
    found = evaluate(summarised(bb.gaussian(precision=[4.0, 1.0]).summary(), draws), targets)
    assert found.pop("joint_nll") == pytest.approx(naive_joint(draws.numpy(), [0.5, 1.0], targets.numpy()), abs=1e-9)
    means, stds = draws.flatten(1).numpy(), np.tile([0.5, 1.0], (4, 6))
    assert found == pytest.approx(naive_of_values(means, stds, targets.flatten().numpy()), abs=1e-7)


CLASSES = summarised(bb.categorical().summary(), normal(2, 3, 4))
PIXELS = summarised(bb.categorical(ignore_index=255).summary(), normal(2, 3, 4, 2, 2))
YES = summarised(bb.bernoulli().summary(), normal(2, 3))
VALUES = summarised(bb.gaussian(1.0).summary(), normal(2, 3))
SUMS = bb.predict(bb.deterministic(nn.Linear(2, 1)), torch.zeros(3, 2), bb.gaussian(1.0), keep_draws=False)


@pytest.mark.parametrize(
    ("predictive", "targets", "message"),
    [
        (torch.tensor([0, 1, 2]), CLASSES, "a predictive, and then its targets; got a Tensor"),
        (CLASSES.probs, torch.tensor([0, 1, 2]), "a Tensor as the first argument.*what bb.predict returned"),
        (CLASSES, torch.tensor([0, 1]), r"labels of shape \(3,\); got shape \(2,\)"),
        (CLASSES, torch.tensor([0, 1, 4]), "labels from 0 to 3; got 0 to 4"),
        (CLASSES, torch.tensor([0, 1, 255]), "ignore_index="),
        (CLASSES, torch.tensor([0.0, 1.0, 2.0]), "integer labels; got torch.float32"),
        (CLASSES, "cat", "as a tensor or an array of numbers; got a str"),
        (PIXELS, torch.full((3, 2, 2), 255), "at least one example"),
        (YES, torch.tensor([0, 1, 2]), "targets of 0 and 1"),
        (VALUES, torch.tensor([0.0, math.nan, 1.0]), "1 NaN"),
        (VALUES, torch.tensor([0.0, math.inf, 1.0]), "finite numbers"),
        (VALUES, torch.zeros(3, 3), r"targets of shape \(3,\)"),
        (SUMS, torch.zeros(3, 1), "keep_draws=True"),
    ],
)
def test_bad_input_is_refused(predictive, targets, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        evaluate(predictive, targets)
