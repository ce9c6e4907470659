"""Tuning the batch size: against a naive loop over batch sizes, and against what is known of the optimum."""

import math

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.methods.batchnorm import tuning_family as family
from batchbayes.methods.batchnorm.candidates import batch_norm_candidates
from batchbayes.methods.batchnorm.omega import site_of
from batchbayes.methods.batchnorm.prior import kl_to_implied_prior
from batchbayes.methods.batchnorm.tuning_family import linear_family
from batchbayes.methods.candidates import Request
from batchbayes.methods.table import METHODS
from batchbayes.metrics import gaussian_crps


def regression(noise=0.3, batch_size=100, center="running"):
    """Means alone random, outputs linear in them: the linear engine is exact, and the predictive is known."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False)).double().eval()
    nn.init.ones_(network[1].weight)
    x = torch.randn(1000, 1, dtype=torch.float64)
    posterior = bb.mcbn(network, x, batch_size=batch_size, num_samples=100, center=center)
    posterior.deviations[:, 1:] = 0
    y = network(x).detach() + noise * torch.randn(1000, 1, dtype=torch.float64)
    return posterior, x, y


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
@pytest.mark.parametrize("center", ["running", "batches"])
def test_the_curve_is_the_score_of_exact_draws_at_each_batch_size(center):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
    x, y = torch.randn(300, 2).double(), torch.randint(0, 3, (300,))
    posterior = bb.mcbn(network, x, batch_size=128, num_samples=32, center=center)
    tuned = bb.tune_batch_size(posterior, [(x[:100], y[:100])], bb.categorical(), num_samples=32)
    for size, value in list(zip(tuned.curve.batch_sizes, tuned.curve.values, strict=True))[10::4]:
        at = posterior.at_batch_size(float(size))
        exact = bb.predict(at, x[:100], bb.categorical(), num_samples=32).log_prob(y[:100]).mean()
        assert float(value) == pytest.approx(float(exact), abs=2e-3)
    assert tuned.value >= float(tuned.curve.values.max()) - 1e-9
    assert tuned.posterior.batch_size == tuned.batch_size == tuned.batch_sizes[0]
    assert not tuned.curve.kl.any()


def test_noise_in_the_network_that_the_targets_have_too_is_found():
    """Targets scatter as if the network's batches had M = 20, beside observation noise: that M comes back."""
    torch.manual_seed(0)
    posterior, x, _ = regression()
    truth = posterior.at_batch_size(20)
    drawn = torch.cat([truth.draw(9, i)(x[i : i + 10]) for i in range(0, 1000, 10)]).detach()
    y = drawn + 1e-3 * torch.randn_like(drawn)
    tuned = bb.tune_batch_size(posterior, [(x, y)], bb.gaussian(1.0), num_samples=100)
    assert tuned.batch_size == pytest.approx(20, rel=0.5)


def test_observation_noise_is_tuned_along():
    """Here the network's noise is the same for all inputs, so only its sum with 1/tau can be found: 0.3^2."""
    posterior, x, y = regression(noise=0.3)
    tuned = bb.tune_batch_size(posterior, [(x, y)], bb.gaussian(1.0))
    variance = bb.predict(tuned.posterior, x, tuned.likelihood, num_samples=64).variance
    assert float(variance.mean()) == pytest.approx(0.09, rel=0.15)


