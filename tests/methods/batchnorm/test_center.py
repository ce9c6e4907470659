"""Draws scatter around the network's own answer, unless the paper's centre is asked for, and a warning says if not."""

import warnings

import pytest
import torch
from helpers.settled import settled
from torch import nn

import batchbayes as bb

X = torch.randn(600, 4, generator=torch.Generator().manual_seed(3))


def deep(x=X):
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())]
    return settled(nn.Sequential(*layers, nn.Linear(4, 3)), x)


@pytest.mark.parametrize("fit", [bb.mcbn, bb.stochastic_bn, bb.correlated_bn, bb.clt_bn])
def test_the_default_centre_is_the_network(fit):
    network = deep()
    posterior = fit(network, X, batch_size=50)
    assert posterior.centered_on == "running"
    torch.testing.assert_close(posterior.function(posterior.center)(X), network(X))
    assert fit(network, X, batch_size=50, center="batches").centered_on == "batches"


def test_a_network_without_running_statistics_is_centred_on_batches():
    network = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)).eval()
    assert bb.mcbn(network, X, batch_size=50).centered_on == "batches"


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_draws_beside_the_network_are_remarked_whatever_the_number_of_batches(count):
    """Batches whose examples are all alike: their statistics are far from those of training in deeper layers."""
    network, alike = deep(), 0.3 * X + torch.tensor([0.1, -0.1, 0.0, 0.1])
    with pytest.warns(bb.BatchbayesWarning, match=r"WARNING: (on training data|the batches do not look)"):
        bb.mcbn(network, list(alike.split(16))[:count], center="batches", num_samples=count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.mcbn(network, list(X.split(64))[:count], num_samples=count)


def test_draws_that_are_too_wide_name_the_unknown_batch_size():
    network = deep()
    with pytest.warns(bb.BatchbayesWarning, match="The batch size of training is not known"):
        bb.mcbn(network, X, batch_size=2)
    with pytest.warns(bb.BatchbayesWarning, match="WARNING: on training data") as caught:
        bb.mcbn(network, X, batch_size=2, training_batch_size=2)
    assert "not known" not in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:WARNING")
@pytest.mark.parametrize("options", [{"batch_size": 50}, {"batch_size": 4}, {"batch_size": 50, "center": "batches"}])
def test_a_fit_takes_few_passes_more_than_it_has_rows_and_a_prediction_one_for_each_row(options):
    network, passes = deep(), []
    network.register_forward_pre_hook(lambda *_: passes.append(None))
    posterior = bb.mcbn(network, X, num_samples=8, **options)
    assert len(passes) <= 8 + 2 + 8  # for its rows, for a look at the network, and for its facts
    passes.clear()
    answer = bb.predict(posterior, X[:5], bb.categorical(), num_samples=64)  # also tries whether draws are functions
    passes.clear()
    again = bb.predict(posterior, X[:5], bb.categorical(), num_samples=64)
    assert len(passes) == 8
    assert torch.equal(answer.probs, again.probs)
    each = torch.stack([posterior.draw(0, index)(X[:5]).softmax(1) for index in range(64)])  # each row eight times
    torch.testing.assert_close(again.probs, each.mean(0))


def test_draws_that_blur_the_answers_are_remarked():
    """Many classes with small differences of their logits: draws that scatter little may still hide which is best."""
    torch.manual_seed(0)
    network = settled(nn.Sequential(nn.Linear(4, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 40)), X)
    with torch.no_grad():
        network[-1].weight *= 10
        own = network(X[:64]).softmax(1)
    with pytest.warns(bb.BatchbayesWarning, match="WARNING: on training data, the draws raise the entropy"):
        posterior = bb.mcbn(network, X, batch_size=8)
    drawn = bb.predict(posterior, X[:64], bb.categorical(), num_samples=64).entropy
    assert drawn.mean() > 0.3 - torch.special.xlogy(own, own).sum(1).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.mcbn(network, X, batch_size=100)
