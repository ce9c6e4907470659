"""Experiments with several networks, on made-up data, from units to tables and figures."""

import pytest
from batchbayes_papers.attacks import experiment as attack
from batchbayes_papers.online import experiment as online
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.samples import active_learning, distillation, sg_mcmc
from batchbayes_papers.samples.distillation import ENSEMBLE, SINGLE, StudentRow, kept_gain
from helpers.experiments import run_experiment

EXPECTED = {
    active_learning: ("mutual information, jointly", {"accuracy-against-labels"}),
    attack: ("deep ensemble", {"success-of-attacks-along-the-gradient", "success-of-attacks-along-the-sign"}),
    distillation: ("Dirichlet student", {"NLL-of-each-seed"}),
    online: ("synthetic", {"NLL-after-each-part"}),
    sg_mcmc: ("SGHMC", {"first-weight-along-chains"}),
}


@pytest.mark.parametrize("module", EXPECTED, ids=lambda module: module.__name__.removeprefix("batchbayes_papers."))
def test_from_units_to_tables(module):
    config, (word, names) = module.PRESETS["smoke"], EXPECTED[module]
    results = run_experiment(module, config)
    assert word in to_markdown(module.tables(config, results)[0])
    assert set(module.figures(config, results)) == names
    assert module.notes(config)
    module.tables(config, {})  # of a run that has just begun


def test_the_share_of_the_gain_that_is_kept():
    found = [StudentRow(0, method, 1, 0.9, nll, None) for method, nll in ((SINGLE, 0.5), ("s", 0.42), (ENSEMBLE, 0.4))]
    assert kept_gain(found, "s") == pytest.approx([0.8])


def test_the_exact_posterior_is_that_of_the_problem():
    x, y, mean, covariance = sg_mcmc.problem()
    loss = (sg_mcmc.TAU * x.T @ (x @ mean - y)) + sg_mcmc.DELTA * mean
    assert loss.abs().max() < 1e-8
    assert covariance.shape == (3, 3)
