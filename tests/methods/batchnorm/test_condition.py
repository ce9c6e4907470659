"""The state of batch norm: layers that were never trained, and layers that were frozen."""

import warnings

import pytest
import torch
from torch import nn

import batchbayes as bb

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def trained(affine=True):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5, affine=affine), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)
    )
    with torch.no_grad():
        for _ in range(8):
            for batch in X.split(8):
                network(batch)
    return network.eval()


FITS = [bb.mcbn, bb.stochastic_bn, bb.clt_bn]


@pytest.mark.parametrize("fit", FITS)
def test_a_network_that_was_never_trained(fit):
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(bb.BatchbayesWarning, match="^the batch-norm layers have never been trained.*weights loaded"):
        fit(network, X, batch_size=8)


def test_weights_without_their_buffers():
    network = trained()
    with torch.no_grad():
        network[1].weight.fill_(0.7)
    network[1].reset_running_stats()
    with pytest.warns(bb.BatchbayesWarning, match=r"^1 of 2 batch-norm layers \(1\) has never been trained.*buffers"):
        bb.mcbn(network, X, batch_size=8)


@pytest.mark.parametrize("how", ["mode", "gradient"])
def test_frozen_layers(how):
    network = trained()
    if how == "mode":
        network.train()
        network[1].eval()
    else:
        network[1].requires_grad_(False)
    with pytest.warns(bb.BatchbayesWarning, match=r"^1 of 2 batch-norm layers \(1\) is frozen.*sites="):
        bb.mcbn(network, X, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.mcbn(network, X, batch_size=8, sites="4")


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("state", ["train", "eval", "no gradients", "no counter", "no statistics", "not affine"])
def test_ordinary_networks_give_no_warning(fit, state):
    network = trained(affine=state != "not affine")
    if state == "train":
        network.train()
    elif state == "no gradients":
        network.requires_grad_(False)
    elif state == "no counter":
        network[1].num_batches_tracked.zero_()
    elif state == "no statistics":
        if fit is bb.clt_bn:
            return
        network[1] = nn.BatchNorm1d(5, track_running_stats=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(network, X, batch_size=8)
