"""Rows, folds and the stack behind the estimators, against plain loops."""

import numpy as np
import torch
from torch import nn

from batchbayes.models import MLP
from batchbayes.sklearn.crossfit import Recipe, cross_fit
from batchbayes.sklearn.estimator import folds_of, ordered_rows
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, supervised, train
from batchbayes.training.stack.stack import stack_networks, unstack
from batchbayes.training.stack.train import train_stack

RECIPE = Recipe((8,), (1e-4, 1e-1), 60, 16, 1e-2, 5, seed=0, loss="half_squared_error")


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
    recipe = Recipe((8,), (1e-4,), 60, 16, 1e-2, 5, seed=0, loss="half_squared_error")
    before = cross_fit(x, y, folds, recipe).held_out_draws(x, folds).reshape(2, 5, 90)
    for seed in range(2):
        left_out = folds[seed] == 1
        changed = cross_fit(x, torch.where(left_out[:, None], -5 * y, y), folds, recipe)
        after = changed.held_out_draws(x, folds).reshape(2, 5, 90)
        assert torch.equal(before[seed][:, left_out], after[seed][:, left_out])
        assert not torch.equal(before[seed][:, ~left_out], after[seed][:, ~left_out])
        assert not torch.equal(before[1 - seed][:, left_out], after[1 - seed][:, left_out])


def test_held_out_draws_are_those_of_the_networks_that_left_the_row_out():
    x, y = torch.randn(50, 2), torch.randn(50, 1)
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    fit = cross_fit(x, y, folds, RECIPE)
    drawn, all_draws = fit.held_out_draws(x, folds).reshape(2, 5, 50), fit.draws(x).reshape(6, 5, 50)
    for row in range(50):
        networks = [3 * seed + int(folds[seed, row]) for seed in range(2)]
        assert fit.fold_of_network[networks].tolist() == folds[:, row].tolist()
        torch.testing.assert_close(drawn[:, :, row], all_draws[networks, :, row])


def test_draws_are_networks_with_the_statistics_of_their_draw():
    x, y = torch.randn(60, 2), torch.randn(60, 1)
    folds = torch.from_numpy(folds_of(np.arange(len(x)), 3, 2, seed=0))
    fit = cross_fit(x, y, folds, RECIPE)
    drawn = fit.draws(x[:7]).reshape(6, 5, 7, 1)
    network = MLP(2, [8], 1).eval()
    unstack(fit.stack.select([4]), [network])
    norm = network.hidden[0].norm
    mean, std = (each[4, 3] for each in fit.statistics["hidden.0.norm"])
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(std.square() - norm.eps)
    torch.testing.assert_close(drawn[4, 3].float(), network(x[:7]).detach(), rtol=1e-4, atol=1e-5)
    point = fit.scaled(0.0).draws(x[:7]).reshape(6, 5, 7, 1)
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
    assert (copies == rows).all()