def test_crps_is_that_of_the_moment_matched_gaussian():
    posterior, x, y = regression(center="running")
    tuned = bb.tune_batch_size(posterior, [(x[:200], y[:200, 0])], bb.gaussian(1.0), score="crps", num_samples=50)
    at = bb.predict(tuned.posterior, x[:200], tuned.likelihood, num_samples=50)
    assert -tuned.value == pytest.approx(float(gaussian_crps(at.mean, at.std, y[:200]).mean()), rel=1e-6)


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")  # the labels are random, the optimum anywhere
def test_the_elbo_is_the_expected_log_likelihood_less_the_kl():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
    x, y = torch.randn(300, 2).double(), torch.randint(0, 3, (300,))
    posterior = bb.mcbn(network, x, batch_size=64, num_samples=16, center="running")
    options = {"num_examples": 300, "weight_decay": 1e-3}
    tuned = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), objective="elbo", num_samples=16, **options)
    index = 12
    size, value = float(tuned.curve.batch_sizes[index]), float(tuned.curve.values[index])
    draws = bb.predict(posterior.at_batch_size(size), x, bb.categorical(), num_samples=16, keep_draws=True).draws
    expected = bb.categorical()(draws.movedim(-1, -1)).log_prob(y).mean()
    divergence = kl_to_implied_prior(posterior, torch.tensor([size]), **options)[0] / 300
    assert float(tuned.curve.kl[index]) == pytest.approx(float(divergence), rel=1e-6)
    assert value == pytest.approx(float(expected - divergence), abs=2e-3)
    bare = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), objective="elbo", num_samples=16)
    divergence = kl_to_implied_prior(posterior, torch.tensor([size]), num_examples=300, weight_decay=1e-4)[0] / 300
    assert float(bare.curve.kl[index]) == pytest.approx(float(divergence), rel=1e-6)  # batches are all there is


