"""The wrapper around any network: what is random, against naive code, and what is refused."""

import copy
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.references import left_alone
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchbayes as bb
from batchbayes.methods.weights.compression import rounded_means, sparsity
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig

GAUSSIAN = {
    "mean field": bb.MeanField(initial_std=0.2),
    "sparse": bb.SparseVD(initial_log_var=-4.0),
    "dropout for layers": bb.VariationalDropout("layer"),
    "dropout for neurons": bb.VariationalDropout("neuron", "ard"),
    "dropout for weights": bb.VariationalDropout("weight"),
    "gaussian dropout": bb.GaussianDropout(),
    "variance": bb.Variance(),
    "variance, uniform": bb.Variance("uniform", degrees=3.0),
    "variance, bernoulli": bb.Variance("bernoulli"),
}
FAMILIES = GAUSSIAN | {"binary dropout": bb.BinaryDropout(), "flow": bb.MultiplicativeFlow()}


def network(width=3, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, width, 3), norm(width), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, 2))


def data(count=12):
    torch.manual_seed(1)
    return [(torch.randn(4, 1, 4, 4), torch.randint(0, 2, (4,))) for _ in range(count)]


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
    options = {"epochs": 40, "learning_rate": 1e-2, "num_examples": 10_000}  # so many that the prior hardly matters
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
    with pytest.raises(bb.BatchbayesError, match=r"an initial_std above 0; got 0\.0"):
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


@pytest.mark.parametrize(("schedule", "expected"), [((2, 0), [0, 0, 1, 1, 1]), ((2, 4), [0, 0, 0, 0.5, 1])])
def test_the_kl_has_no_weight_before_its_first_epoch(schedule, expected):
    assert [bb.Schedule(*schedule).kl_weight(epoch) for epoch in range(5)] == expected


def test_names_of_layers_may_have_spaces(tmp_path):
    own = nn.Sequential()
    own.add_module("first layer", nn.Linear(3, 2))
    posterior = bb.noisy(own, bb.MeanField(initial_std=0.2)).posterior()
    bb.save(posterior, tmp_path / "weights.safetensors")
    loaded = bb.load(tmp_path / "weights.safetensors", own)
    x = torch.randn(4, 3)
    assert torch.equal(loaded.draw(0, 1)(x), posterior.draw(0, 1)(x))


class KilledError(Exception):
    """Stands for the end of a process."""


