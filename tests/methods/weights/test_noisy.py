"""The wrapper around any network: what is random, against naive code, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from batchbayes_papers.weights.propagation import rounded_means, sparsity
from helpers.noisy_cases import FAMILIES, GAUSSIAN, data, network
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes.training.loop import TrainingConfig


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_draw_is_the_network_with_drawn_weights(family):
    posterior = bb.noisy(network(), family).posterior()
    weights = posterior.weights(seed=3, index=2)
    x, own = data()[0][0], posterior.network.module
    hidden = F.relu(own[1](F.conv2d(x, weights["0.weight"], own[0].bias)))
    expected = F.linear(hidden.flatten(1), weights["4.weight"], own[4].bias)
    torch.testing.assert_close(posterior.draw(3, 2)(x), expected)


@pytest.mark.parametrize("family", GAUSSIAN.values(), ids=GAUSSIAN)
def test_draws_have_the_moments_of_their_distribution(family):
    posterior = bb.noisy(network(), family).posterior()
    draws = torch.stack([posterior.weights(0, index)["4.weight"] for index in range(2000)])
    given = posterior.distributions["4.weight"]
    assert ((draws.mean(0) - given.mean).abs() < 4.5 * (given.variance / 2000).sqrt()).all()
    assert ((draws.var(0) / given.variance).log().abs() < 5 * (2 / 2000) ** 0.5).all()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_learns_and_survives_a_file(family, tmp_path):
    """Two classes that differ in the mean of their pixels."""
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    images = 0.5 * torch.randn(64, 1, 4, 4) + 2 * labels.view(-1, 1, 1, 1)
    batches = [(images[rows], labels[rows]) for rows in torch.arange(64).split(16)]
    own, layers = network(), None
    if not family.has_means:  # the last layer would be noise around its bias, and few filters may all be noise
        own, layers = network(64, nn.Identity), ["0"]
    options = {"epochs": 40, "learning_rate": 1e-2, "num_examples": 10_000}  # enough that the prior hardly matters
    posterior = bb.variational(own, batches, family, layers=layers, **options)
    predicted = bb.predict(posterior, images, bb.categorical(), num_samples=20).probs.argmax(1)
    assert (predicted == labels).float().mean() > 0.85
    bb.save(posterior, tmp_path / "posterior.safetensors")
    loaded = bb.load(tmp_path / "posterior.safetensors", own)
    assert loaded.family == family
    assert torch.equal(loaded.draw(0, 3)(images), posterior.draw(0, 3)(images))


def test_training_updates_batch_norm_and_leaves_the_users_network_alone():
    own = network().train()
    with left_alone(own):
        random = bb.noisy(own, bb.MeanField())
        bb.fit_noisy(random, data(), bb.categorical(), TrainingConfig(2, 4), num_examples=48)
    assert random.module[1].num_batches_tracked == 24
    assert not torch.equal(random.module[1].running_mean, own[1].running_mean)
    assert not torch.equal(random.module[4].weight, own[4].weight)


def test_the_state_dict_of_the_means_fits_the_users_network():
    own = network()
    posterior = bb.variational(own, data(), epochs=1)
    own.load_state_dict(posterior.means())
    narrow = bb.noisy(own, bb.MeanField(initial_std=1e-9)).posterior()
    x = data()[0][0]
    torch.testing.assert_close(narrow.draw(0, 0)(x), own.eval()(x))


@pytest.mark.parametrize("family", [bb.categorical(), bb.MeanField, "mean-field"], ids=repr)
def test_what_is_no_family_is_refused(family):
    with pytest.raises(bb.BatchbayesError, match=r"a family of weights.*likelihood="):
        bb.variational(network(), [(torch.randn(8, 3), torch.randint(2, (8,)))], family)


@pytest.mark.parametrize("family", [bb.MeanField, bb.MultiplicativeFlow])
def test_weights_start_with_noise(family):
    with pytest.raises(bb.BatchbayesError, match=r"initial_std above 0; got 0\.0"):
        family(initial_std=0.0)


def test_only_named_layers_are_random():
    random = bb.noisy(network(), bb.MeanField(), layers=["4"])
    assert [site.name for site in random.sites] == ["4.weight"]
    with pytest.raises(bb.BatchbayesError, match="did you mean 4"):
        bb.noisy(network(), bb.MeanField(), layers=["44"])


def test_fresh_means_differ_from_the_networks():
    own = network()
    random, again = (bb.noisy(own, bb.MeanField(), start="fresh", seed=5) for _ in range(2))
    assert not torch.equal(random.module[4].weight, own[4].weight)
    assert torch.equal(random.module[4].weight, again.module[4].weight)


def test_names_of_layers_may_have_spaces(tmp_path):
    own = nn.Sequential()
    own.add_module("first layer", nn.Linear(3, 2))
    posterior = bb.noisy(own, bb.MeanField(initial_std=0.2)).posterior()
    bb.save(posterior, tmp_path / "weights.safetensors")
    loaded = bb.load(tmp_path / "weights.safetensors", own)
    x = torch.randn(4, 3)
    assert torch.equal(loaded.draw(0, 1)(x), posterior.draw(0, 1)(x))


def test_tied_and_parametrised_weights_are_refused():
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(bb.BatchbayesError, match="belongs to another layer too"):
        bb.noisy(tied, bb.MeanField())
    recurrent = nn.RNN(3, 3)
    recurrent.weight_hh_l0 = recurrent.weight_ih_l0
    with pytest.raises(bb.BatchbayesError, match="weight_ih_l0 belongs to another layer too"):
        bb.noisy(recurrent, bb.MeanField())
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    with pytest.raises(bb.BatchbayesError, match="a parametrisation or weight norm"):
        bb.noisy(normed, bb.MeanField())
    assert bb.noisy(normed, bb.MeanField(), layers=["1"])(torch.randn(4, 3)).shape == (4, 2)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_one_draw_for_a_sequence(kind):
    torch.manual_seed(0)
    own, x = Recurrent(kind), torch.randn(6, 5, 3)
    posterior = bb.variational(own, [(x, torch.randint(0, 2, (6,)))], bb.MeanField(initial_std=0.2), epochs=3)
    assert {site.name for site in posterior.sites} == {"layer.weight_ih_l0", "layer.weight_hh_l0", "head.weight"}
    by_hand = Recurrent(kind)
    by_hand.load_state_dict({**posterior.means(), **posterior.weights(0, 1)})
    torch.testing.assert_close(posterior.draw(0, 1)(x), by_hand(x))


class Keeping(nn.Module):
    """A network with an attribute that its output depends on. It keeps its last output."""

    def __init__(self):
        super().__init__()
        self.own, self.scale, self.last = network(), 1.0, None

    def forward(self, x):
        self.last = self.scale * self.own(x)
        return self.last


def test_training_follows_attributes_and_modes_and_keeps_no_activations():
    random, x = bb.noisy(Keeping(), bb.MeanField(initial_std=1e-6)).train(), data()[0][0]
    before = random(x)
    random.module.scale = 3.0
    torch.testing.assert_close(random(x), 3 * before, atol=1e-3, rtol=1e-3)
    assert random.module.own[1].num_batches_tracked == 2
    random.module.own[1].eval()
    random(x)
    assert random.module.own[1].num_batches_tracked == 2
    assert random.module.last is None
    assert random.posterior().network(x).shape == (4, 2)


def test_an_assessment_can_compare_it():
    from batchbayes.methods.candidates import Request
    from batchbayes.methods.table import find_method, resolve

    method = find_method("variational")
    request = Request(network(), data(), data(2), bb.categorical(), num_samples=4, tuning_samples=4, seed=0)
    (candidate,) = resolve(method.candidates)(method, request)
    assert isinstance(candidate.posterior, bb.WeightsPosterior)
    assert candidate.method is method


def test_parts_that_are_compiled_keep_their_names(tmp_path):
    own = network()
    own[4] = torch.compile(own[4], backend="eager")
    posterior = bb.noisy(own, bb.MeanField(initial_std=0.2)).posterior()
    own.load_state_dict(posterior.means())
    bb.save(posterior, tmp_path / "posterior.safetensors")
    x = data()[0][0]
    assert torch.equal(bb.load(tmp_path / "posterior.safetensors", network()).draw(0, 1)(x), posterior.draw(0, 1)(x))


def test_draws_keep_the_memory_format_of_the_network():
    own = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    posterior = bb.noisy(own, bb.MeanField(initial_std=0.2)).posterior()
    assert posterior.weights(0, 0)["weight"].stride() == own.weight.stride()
    x = torch.randn(2, 1, 5, 5)
    assert posterior.draw(0, 0)(x).is_contiguous(memory_format=torch.channels_last)


class Aliased(nn.Module):
    """Its layers have two names each."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([self.first, self.last])

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


