"""Noise in the outputs of a layer: where it serves, and where weights are drawn instead or words refuse it."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from helpers.noisy_cases import FAMILIES
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchbayes as bb


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x))


class Checkpointed(nn.Sequential):
    def __init__(self, reentrant):
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


def test_activation_checkpoints_are_refused_or_see_the_weights_that_were_drawn():
    torch.manual_seed(0)
    network = Checkpointed(False)
    data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    for each in (network, Checkpointed(True)):
        with pytest.raises(bb.BatchbayesError, match=r'activation checkpoint.*estimator="weights"'):
            bb.variational(each, data, epochs=1)
    with pytest.raises(bb.BatchbayesError, match=r"checkpoint with use_reentrant=True.*pass use_reentrant=False"):
        bb.variational(Checkpointed(True), data, epochs=1, estimator="weights")
    plain = nn.Sequential(*copy.deepcopy(network))
    found, expected = (bb.variational(n, data, epochs=3, estimator="weights") for n in (network, plain))
    for name, weight in expected.network.module.state_dict().items():
        torch.testing.assert_close(found.network.module.state_dict()[name], weight)


def test_a_layer_that_runs_twice_is_refused_or_drawn_as_a_weight():
    x = torch.randn(5, 3)
    with pytest.raises(bb.BatchbayesError, match=r'layer, which runs more than once.*estimator="weights"'):
        bb.noisy(Twice(), bb.MeanField())(x)
    assert bb.noisy(Twice(), bb.MeanField(), estimator="weights")(x).shape == (5, 3)


def test_attention_is_drawn_as_weights():
    own = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    random = bb.noisy(own, bb.MeanField(initial_std=0.3))
    x = torch.randn(3, 4, 8)
    assert random(x).shape == x.shape
    assert not random.is_local(next(site for site in random.sites if site.module_name == "self_attn.out_proj"))
    posterior = random.posterior()
    assert not torch.equal(posterior.draw(0, 0)(x), posterior.draw(0, 1)(x))


def test_noise_is_not_lost_where_torch_does_not_call_layers():
    layer, x = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), torch.randn(4, 5, 8)
    random = bb.noisy(layer, bb.MeanField(initial_std=0.2), layers=["linear1"]).eval()
    with torch.no_grad():
        assert not torch.equal(random(x), random(x))


class Force(nn.Sequential):
    """Its output is a derivative."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("family", [bb.MeanField(), bb.SparseVD(), bb.GaussianDropout(), bb.VariationalDropout()])
def test_second_derivatives_of_local_noise_are_refused(family):
    own, x = Force(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 2)
    with pytest.raises(bb.BatchbayesError, match=r'differentiated again.*estimator="weights"'):
        bb.variational(own, [(x, x)], family, likelihood=bb.gaussian(1.0), epochs=1)
    bb.variational(own, [(x, x)], family, likelihood=bb.gaussian(1.0), epochs=1, estimator="weights")


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 3)

    def forward(self, x):
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())


def test_a_weight_that_the_network_uses_outside_of_its_layer_is_refused_or_drawn():
    x = torch.randn(4, 5)
    with pytest.raises(bb.BatchbayesError, match=r'encoder, which shares its weight.*estimator="weights"'):
        bb.variational(TiedAutoencoder(), [(x, x)], likelihood=bb.gaussian(1.0), epochs=1)
    bb.variational(TiedAutoencoder(), [(x, x)], likelihood=bb.gaussian(1.0), epochs=1, estimator="weights")


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def test_layers_with_a_product_or_a_forward_of_their_own_are_drawn_as_weights():
    torch.manual_seed(0)
    changed = nn.Conv2d(2, 3, 3)
    changed.forward = types.MethodType(lambda self, x: 3 * nn.Conv2d.forward(self, x), changed)
    x = torch.randn(4, 2, 5, 5)
    for own in (Standardised(2, 3, 3), changed):
        random = bb.noisy(nn.Sequential(own), bb.MeanField(initial_std=1e-6))
        assert not random.is_local(random.sites[0])
        torch.testing.assert_close(random(x), own(x), atol=1e-3, rtol=0)


class Unbatched(nn.Module):
    """Its last layers see one example without an axis of examples, as wide as an axis of examples could be."""

    def __init__(self):
        super().__init__()
        self.first, self.vector, self.image = nn.Linear(3, 4), nn.Linear(3, 4), nn.Conv1d(3, 4, 1)

    def forward(self, x):
        image = torch.ones(3, 4) * torch.arange(1.0, 4)[:, None]
        return self.first(x) + self.vector(image[:, 0]) + self.image(image)[:, 0]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_layer_may_see_one_example_without_an_axis(family):
    torch.manual_seed(0)
    random, x = bb.noisy(Unbatched(), family), torch.zeros(4, 3)
    mean, count = random.posterior().means(), 2000
    with torch.no_grad():
        draws = torch.stack([random(x) for _ in range(count)])
    image = torch.arange(1.0, 4)
    weights = mean["vector.weight"] + mean["image.weight"][:, :, 0]
    expected = weights @ image + sum(mean[f"{name}.bias"] for name in ("first", "vector", "image"))
    error = draws.std(0) / count**0.5
    tolerance = 0.2 if family.kind == "multiplicative-flow" else 1e-4  # whose mean is approximate
    assert draws.shape == (count, 4, 4)
    assert ((draws.mean(0) - expected).abs() < 5 * error + tolerance).all()
