"""What is found in the batch-norm layers is said: never trained, without buffers, frozen."""

import warnings

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.methods.batchnorm.like_training import order_message
from batchbayes.methods.batchnorm.sites import all_sites

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def trained():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimiser = torch.optim.SGD(network.parameters(), 0.1)
    for batch in 10 * X.split(8):
        optimiser.zero_grad()
        network(batch).square().mean().backward()
        optimiser.step()
    return network


def fresh(network):
    for layer in (network[1], network[4]):
        layer.reset_parameters()


def without_buffers(network):
    for layer in (network[1], network[4]):
        layer.reset_running_stats()


def one_fresh(network):
    network[4].reset_parameters()


def resting(network):
    network.train()
    network[1].eval()


def without_gradients(network):
    network[4].requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fresh, r"the batch-norm layers have never been trained.*Were the weights loaded\?"),
        (without_buffers, r"never been trained.*Did the file of weights hold the buffers too\?"),
        (one_fresh, r"1 of 2 batch-norm layers \(4\) has never been trained"),
        (resting, r"1 of 2 batch-norm layers \(1\) is frozen.*sites="),
        (without_gradients, r"1 of 2 batch-norm layers \(4\) is frozen"),
    ],
)
def test_the_condition_of_the_layers_is_told(change, message):
    network = trained().eval()
    change(network)
    with pytest.warns(bb.BatchbayesWarning, match=message):
        bb.mcbn(network, X, batch_size=8, num_samples=4)


def test_a_trained_network_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(bb.mcbn(trained().eval(), X, batch_size=8, num_samples=4).sites) == 2


def test_batches_in_the_order_of_classes_are_noticed():
    """Their statistics are those of single classes: draws would scatter far too much, and be wrong."""
    random = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(200, 3, generator=random) + shift for shift in (-3, 3)])
    mixed = x[torch.randperm(len(x), generator=random)]
    network = trained()
    network(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "WARNING: the batches do not look like")
        bb.mcbn(network.eval(), mixed.split(16))
        with pytest.raises(bb.BatchbayesWarning, match=r"vary 1[0-9].* times .*Shuffle it"):
            bb.mcbn(network.eval(), x.split(16))


def test_images_in_the_order_of_classes_are_noticed():
    """Pixels of one image vary far more than the means of images, so the means of batches vary little in this unit."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 1, 8, 8, generator=random)
    x = x + 0.3 * torch.arange(4.0).repeat_interleave(300)[:, None, None, None]
    mixed = x[torch.randperm(len(x), generator=random)]
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    for batch in mixed.split(16):
        network(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.mcbn(network.eval(), mixed.split(16))
        with pytest.raises(bb.BatchbayesWarning, match=r"like the ones before them: .*Shuffle it"):
            bb.mcbn(network.eval(), x.split(16))


def test_random_batches_are_hardly_ever_called_ordered():
    layer = nn.BatchNorm1d(1)
    site = all_sites(nn.Sequential(layer))[0]
    random, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(2000):
        rows = torch.cat([torch.randn(64, 1, generator=random) / 8, torch.zeros(64, 1)], 1)
        alarms += order_message(site, rows, 64) is not None
    assert alarms <= 2  # 0.06 expected