def test_the_state_dict_of_the_means_has_them_under_every_name_of_a_layer():
    torch.manual_seed(0)
    posterior = bb.noisy(Aliased(), bb.SparseVD(initial_log_var=-3.0)).posterior()
    pruned = posterior.distributions["first.weight"].mean
    assert int((pruned == 0).sum()) > 0
    for state in (posterior.means(), rounded_means(posterior)):
        own = Aliased()
        own.load_state_dict(state)
        assert torch.equal(own.first.weight == 0, state["first.weight"] == 0)
        assert bool((own.first.weight[pruned == 0] == 0).all())


@pytest.mark.parametrize("family", [bb.VariationalDropout(), bb.GaussianDropout()])
def test_weights_of_zero_have_a_gradient_when_weights_are_drawn(family):
    own = nn.Linear(3, 2)
    nn.init.zeros_(own.weight)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    posterior = bb.variational(own, [(x, y)], family, epochs=2, estimator="weights")
    assert posterior.means()["weight"].isfinite().all()
    assert posterior.means()["weight"].abs().min() > 0


def test_odd_logarithms_are_refused_and_numbers_of_numpy_can_be_saved(tmp_path):
    for value in (float("nan"), "x", None):
        with pytest.raises(bb.BatchbayesError, match="initial_log_var"):
            bb.SparseVD(initial_log_var=value)
        with pytest.raises(bb.BatchbayesError, match="initial_log_alpha"):
            bb.VariationalDropout(initial_log_alpha=value)
    for family in (bb.SparseVD(np.float32(-3)), bb.MultiplicativeFlow(np.int64(1))):
        bb.save(bb.noisy(network(), family).posterior(), tmp_path / "weights.safetensors")
        assert bb.load(tmp_path / "weights.safetensors", network()).family == family


