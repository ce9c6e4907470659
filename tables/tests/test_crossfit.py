"""Rows, folds and the stack behind the estimators, against plain loops."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from batchbayes_tables.crossfit import Candidate, Recipe, cross_fit
from batchbayes_tables.forest import LEAVES, RATE, ROWS_OF_A_LEAF, STEPS, boost
from batchbayes_tables.linear import POOL_PENALTY, _logistic, logistic, pool_weights, pooled, ridge
from batchbayes_tables.regressor import mean_score, spread_gradient
from batchbayes_tables.rows import folds_of, ordered_rows
from batchbayes_tables.spread import Outlook, fit_spread
from batchbayes_tables.stack.stack import stack_networks, unstack
from batchbayes_tables.stack.train import train_stack
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeRegressor
from torch import nn
from torch.distributions import Normal, StudentT

from batchbayes._common.rng import stream_seed
from batchbayes.models import MLP
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train

DECAYS = Candidate(1e-4), Candidate(1e-1), Candidate(1e-4, 0.25)
RECIPE = Recipe((8,), DECAYS, 60, 16, 1e-2, 5, seed=0, loss=spread_gradient, score=mean_score)


def with_tail(y):
    return torch.cat([y, torch.zeros_like(y)], 1)


def test_a_stack_trained_by_cross_entropy_is_the_loop():
    x = torch.randn(64, 3)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    torch.manual_seed(0)
    networks = [MLP(3, [8], 3) for _ in range(2)]
    config = TrainingConfig(5, 16, 1e-2, weight_decay=1e-3, seed=4)
    stack = train_stack(
        stack_networks(networks),
        [(x, nn.functional.one_hot(labels, 3).float())] * 2,
        [config] * 2,
        loss="cross_entropy",
    )
    for network in networks:
        train(network, shuffled(x, labels, 16, seed=4), supervised(nn.functional.cross_entropy), config)
    copies = [MLP(3, [8], 3).eval() for _ in networks]
    unstack(stack, copies)
    for network, copied in zip(networks, copies, strict=True):
        torch.testing.assert_close(copied(x), network(x), rtol=1e-3, atol=1e-4)


def test_networks_have_not_seen_the_rows_that_they_calibrate():
    """If the targets of a fold change, the draws for it stay as they are: those by the seed whose fold it is."""
    x, y = torch.randn(90, 2), torch.randn(90, 1)
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    recipe = replace(RECIPE, candidates=DECAYS[:1])
    before = cross_fit(x, with_tail(y), folds, recipe).held_out_draws(x, folds)[..., 0]
    for seed in range(2):
        left_out = folds[seed] == 1
        changed = cross_fit(x, with_tail(torch.where(left_out[:, None], -5 * y, y)), folds, recipe)
        after = changed.held_out_draws(x, folds)[..., 0]
        assert torch.equal(before[seed][:, left_out], after[seed][:, left_out])
        assert not torch.equal(before[seed][:, ~left_out], after[seed][:, ~left_out])
        assert not torch.equal(before[1 - seed][:, left_out], after[1 - seed][:, left_out])


def test_held_out_draws_are_those_of_the_networks_that_left_the_row_out():
    x, y = torch.randn(50, 2), torch.randn(50, 1)
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    fit = cross_fit(x, with_tail(y), folds, RECIPE)
    drawn, all_draws = fit.held_out_draws(x, folds), fit.draws(x)
    for row in range(50):
        networks = [3 * seed + int(folds[seed, row]) for seed in range(2)]
        assert fit.fold_of_network[networks].tolist() == folds[:, row].tolist()
        torch.testing.assert_close(drawn[:, :, row], all_draws[networks, :, row])


def test_draws_are_networks_with_the_statistics_of_their_draw():
    x, y = torch.randn(60, 2), torch.randn(60, 1)
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    fit = cross_fit(x, with_tail(y), folds, RECIPE)
    drawn = fit.draws(x[:7])
    network = MLP(2, [8], 2).eval()
    unstack(fit.stack.select([4]), [network])
    norm = network.hidden[0].norm
    mean, std = (each[4, 3] for each in fit.statistics["hidden.0.norm"])
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(std.square() - norm.eps)
    torch.testing.assert_close(drawn[4, 3].float(), network(x[:7]).detach(), rtol=1e-4, atol=1e-5)
    point = fit.scaled(0.0).draws(x[:7])
    torch.testing.assert_close(point[:, 0], point[:, 1])
    unstack(fit.stack.select([4]), [network])
    torch.testing.assert_close(point[4, 0].float(), network(x[:7]).detach(), rtol=1e-4, atol=1e-5)


def test_copies_share_a_fold_and_folds_are_even():
    for folds in folds_of(np.repeat(np.arange(50), 3), 5, 2, seed=0):
        assert (folds.reshape(50, 3) == folds.reshape(50, 3)[:, :1]).all()
        assert np.bincount(folds).tolist() == [30] * 5
    assert [sorted(folds) for folds in folds_of(np.arange(3), 5, 2, seed=0)] == [[0, 1, 2]] * 2


def test_weights_that_are_not_whole_numbers_are_nearly_kept():
    random = np.random.default_rng(0)
    x, y, weights = random.standard_normal((200, 3)), random.standard_normal(200), random.uniform(0, 2, 200)
    rows, copies = ordered_rows(x, y, weights)
    counts = np.bincount(rows, minlength=200)
    wanted = weights * 4 * 200 / weights.sum()
    assert np.abs(counts - wanted).max() <= 1
    assert counts.sum() == 800
    assert (np.diff(copies) >= 0).all()
    assert (np.unique(copies, return_inverse=True)[1] == np.cumsum(np.diff(rows, prepend=rows[0]) != 0)).all()


def test_copies_have_the_same_folds_in_any_order_of_the_rows():
    random = np.random.default_rng(0)
    x, y, weights = random.standard_normal((60, 2)), random.standard_normal(60), random.uniform(0, 2, 60)
    x[10], y[10] = x[20], y[20]  # equal rows with other weights
    order = random.permutation(60)
    (rows, copies), (other, moved) = ordered_rows(x, y, weights), ordered_rows(x[order], y[order], weights[order])
    assert (x[rows] == x[order][other]).all()
    assert (copies == moved).all()


def test_the_gradient_of_mean_and_spread_is_that_of_the_density():
    """By autograd, in float64: half of the weight of the mean is taken away, and nothing else."""
    outputs = torch.randn(2, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.randn(2, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for degrees in (4.0, math.inf):
        tail = torch.full_like(targets[..., 1:], 1 / degrees)
        mean, spread = outputs[..., 0], outputs[..., 1].exp()
        family = StudentT(degrees, mean, spread) if degrees < math.inf else Normal(mean, spread)
        (wanted,) = torch.autograd.grad(-family.log_prob(targets[..., 0]).sum(), outputs)
        found = spread_gradient(outputs.detach(), torch.cat([targets[..., :1], tail], -1))
        torch.testing.assert_close(found[..., 1], wanted[..., 1])
        torch.testing.assert_close(found[..., 0], wanted[..., 0] * spread.detach())


def test_the_learning_rate_follows_its_schedule():
    x, y = torch.randn(32, 2), torch.randn(32, 1)
    config, seen = TrainingConfig(3, 16, 1e-2, seed=0), []
    stack = stack_networks([MLP(2, [4], 1)])
    trained = train_stack(stack, [(x, y)], [config], schedule=lambda done: seen.append(done) or 0.0)
    np.testing.assert_allclose(seen, np.arange(6) / 6)
    assert torch.equal(trained.tensors["output.weight"], stack.tensors["output.weight"])


def test_training_ends_when_it_no_longer_helps():
    """Noise cannot be learnt: one round is enough. A function without noise takes all of them."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(400, 2, generator=random) * 4 - 2
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    recipe = replace(RECIPE, num_steps=2000, batch_size=32, hidden_widths=(32,))
    noise = cross_fit(x, with_tail(torch.randn(400, 1, generator=random)), folds, recipe)
    assert noise.num_rounds == 1
    assert cross_fit(x, with_tail(torch.sin(2 * x[:, :1])), folds, recipe).num_rounds >= 3