def test_an_interrupted_training_continues_with_the_same_bits(tmp_path):
    def fit(**options):
        random, schedule = bb.noisy(network(), bb.SparseVD()), bb.Schedule(1, 3, decay_from=2)
        options = {"num_examples": 48, "schedule": schedule, **options}
        return bb.fit_noisy(random, data(), bb.categorical(), TrainingConfig(4, 4, 1e-2), **options), random

    def kill(step):
        if step.number == 30:
            raise KilledError

    path = tmp_path / "training.safetensors"
    losses, whole = fit()
    with pytest.raises(KilledError):
        fit(checkpoint=path, after_step=kill)
    again, continued = fit(checkpoint=path)
    assert again == losses
    assert all(torch.equal(continued.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_the_objective_is_the_negative_elbo():
    from batchbayes.methods.weights.fit import negative_elbo

    random = bb.noisy(network(), bb.MeanField(initial_std=1e-6)).eval()
    (x, y), own = data()[0], network().eval()
    random.module.eval()
    random.kl_weight.fill_(0.5)
    expected = 0.5 * random.divergence() + 100 / 4 * F.cross_entropy(own(x), y, reduction="sum")
    torch.testing.assert_close(negative_elbo(bb.categorical(), 100)(random, (x, y)), expected)


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
    with pytest.raises(bb.BatchbayesError, match=r"computed once; got Checkpointed.*use_reentrant=False"):
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


def test_a_diverging_training_says_what_to_do():
    random = bb.noisy(network(), bb.MeanField())
    with pytest.raises(bb.BatchbayesError, match=r"the training has diverged.*lower the learning rate"):
        bb.fit_noisy(random, data(), bb.categorical(), TrainingConfig(50, 4, 1e30), num_examples=48)


WRONG_LABELS = {
    "too large": (torch.tensor([0, 1, 2, 0]), "labels from 0 to 1.*got 0 to 2"),
    "below zero": (torch.tensor([0, 1, -1, 0]), "labels from 0 to 1.*got -1 to 1"),
    "what torch ignores": (torch.tensor([0, 1, -100, 0]), "labels from 0 to 1.*got -100 to 1"),
    "NaN as a number": (torch.tensor([0, 1, -(2**63), 0]), "labels from 0 to 1"),
    "real": (torch.tensor([0.0, 1.0, 1.0, 0.0]), "integer labels.*float32"),
    "one-hot": (torch.eye(2, dtype=torch.long)[[0, 1, 1, 0]], r"shape \(4,\).*\(4, 2\)"),
    "too few": (torch.tensor([0, 1, 1]), r"shape \(4,\).*\(3,\)"),
}


@pytest.mark.parametrize("labels", WRONG_LABELS)
@pytest.mark.parametrize("place", [0, 2])
def test_wrong_labels_of_any_batch_are_refused_in_words(labels, place):
    wrong, message = WRONG_LABELS[labels]
    batches = data(3)
    batches[place] = (batches[place][0], wrong)
    with pytest.raises(bb.BatchbayesError, match=f"(?s){message}"):
        bb.variational(network(), batches, epochs=1)


@pytest.mark.parametrize("place", [0, 2])
def test_targets_that_are_nan_are_refused_in_words(place):
    batches = [(x, y.float()) for x, y in data(3)]
    batches[place][1][1] = torch.nan
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    with pytest.raises(bb.BatchbayesError, match=r"(?s)NaN"):
        bb.variational(model, batches, likelihood=bb.gaussian(1.0), epochs=1)


def test_labels_of_other_kinds_and_temperatures_train_the_same():
    """Whichever way the log-probability is computed, after the first batch."""

    def trained(labels, **options):
        batches = [(x, labels(y)) for x, y in data(4)]
        return bb.variational(network(), batches, likelihood=bb.categorical(**options), epochs=1).means()["4.weight"]

    assert torch.equal(trained(torch.Tensor.int), trained(torch.Tensor.long))
    assert torch.equal(trained(torch.Tensor.bool, temperature=2.0), trained(torch.Tensor.long, temperature=2.0))
    assert torch.equal(trained(torch.Tensor.long, ignore_index=7), trained(torch.Tensor.long))


def test_outputs_that_are_probabilities_are_refused():
    with pytest.raises(bb.BatchbayesError, match="look like probabilities"):
        bb.variational(nn.Sequential(network(), nn.Softmax(1)), data(), epochs=1)


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


def test_a_pair_of_inputs_and_targets_is_read_in_shuffled_batches():
    (x, y), *_ = data()
    ways = ((x, y), shuffled(x, y, 2, seed=0), [(x, y)])
    pair, batches, whole = (bb.variational(network(), each, epochs=2, batch_size=2).means() for each in ways)
    assert all(torch.equal(pair[name], batches[name]) for name in batches)
    assert not any(torch.equal(pair[name], whole[name]) for name in whole)


def test_the_number_of_examples_must_be_known():
    with pytest.raises(bb.BatchbayesError, match="num_examples="):
        bb.variational(network(), iter(data()))


def test_batches_without_targets_are_refused():
    with pytest.raises(bb.BatchbayesError, match=r"labelled batches \(x, y\)"):
        bb.variational(network(), [data()[0][0]])


def test_an_assessment_can_compare_it():
    from batchbayes.methods.candidates import Setting
    from batchbayes.methods.table import find_method, resolve

    method = find_method("variational")
    setting = Setting(network(), data(), data(2), bb.categorical(), num_samples=4, tuning_samples=4, seed=0)
    (candidate,) = resolve(method.candidates)(method, setting)
    assert isinstance(candidate.posterior, bb.WeightsPosterior)
    assert candidate.name == "Variational"


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


@pytest.mark.parametrize("family", [bb.VariationalDropout(), bb.GaussianDropout()])
def test_weights_of_zero_have_a_gradient_when_weights_are_drawn(family):
    own = nn.Linear(3, 2)
    nn.init.zeros_(own.weight)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    posterior = bb.variational(own, [(x, y)], family, epochs=2, estimator="weights")
    assert posterior.means()["weight"].isfinite().all()
    assert posterior.means()["weight"].abs().min() > 0


def test_a_resumed_training_of_a_segmentation_has_the_same_bits(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(0, 21, (4, 16, 16))) for _ in range(3)]

    def fit(**options):
        torch.manual_seed(0)
        random = bb.noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 21, 1)), bb.MeanField())
        losses = bb.fit_noisy(random, batches, bb.categorical(), TrainingConfig(3, 4), num_examples=12, **options)
        return losses, random.state_dict()

    def kill(step):
        if step.number == 4:
            raise KilledError

    losses, whole = fit()
    with pytest.raises(KilledError):
        fit(checkpoint=tmp_path / "training.safetensors", after_step=kill)
    again, continued = fit(checkpoint=tmp_path / "training.safetensors")
    assert again == losses
    assert all(torch.equal(continued[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("num_examples", [0, -48, 2.5, "48", float("nan")])
def test_a_wrong_number_of_examples_is_refused(num_examples):
    with pytest.raises(bb.BatchbayesError, match="num_examples as a whole number of at least 1"):
        bb.variational(network(), data(), epochs=1, num_examples=num_examples)


def test_empty_batches_and_weight_decay_are_refused():
    (x, y), *_ = data()
    with pytest.raises(bb.BatchbayesError, match="an empty batch"):
        bb.variational(network(), [(x, y), (x[:0], y[:0])], epochs=1)
    config = TrainingConfig(1, 4, weight_decay=1e-4)
    with pytest.raises(bb.BatchbayesError, match="leave weight_decay out"):
        bb.fit_noisy(bb.noisy(network(), bb.MeanField()), data(), bb.categorical(), config, num_examples=48)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": "1"}, {"kl_from": float("nan")}, {"kl_full": None}]
)
def test_odd_schedules_are_refused(options):
    (name,) = options
    with pytest.raises(bb.BatchbayesError, match=f"got {name}="):
        bb.Schedule(**options)
    assert bb.Schedule(kl_from=float("inf")).kl_weight(100) == 0


def test_odd_logarithms_are_refused_and_numbers_of_numpy_can_be_saved(tmp_path):
    for value in (float("nan"), "x", None):
        with pytest.raises(bb.BatchbayesError, match="an initial_log_var"):
            bb.SparseVD(initial_log_var=value)
        with pytest.raises(bb.BatchbayesError, match="an initial_log_alpha"):
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
