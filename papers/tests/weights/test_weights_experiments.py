"""The experiments on random weights, in their smallest preset."""

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