def test_ridge_is_least_squares_of_the_other_folds_with_a_penalty():
    random = np.random.default_rng(0)
    x, folds = random.standard_normal((40, 3)), folds_of(np.arange(40), 4, 2, seed=0)
    y = x @ [1.0, -2.0, 0.5] + 3 + 0.1 * random.standard_normal(40)
    linear, held_out = ridge(torch.from_numpy(x), torch.from_numpy(y)[:, None], torch.from_numpy(folds))
    for seed, fold in np.ndindex(2, 4):
        used = folds[seed] != fold
        middle, level = x[used].mean(0), y[used].mean()
        centred = x[used] - middle
        weight = np.linalg.solve(centred.T @ centred + 1.0 * np.eye(3), centred.T @ (y[used] - level))
        predicted = (x - middle) @ weight + level
        np.testing.assert_allclose(linear(torch.from_numpy(x))[4 * seed + fold, :, 0], predicted)
        if seed == 0:
            np.testing.assert_allclose(held_out[folds[0] == fold, 0], predicted[folds[0] == fold])


def test_logistic_regression_is_that_of_scikit_learn():
    random = np.random.default_rng(0)
    x, folds = random.standard_normal((90, 2)), folds_of(np.arange(90), 3, 2, seed=0)
    labels = (x[:, 0] + random.standard_normal(90) > 0).astype(int) + (x[:, 1] > 1)
    unit = np.array([1.0, 0.25])
    one_hot = torch.from_numpy(np.eye(3)[labels])
    fits = _logistic(torch.from_numpy(x), one_hot, torch.from_numpy(folds), torch.from_numpy(unit), (5.0,))
    probs = fits[0](torch.from_numpy(x)).softmax(-1).numpy()
    for seed, fold in np.ndindex(2, 3):
        used = folds[seed] != fold
        other = LogisticRegression(C=1 / 5, tol=1e-8, max_iter=1000).fit(x[used] * unit, labels[used])
        np.testing.assert_allclose(probs[3 * seed + fold], other.predict_proba(x * unit), atol=1e-3)


