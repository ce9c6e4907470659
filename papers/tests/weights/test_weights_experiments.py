"""The experiments on random weights, in their smallest preset."""

import copy
import math
from importlib import import_module

import pytest
import torch
from batchbayes_papers import image_networks
from batchbayes_papers.mcbn import mnf_uci
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.weights import (
    gradient_variance,
    mean_propagation,
    random_labels,
    sparse_vd,
    variance_claims,
    variance_networks,
)
from batchbayes_papers.weights.propagation import bits_needed
from helpers.experiments import run_experiment
from torch import nn

import batchbayes as bb

MODULES = [gradient_variance, mean_propagation, mnf_uci, random_labels, sparse_vd, variance_claims, variance_networks]


@pytest.fixture(scope="module", params=MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def finished(request):
    module = import_module(request.param.__name__)
    return module, run_experiment(module, module.PRESETS["smoke"])


def test_tables_of_finished_and_unfinished_runs(finished):
    module, results = finished
    config = module.PRESETS["smoke"]
    for table, empty in zip(module.tables(config, results), module.tables(config, {}), strict=True):
        assert to_markdown(table)
        assert empty.columns == table.columns
        assert table.rows
    assert all(note.endswith(".") for note in module.notes(config))


def test_figures_are_drawn(finished):
    module, results = finished
    figures = module.figures(module.PRESETS["smoke"], results) if hasattr(module, "figures") else {}
    for figure in figures.values():
        assert any(panel.get_lines() for panel in figure.axes)


def test_dropout_memorises_random_labels():
    config = random_labels.PRESETS["smoke"]
    (unit, _) = random_labels.units(config)
    assert random_labels.work(config, unit, {})["train"] > 95


def test_the_largest_weights_are_kept():
    weight = torch.randn(6, 5)
    mask = sparse_vd.largest(weight, 0.8)
    assert mask.sum() == 6
    assert weight[mask == 1].abs().min() > weight[mask == 0].abs().max()


def test_training_and_test_images_have_one_mean_image_subtracted():
    data = image_networks.load_images("synthetic", 50, 20)
    torch.testing.assert_close(data.train[0].mean(0), torch.zeros(1, 28, 28), atol=1e-6, rtol=0)
    assert data.test[0].mean(0).abs().max() > 0.01


def test_the_bits_are_those_of_the_weights_before_rounding():
    """Rounding makes narrow weights zero here, and zeros do not count for the spread of a layer."""
    random = bb.noisy(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), bb.MeanField(initial_std=0.01))
    with torch.no_grad():
        random.module[1].weight.fill_(1e-3)
        random.module[1].weight[0] = 1.0
        random.own["1:weight:log_std"][0] = math.log(0.1)
    data = image_networks.load_images("synthetic", 10, 10)
    expected = bits_needed(random.posterior())
    assert mean_propagation.bits_result(random.posterior(), data)["bits"] == expected


@pytest.fixture(scope="module")
def head():
    """Return a trained LeNet-5 with noise in its hidden dense layer, and its layers from there on."""
    config, data = mean_propagation.PRESETS["smoke"], image_networks.load_images("synthetic", 200, 60)
    network = bb.noisy(variance_networks.new_lenet(), bb.VariationalDropout("layer"), layers=["dense1"])
    variance_networks.DropoutCourse(200, 1, 50, 5e-3).fit(network, data)
    posterior = network.posterior()
    return config, posterior, data, mean_propagation.Head.of(posterior, data.test)


def test_layers_after_the_noise_give_what_the_whole_network_gives(head):
    _, posterior, data, own = head
    weight = posterior.weights(0, 3)["dense1.weight"]
    of_batch = {"norm3.running_mean": None, "norm3.running_var": None}
    for statistics, others in (("running", {}), ("of the batch", of_batch)):
        outputs = posterior.network(data.test[0], tensors={"dense1.weight": weight, **others})
        torch.testing.assert_close(own.network.dense2(own.hidden(weight, statistics)), outputs)
        right = 100 * float((outputs.argmax(1) == data.test[1]).double().mean())
        assert own.accuracy(weight, statistics) == pytest.approx(right)


def test_accuracies_are_those_of_draws_with_means_or_zeros_where_there_is_no_noise(head):
    config, posterior, _, own = head
    noisy = torch.rand(500, 800) < 0.3
    mean, expected = posterior.distributions["dense1.weight"].mean, {"means": 0.0, "zeros": 0.0}
    for index in range(config.num_draws):
        drawn = posterior.weights(0, index)["dense1.weight"]
        expected["means"] += own.accuracy(torch.where(noisy, drawn, mean), "running") / config.num_draws
        expected["zeros"] += own.accuracy(drawn * noisy, "running") / config.num_draws
    found = mean_propagation.accuracies(config, posterior, own, noisy)
    assert {fill: found[fill]["running"] for fill in expected} == pytest.approx(expected)


def test_kappa_is_zero_behind_units_that_are_off_at_the_means_and_not_over_draws(head):
    """A unit whose inputs are always negative at the means has no gradient. With much noise, draws switch it on."""
    config, posterior, data, _ = head
    off = bb.noisy(copy.deepcopy(posterior.network.module), bb.VariationalDropout("layer"), layers=["dense1"])
    with torch.no_grad():
        off.module.dense1.weight[:50].abs_().neg_()
        off.module.norm3.bias[:50] = -1.0
        off.module.norm3.running_mean[:50] = 0.0
        off.parameters_of(off.sites[0])["log_alpha"].fill_(7.0)
    own = off.posterior()
    dead = mean_propagation.dead_units(own, data.train)
    assert dead["at the means"] >= 0.1 > dead["in a draw"]
    orders = mean_propagation.orders_of(config, own, data.train)
    assert (orders[mean_propagation.AT_MEANS][:50] == 0).all()
    assert (orders[mean_propagation.OVER_DRAWS][:50] > 0).double().mean() > 0.5
