"""Rows that stand for all rows: the choice against a naive one, and what it is for."""

import pytest
import torch
from helpers.settled import X, settled
from torch import nn

import batchbayes as bb
from batchbayes.methods.batchnorm.thinning import chosen_rows

NETWORK = settled(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)))


def posterior(rows=120):
    return bb.mcbn(NETWORK, X, batch_size=40, num_samples=rows)


def features(moves):
    """Return what rows do to outputs, and all products of two parts of it, (R, d + d^2)."""
    moves = moves / moves.square().sum(1).mean().sqrt()
    return torch.cat([moves, (moves[:, :, None] * moves[:, None]).flatten(1)], dim=1)


def test_the_rows_are_those_of_a_naive_search():
    moves = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    every = features(moves)

    def distance(rows):
        return float((every[rows].mean(0) - every.mean(0)).square().sum())

    rows = [7]
    for turn in range(4 + 3 * 5):
        if turn >= 4:
            rows = rows[1:]
        rows.append(min((row for row in range(30) if row not in rows), key=lambda row: distance([*rows, row])))
    found = chosen_rows(moves @ moves.T, 5, first=7)
    assert found == rows
    random = torch.Generator().manual_seed(1)
    others = sorted(distance(torch.randperm(30, generator=random)[:5].tolist()) for _ in range(200))
    assert distance(found) < others[2]


def test_a_few_chosen_rows_are_nearer_than_as_many_others():
    every, new = posterior(), X[:60] + 0.1

    def variance(of, **options):
        return bb.predict(of, new, bb.gaussian(1.0), **options).epistemic_variance

    truth = variance(every)
    few = [float((variance(every.thinned(12, seed)) - truth).square().mean()) for seed in range(5)]
    plain = [float((variance(every, num_samples=12, seed=seed) - truth).square().mean()) for seed in range(20)]
    assert sum(few) / 5 < 0.5 * sum(plain) / 20


def test_all_rows_that_are_kept_are_rows_of_the_fit_and_are_drawn_once(tmp_path):
    every = posterior()
    few = every.thinned(12)
    assert len(few.deviations.unique(dim=0)) == few.num_functions == 12
    assert all((row == every.deviations).all(1).any() for row in few.deviations)
    assert torch.equal(every.thinned(12).deviations, few.deviations)
    assert not torch.equal(every.thinned(12, seed=1).deviations, few.deviations)
    bb.save(few, tmp_path / "few.safetensors")
    loaded = bb.load(tmp_path / "few.safetensors", NETWORK)
    answers = [bb.predict(each, X[:9], bb.categorical(), keep_draws=True).draws for each in (few, loaded)]
    assert answers[0].shape[0] == 12
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("make", "rows", "words"),
    [
        (lambda: posterior(8), 9, "at least 9 observed rows"),
        (lambda: posterior(8), 1, "num_rows as a whole number of at least 2"),
        (lambda: bb.stochastic_bn(NETWORK, X, batch_size=40), 2, "a posterior fitted by mcbn"),
    ],
)
def test_what_cannot_be_thinned_is_refused_in_words(make, rows, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        make().thinned(rows)