def test_logistic_regression_leaves_out_bins_that_do_not_help():
    random = np.random.default_rng(0)
    plain, noise = torch.from_numpy(random.standard_normal((80, 1))), torch.from_numpy(random.standard_normal((80, 30)))
    folds = torch.from_numpy(folds_of(np.arange(80), 4, 2, seed=0))
    labels = (plain[:, 0] + 0.5 * torch.from_numpy(random.standard_normal(80)) > 0).double()
    fit = logistic(torch.cat([plain, noise], 1), torch.stack([1 - labels, labels], 1), folds, torch.arange(31) > 0)
    assert (fit.weight[:, 1:] == 0).all()
    assert (fit.weight[:, 0, 1] > 0.3).all()


def test_weights_of_models_are_the_best_of_a_grid_and_few_rows_hardly_move_them():
    random = np.random.default_rng(0)
    logits = random.standard_normal((600, 3))
    labels = np.array([random.choice(3, p=np.exp(each) / np.exp(each).sum()) for each in logits])
    one_hot = torch.from_numpy(np.eye(3)[labels])
    models = torch.from_numpy(np.stack([3 * logits, random.standard_normal((600, 3))])).log_softmax(-1)
    found = pool_weights(models, one_hot)
    grid = [torch.tensor(pair).double() for pair in product(np.linspace(0, 0.6, 31), repeat=2)]

    def loss(weights):
        return float(-(one_hot * pooled(models, weights)).sum() + POOL_PENALTY / 2 * (weights - 0.5).square().sum())

    best = min(grid, key=loss)
    assert loss(found) <= loss(best)
    np.testing.assert_allclose(found, best, atol=0.02)
    assert float(found[0]) == pytest.approx(1 / 3, abs=0.05)  # three times too confident; 3 standard errors
    assert 0 <= float(found[1]) < 0.2  # noise; the penalty keeps a little of it
    few = pool_weights(models[:, :3], one_hot[:3])
    assert (few - 0.5).abs().max() < 0.2


def test_boosting_is_a_plain_loop_over_leaves_and_has_not_seen_its_fold():
    random = np.random.default_rng(0)
    x, folds = random.standard_normal((90, 2)).astype(np.float32), torch.arange(90) % 3
    labels = (x[:, 0] > 0).astype(int) + (x[:, 1] * x[:, 0] > 0.5)
    one_hot = np.eye(4)[labels]  # the last class never occurs
    inputs, classes = torch.from_numpy(x), torch.from_numpy(one_hot)
    model = boost(inputs, classes, folds, seed=0)
    for fold in range(3):
        used = (folds != fold).numpy()
        logits = np.tile(np.log((one_hot[used].sum(0) + 1) / 64), (90, 1))
        for step in range(STEPS):
            probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            state = stream_seed(stream_seed(0, "boosting", fold), "steps", step) % 2**32
            tree = DecisionTreeRegressor(max_leaf_nodes=LEAVES, min_samples_leaf=ROWS_OF_A_LEAF, random_state=state)
            leaves = tree.fit(x[used], (one_hot - probs)[used]).apply(x)
            for leaf in np.unique(leaves):
                rows = (leaves == leaf) & used
                slope, curvature = (one_hot - probs)[rows].sum(0), (probs * (1 - probs))[rows].sum(0)
                logits[leaves == leaf] += RATE * slope / (1 + curvature)
        np.testing.assert_allclose(model(inputs)[fold], logits, atol=1e-9)
    other = classes.clone()
    other[folds == 1] = other[folds == 1].flip(1)
    held_out = model.held_out(inputs, folds)
    np.testing.assert_array_equal(boost(inputs, other, folds, seed=0).held_out(inputs, folds)[1::3], held_out[1::3])
    assert (held_out.argmax(1).numpy() == labels).mean() > 0.8


def test_the_spread_follows_the_inputs_and_rows_do_not_judge_themselves():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (1500, 3))
    std, variance = np.exp(x[:, 0] - 1), np.full(1500, 1e-8)
    errors = torch.from_numpy(std * random.standard_normal(1500))
    outlook = Outlook(torch.zeros(1500).double(), torch.zeros(1500).double(), torch.from_numpy(variance))
    folds = torch.from_numpy(folds_of(np.arange(1500), 5, 1, seed=0))[0]
    spread, held_out = fit_spread(errors, outlook, torch.from_numpy(x), folds)
    data, model = spread.parts(outlook, torch.from_numpy(x))
    ratio = (data + model).sqrt().numpy() / std
    assert ratio.std() / ratio.mean() < 0.1
    changed = torch.where(folds == 2, 5 * errors, errors)
    _, after = fit_spread(changed, outlook, torch.from_numpy(x), folds)
    rows = folds == 2
    assert (after[~rows] > 1.1 * held_out[~rows]).float().mean() > 0.9
    np.testing.assert_allclose(after[rows], held_out[rows], rtol=0.05)  # the penalty alone may change
