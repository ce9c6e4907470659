"""The batch size with the highest ELBO, and why it grows with the number of examples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batchbayes_papers.sbn import elbo_batch_size as elbo
from helpers.experiments import run_experiment

import batchbayes as bb
from batchbayes.models import MLP

SMOKE = elbo.PRESETS["smoke"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_experiment(elbo, SMOKE)


def test_tables_and_figures_show_the_optima(results: dict[str, Any]) -> None:
    (table,) = elbo.tables(SMOKE, results)
    best = [results[f"N = {size}, seed 0"]["best"] for size in SMOKE.sizes]
    assert [row[1] for row in table.rows] == pytest.approx(best)
    assert table.rows[1][3] == pytest.approx(best[1] / best[0])
    assert best[1] > 2 * best[0]
    curves, optima = elbo.figures(SMOKE, results)["ELBO-over-batch-size"].axes
    assert [max(line.get_ydata()) for line in curves.get_lines()] == [0, 0]
    assert list(optima.get_lines()[0].get_ydata()) == best
    assert elbo.tables(SMOKE, {})[0].rows[0] == (128, None, "", None, None, None)


def test_several_seeds_have_a_geometric_mean() -> None:
    config = replace(SMOKE, sizes=(128,), seeds=(0, 1))
    found = {f"N = 128, seed {seed}": {"best": best, "accuracy": 0.5} for seed, best in enumerate((4.0, 16.0))}
    ((_, mean, each, _, share, _),) = elbo.tables(config, found)[0].rows
    assert (mean, each, share) == (pytest.approx(8), "4 16", pytest.approx(8 / 128))


def test_the_optimum_of_one_network_is_proportional_to_the_number_of_examples() -> None:
    """N only weighs the likelihood, and the KL has D / 2 log M in it: M = 2 N c / D, far below the number of rows."""
    torch.manual_seed(0)
    network = MLP(6, [5], 3).eval()
    x = torch.randn(2000, 6)
    y = torch.distributions.Categorical(logits=3 * network(x).detach()).sample()
    posterior = bb.mcbn(network, x, batch_size=50, num_samples=64)
    config = replace(SMOKE, num_samples=64)
    few, many = (elbo.elbo_optimum(posterior, (x, y), size, config) for size in (2000, 8000))
    assert many.batch_size / few.batch_size == pytest.approx(4, rel=0.1)
    slopes = few.curve.kl.diff() * 2000 / few.curve.batch_sizes.double().log().diff()
    near_a_hundred = int((few.curve.batch_sizes < 100).sum())
    assert float(slopes[near_a_hundred]) == pytest.approx(2 * 5 / 2, rel=0.1)