def test_of_more_examples_than_memory_likes_an_even_part_serves(monkeypatch):
    posterior, x, y = regression()
    monkeypatch.setattr(family, "LARGEST", 100 * 50)  # 100 draws of one output: 50 examples
    found = linear_family(posterior, [(x, y)], torch.zeros(2, dtype=torch.long), num_samples=100, seed=0)
    used = [round(999 * i / 49) for i in range(50)]
    assert torch.equal(found.inputs, x[used])
    assert torch.equal(found.targets, y[used])
    assert found.num_examples == 1000


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_outputs_of_an_example_add_up_in_the_elbo():
    """Five copies of one output: five times the evidence, and the same divergence."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double().eval()
    copies = nn.Sequential(network, nn.Linear(1, 5, bias=False)).double().eval()
    nn.init.ones_(copies[1].weight)
    x = torch.randn(300, 2).double()
    y = network(x).detach() + 0.3 * torch.randn(300, 1).double()
    one, five = (
        bb.tune_batch_size(
            bb.mcbn(each, x, batch_size=64, num_samples=16, center="running"),
            [(x, y.expand(300, width))], bb.gaussian(1.0), objective="elbo", num_samples=16
        ).curve
        for each, width in ((network, 1), (copies, 5))
    )  # fmt: skip
    assert torch.allclose(five.values + five.kl, 5 * (one.values + one.kl), rtol=1e-6)
    assert torch.allclose(five.kl, one.kl)


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_the_optimum_does_not_depend_on_the_knots(monkeypatch):
    """Where the centre moves with M; straight lines between the knots would be off by 0.3 to 0.9 %."""
    for seed in (2, 3):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
        nn.init.normal_(network[3].weight, std=8.0)
        x = torch.randn(300, 2).double()
        posterior = bb.mcbn(network, x, batch_size=64, num_samples=32, center="batches")
        truth, sizes = posterior.at_batch_size(30), []
        y = torch.stack([truth.draw(5, i)(x[i : i + 1])[0].argmax() for i in range(300)])
        for knots in (25, 241):
            monkeypatch.setattr(family, "KNOTS", knots)
            sizes.append(bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), num_samples=32).batch_size)
        assert 10 < sizes[0] < 200
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "likelihood", "message"),
    [
        (torch.zeros(200, 1), bb.heteroscedastic_gaussian(), None),
        (torch.zeros(200), bb.heteroscedastic_gaussian(), None),
        (torch.zeros(200, dtype=torch.long), bb.heteroscedastic_gaussian(), None),
        (torch.zeros(200), bb.gaussian(1.0), "targets of shape"),
        (torch.zeros(200, 1, dtype=torch.long), bb.categorical(), "integer labels of shape"),
        (torch.full((200,), 255), bb.categorical(), "labels from 0 to 1"),
    ],
)
@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_targets_are_never_broadcast(targets, likelihood, message):
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    x = torch.randn(200, 2)
    posterior = bb.mcbn(network, x, batch_size=64, num_samples=16, center="running")
    if message is None:
        tuned = bb.tune_batch_size(posterior, [{"x": x, "y": targets}], likelihood, inputs="x", targets="y")
        expected = bb.predict(tuned.posterior, x, likelihood, num_samples=64).log_prob(targets.float()).mean()
        assert tuned.value == pytest.approx(float(expected), abs=0.05)
    else:
        with pytest.raises(bb.BatchbayesError, match=message):
            bb.tune_batch_size(posterior, [(x, targets)], likelihood)


def test_other_posteriors_have_no_batch_size():
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
    x = torch.randn(50, 2)
    with pytest.raises(bb.BatchbayesError, match="a batch-norm posterior with noise; got DropoutPosterior"):
        bb.tune_batch_size(bb.mc_dropout(network), [(x, x)], bb.gaussian(1.0))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_one_batch_size_a_site():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    nn.init.normal_(network[4].weight, std=10.0)  # sure of itself: it needs the noise
    x = torch.randn(300, 2)
    posterior = bb.mcbn(network.eval(), x, batch_size=64, num_samples=32, center="running")
    truth = posterior.at_batch_size([4.0, 250.0])
    y = torch.stack([truth.draw(5, i)(x[i : i + 1])[0].argmax() for i in range(300)])
    one = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), num_samples=32)
    each = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), per_site=True, penalty=1e-4, num_samples=32)
    tied = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), per_site=True, penalty=100.0, num_samples=32)
    assert each.value >= one.value - 1e-4
    assert len(each.batch_sizes) == 2
    assert each.batch_sizes[0] != pytest.approx(each.batch_sizes[1], rel=0.05)
    assert tied.batch_sizes[0] == pytest.approx(tied.batch_sizes[1], rel=0.05)
    first = site_of(posterior.sites) == 0
    m = each.batch_sizes[0]
    scale = (64 / m * (300 - m) / (300 - 64)) ** 0.5  # drawn from 300 without replacement
    torch.testing.assert_close(each.posterior.deviations[:, first], posterior.deviations[:, first] * scale)
    assert each.batch_size == pytest.approx(math.sqrt(math.prod(each.batch_sizes)))


def test_a_family_repeats_the_linear_engine_at_every_batch_size():
    posterior, x, y = regression(center="batches")
    family = linear_family(posterior, [(x[:50], y[:50])], torch.zeros(2, dtype=torch.long), num_samples=20, seed=5)
    for size in (30.0, 137.0, 900.0):
        outputs = family.outputs(torch.tensor([math.log(size)], dtype=torch.float64))
        exact = bb.predict(posterior.at_batch_size(size), x[:50], bb.gaussian(1.0), num_samples=20, seed=5).draws
        torch.testing.assert_close(outputs, exact, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "luck"}, "objective"),
        ({"objective": "elbo", "num_examples": 0}, "num_examples= as the size of the training set, at least the 1000"),
        ({"objective": "elbo", "weight_decay": 0.0}, "weight_decay above zero"),
        ({"objective": "elbo", "per_site": True}, "ELBO"),
        ({"score": "crps"}, "gaussian likelihood"),
        ({"num_samples": 2.5}, "num_samples as a whole number"),
        ({"seed": "zero"}, "seed as a whole number"),
    ],
)
def test_bad_options(options, message):
    posterior, x, _ = regression()
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.tune_batch_size(posterior, [(x, torch.zeros(1000))], bb.bernoulli(probabilities=False), **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one labelled batch"),
        ([(torch.zeros(0, 1).double(), torch.zeros(0, 1))], "at least one labelled example"),
        ([torch.zeros(3, 1)], "labelled batches"),
        ([(torch.zeros(3, 1).double(), torch.zeros(2, 1))], "as many targets"),
        ([(torch.zeros(3, 1).double(), torch.full((3, 1), float("nan")))], "finite numbers in the targets"),
    ],
)
def test_bad_data(data, message):
    posterior, _, _ = regression()
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.tune_batch_size(posterior, data, bb.gaussian(1.0))


def test_errors_without_a_best_precision_are_refused():
    """Targets that the mean hits exactly, and targets whose squares overflow, once gave NaN and a batch size."""
    network = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).eval()
    with torch.no_grad():
        network[1].weight.zero_()
        network[1].bias.zero_()
    x = torch.randn(64, 1)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=8)
    for targets in (torch.zeros(64, 1), torch.full((64, 1), 1e25)):
        with pytest.raises(bb.BatchbayesError, match=r"mean squared error of (0.0|inf)"):
            bb.tune_batch_size(posterior, [(x, targets)], bb.gaussian(1.0))


def test_a_likelihood_that_cannot_be_tuned_is_refused():
    posterior, x, y = regression()
    with pytest.raises(bb.BatchbayesError, match=r"call it, as in bb.gaussian\(\)"):
        bb.tune_batch_size(posterior, [(x, y)], bb.gaussian)
    with pytest.raises(bb.BatchbayesError, match="one precision for the ELBO"):
        bb.tune_batch_size(posterior, [(x, y)], bb.gaussian([1.0, 2.0]), objective="elbo")


def two_outputs(unit):
    """The first output wants large batches. The second one, in a unit of its own, scatters as for batches of four."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)).double().eval()
    with torch.no_grad():
        network[1].weight.copy_(torch.diag(torch.tensor([1.0, unit])))
    x = torch.randn(1000, 2, dtype=torch.float64)
    posterior = bb.mcbn(network, x, batch_size=20, num_samples=100)
    noise = torch.randn(1000, 2, dtype=torch.float64)
    noise[:, 0] *= 0.05
    noise[:, 1] *= 0.5 * unit * (1 + x[:, 1].square() / 2).sqrt()
    return posterior, x, network(x).detach() + noise


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_outputs_in_units_of_their_own_have_noise_of_their_own():
    found = []
    for unit in (1.0, 1000.0):
        posterior, x, y = two_outputs(unit)
        tuned = bb.tune_batch_size(posterior, (x[:100], y[:100]), bb.gaussian([1.0, 1.0]), num_samples=16)
        first, second = tuned.likelihood.precision
        found.append([tuned.batch_size, first, second * unit**2])
    assert found[0] == pytest.approx(found[1], rel=0.01)


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_an_assessment_tunes_the_same_batch_size_in_any_unit():
    sizes = []
    for unit in (1.0, 1000.0):
        posterior, x, y = two_outputs(unit)
        network = posterior.network.module
        request = Request(network, x, [(x[:100], y[:100])], bb.gaussian(1.0), 16, 16, 0, batch_size=20)
        sizes.append(batch_norm_candidates(METHODS["mcbn"], request)[1].settings["batch_size"])
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_posteriors_without_noise_are_refused():
    posterior, x, y = regression()
    with pytest.raises(bb.BatchbayesError, match="with noise"):
        bb.tune_batch_size(bb.population(posterior.network.module, x), [(x, y)], bb.gaussian(1.0))
    with pytest.raises(bb.BatchbayesError, match="with noise"):
        bb.population(posterior.network.module, x).at_batch_size(8)


@pytest.mark.parametrize("center", ["running", "batches"])
def test_sites_with_batch_sizes_of_their_own_can_be_taken_elsewhere_and_kept(center, tmp_path):
    network = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double().eval()
    posterior = bb.mcbn(network, torch.randn(300, 2).double(), batch_size=64, num_samples=16, center=center)
    each = posterior.at_batch_size([16.0, 100.0])
    assert each.batch_size == pytest.approx(40)
    bb.save(each, tmp_path / "each.safetensors")
    for kept in (each, bb.load(tmp_path / "each.safetensors", network)):
        back, direct = kept.at_batch_size(32), posterior.at_batch_size(32)
        assert torch.allclose(back.deviations, direct.deviations, rtol=1e-12)
        assert torch.allclose(back.center, direct.center, atol=1e-3)
        assert back.site_batch_sizes == ()