def test_draws_of_masks_do_not_depend_on_the_default_dtype():
    posterior = bb.noisy(nn.Linear(100, 2), bb.BinaryDropout(initial_rate=0.5)).posterior()
    expected = posterior.weights(0, 0)["weight"]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(posterior.weights(0, 0)["weight"], expected)
    finally:
        torch.set_default_dtype(torch.float32)


class WithState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1}

    def set_extra_state(self, state):
        assert state == {"scale": 1}


def test_state_that_is_no_tensor_is_among_the_means_and_not_written(tmp_path):
    posterior = bb.noisy(WithState(3, 2), bb.MeanField()).posterior()
    WithState(3, 2).load_state_dict(posterior.means())
    with pytest.raises(bb.BatchbayesError, match="something else in _extra_state"):
        bb.save(posterior, tmp_path / "weights.safetensors")


class InBfloat16(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_networks_may_use_autocast(family):
    own = InBfloat16(*network())
    posterior = bb.variational(own, data(2), family, epochs=1)
    assert bb.predict(posterior, data()[0][0], bb.categorical(), num_samples=2).probs.shape == (4, 2)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_may_be_empty(family, shape):
    random = bb.noisy(nn.Linear(*shape), family)
    assert random(torch.randn(4, shape[0])).shape == (4, shape[1])
    assert sparsity(random.posterior()) == {"weight": 1.0}
