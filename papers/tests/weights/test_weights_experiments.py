"""The experiments on random weights, in their smallest preset."""

import copy
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from batchbayes_papers import image_networks
from batchbayes_papers.image_networks import Course
from batchbayes_papers.mcbn import mnf_uci
from batchbayes_papers.models.row_lstm import RowLSTM
from batchbayes_papers.models.vgg_like import VGGLike
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.weights import (
    gradient_variance,
    left_weights,
    mean_propagation,
    random_labels,
    sparse_vd,
    variance_claims,
    variance_networks,
    vgg_like,
)
from batchbayes_papers.weights.propagation import bits_needed
from helpers.experiments import run_experiment
from torch import nn

import batchbayes as bb

MODULES = [
    gradient_variance,
    mean_propagation,
    mnf_uci,
    random_labels,
    sparse_vd,
    variance_claims,
    variance_networks,
    vgg_like,
]


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


def test_the_vgg_like_network_is_the_published_one():
    network = VGGLike(0.0625, (1.0, 1.0))
    rates = [module.p for module in network.modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.3, *[0.4] * 7, 0.5, 0.5]
    channels = [module.out_channels for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert channels == [4, 4, 8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 32]
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_variance_layers_are_the_last_convolutions_and_the_hidden_dense_layer():
    config = replace(vgg_like.PRESETS["smoke"], dropout=(0.5, 0.5), variance=Course(0, 20, 1e-3))
    dense = vgg_like.new_network(config, 0.0625, config.dropout)
    random = vgg_like.variance_network(config, dense, vgg_like.load(config, 60, None))
    means = {name: parameter.abs().sum() for name, parameter in random.module.named_parameters() if parameter.ndim > 1}
    assert [name for name, total in means.items() if total == 0] == [site.name for site in random.sites]
    assert list(means)[10:14] == [site.name for site in random.sites]
    torch.testing.assert_close(random.module.features[0].weight, dense.features[0].weight)
    assert {module.p for module in random.module.modules() if isinstance(module, nn.Dropout)} == {0.0}
    assert dense.dropout1.p == 0.25  # the dense network keeps its dropout


def test_a_vgg_like_network_memorises_random_labels():
    recipe = Course(40, 20, 3e-3, "adam")
    config = replace(vgg_like.PRESETS["smoke"], labels_dropout=recipe, dropout=(0.0, 0.2))
    data = vgg_like.load(config, config.labels_train, None)
    assert vgg_like.random_labels_result(config, data, "binary dropout")["train"] > 80


def test_the_picture_has_the_weights_that_are_left():
    posterior = bb.noisy(image_networks.new_network("LeNet-5", 0), bb.SparseVD(initial_log_var=-6.0)).posterior()
    left = left_weights.left_weights(posterior)
    for name, given in posterior.distributions.items():
        assert 0 < len(left[name]["places"]) < given.mean.numel()
        found = left_weights.full_weight(left[name], given.mean.shape)
        torch.testing.assert_close(found, given.mean, atol=1e-5, rtol=0)
    image = left_weights.first_layer({"conv1.weight": posterior.distributions["conv1.weight"].mean})
    torch.testing.assert_close(image[6:11, 12:17], posterior.distributions["conv1.weight"].mean[7, 0])


def test_an_lstm_reads_the_rows_of_an_image_from_top_to_bottom():
    network = RowLSTM()
    image = torch.randn(1, 1, 28, 28)
    state = None
    for row in image[0, 0]:
        _, state = network.lstm(row[None, None], state)
    torch.testing.assert_close(network(image), network.output(state[0][0]))


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
