"""KL divergences against numerical integrals in float64."""

import math

import pytest
import torch
from helpers.integrals import expected_log_magnitude, gaussian_expectation
from torch import nn

import batchbayes as bb
from batchbayes.methods.weights.sites import find_sites
from batchbayes.methods.weights.sparse import log_uniform_divergence

LIMIT_OF_LOG_UNIFORM = 0.5 * (math.log(2) + 0.5772156649015329)  # -E log|z| for standard normal z, 0.6352


def given(family, weight, **own):
    weight = torch.tensor([[weight]], dtype=torch.float64)
    site = find_sites(nn.Linear(1, 1))[0]
    return family.given(weight, {name: torch.full_like(weight, value) for name, value in own.items()}, site)


@pytest.mark.parametrize(("mean", "std", "prior"), [(0.0, 1.0, 1.0), (0.7, 0.2, 0.5), (-2.0, 3.0, 1.5)])
def test_mean_field(mean, std, prior):
    def integrand(w):
        q, p = (torch.distributions.Normal(*torch.tensor(own, dtype=w.dtype)) for own in ((mean, std), (0.0, prior)))
        return q.log_prob(w) - p.log_prob(w)

    found = given(bb.MeanField(prior), mean, log_std=math.log(std)).divergence()
    assert float(found) == pytest.approx(gaussian_expectation(integrand, mean, std), abs=1e-9)


def test_empirical_bayes_is_the_best_prior():
    weight, log_std = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    site = find_sites(nn.Linear(3, 4))[0]
    own = {"log_std": log_std}
    best = float((weight.square() + (2 * log_std).exp()).mean().sqrt())
    found = float(bb.MeanField(None).given(weight, own, site).divergence())
    at = {s: float(bb.MeanField(s * best).given(weight, own, site).divergence()) for s in (0.9, 1.0, 1.1)}
    assert found == pytest.approx(at[1.0])
    assert min(at[0.9], at[1.1]) > found


def test_log_uniform_is_off_by_at_most_the_stated_error():
    log_alphas = torch.linspace(-8, 8, 65, dtype=torch.float64)
    exact = [
        LIMIT_OF_LOG_UNIFORM - 0.5 * a + expected_log_magnitude(1.0, math.exp(0.5 * a)) for a in log_alphas.tolist()
    ]
    errors = (log_uniform_divergence(log_alphas) - torch.tensor(exact, dtype=torch.float64)).abs()
    assert 0.008 < errors.max() < 0.011


@pytest.mark.parametrize("log_alpha", [-3.0, 0.0, 2.0])
def test_ard_is_the_gaussian_prior_with_the_best_variance(log_alpha):
    mean = 0.7
    variance = math.exp(log_alpha) * mean**2
    best = math.sqrt(mean**2 + variance)
    found = given(bb.VariationalDropout("weight", "ard"), mean, log_alpha=log_alpha).divergence()
    expected = given(bb.MeanField(best), mean, log_std=0.5 * math.log(variance)).divergence()
    assert float(found) == pytest.approx(float(expected))


def test_a_shared_alpha_counts_for_each_weight():
    weight, site = torch.randn(4, 3), find_sites(nn.Linear(3, 4))[0]
    for shape in ((1, 1), (4, 1), (4, 3)):
        shared = bb.VariationalDropout().given(weight, {"log_alpha": torch.full(shape, -1.0)}, site)
        expected = 12 * log_uniform_divergence(torch.tensor(-1.0))
        torch.testing.assert_close(shared.divergence(), expected)


@pytest.mark.parametrize(
    ("std", "degrees"), [(0.1, 1.0), (1.0, 3.0), (4.0, 2.0), (10.0, 3.0), (1.0, 0.01), (10.0, 0.1)]
)
def test_student_t(std, degrees):
    def integrand(w):
        q = torch.distributions.Normal(*torch.tensor([0.0, std], dtype=w.dtype))
        p = torch.distributions.StudentT(torch.tensor(degrees, dtype=w.dtype))
        return q.log_prob(w) - p.log_prob(w)

    found = given(bb.Variance(degrees=degrees), 0.0, std=std).divergence()
    assert float(found) == pytest.approx(gaussian_expectation(integrand, 0.0, std), abs=2e-3 * max(1, std))


def test_binary_dropout_prefers_its_best_rate():
    """The KL is that of a mixture of spikes; its derivative with respect to the rate is checked by differences."""
    weight, site = torch.randn(5, 4, dtype=torch.float64), find_sites(nn.Linear(4, 5))[0]

    def divergence(rate):
        logit = torch.tensor(math.log(rate / (1 - rate)), dtype=torch.float64)
        return float(bb.BinaryDropout(prior_std=2.0).given(weight, {"logit": logit}, site).divergence())

    def by_hand(rate):
        kept = 1 - rate
        power = sum(kept * float(w / kept) ** 2 / (2 * 2.0**2) for w in weight.flatten())
        return power - 4 * (-rate * math.log(rate) - kept * math.log(kept))

    for rate in (0.05, 0.5, 0.8):
        assert divergence(rate) == pytest.approx(by_hand(rate))


@pytest.mark.parametrize(
    ("mu", "sigma", "kept"), [(-0.02, 0.05, 1), (-3, 1, 0), (-10, 30, 0), (-1, 0.5, 1), (-1, 140, 0)]
)
def test_factors_of_units(mu, sigma, kept):
    """The KL and the moments against numerical integrals over log z, draws against the moments, and what is pruned."""
    place = torch.tensor([math.log(math.expm1(-mu))], dtype=torch.float64)
    own = {"log_std": torch.tensor([math.log(sigma)], dtype=torch.float64), "place": place}
    weight, site = torch.ones(1, 1, dtype=torch.float64), find_sites(nn.Linear(1, 1))[0]
    given = bb.StructuredSparsity().given(weight, own, site)
    t = torch.linspace(-20, 0, 400_001, dtype=torch.float64)
    density = (-((t - mu) ** 2) / (2 * sigma**2)).exp()
    density /= torch.trapezoid(density, t)
    first, second = (float(torch.trapezoid(density * (k * t).exp(), t)) for k in (1, 2))
    terms = torch.xlogy(density, 20 * density)
    assert float(given.divergence()) == pytest.approx(float(torch.trapezoid(terms, t)), abs=1e-7)
    assert [float(given.moment(k)) for k in (1, 2)] == pytest.approx([first, second], rel=1e-7)
    assert bool(given.is_kept) == bool(kept) == (first**2 >= second - first**2)
    drawn = given.factors(torch.rand(100_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    error = math.sqrt((second - first**2) / 100_000)
    assert float(drawn.mean()) == pytest.approx(kept * first, abs=4 * error * kept)
    assert float(given.mean) == pytest.approx(kept * first)


@pytest.fixture
def flow():
    torch.manual_seed(2)
    layer = nn.Linear(2, 3).double()
    network = bb.noisy(layer, bb.MultiplicativeFlow())
    with torch.no_grad():
        for name, value in network.own.items():
            if "shift" in name or "gate" in name:
                value += 0.7 * torch.randn_like(value)
    return network.distributions()["weight"]


def test_the_log_determinant_of_a_flow_is_that_of_its_jacobian(flow):
    z = torch.randn(2, dtype=torch.float64)

    def transformed(z):
        return flow._transform("q", z, torch.Generator().manual_seed(0))

    jacobian = torch.autograd.functional.jacobian(lambda z: transformed(z)[0], z)
    torch.testing.assert_close(transformed(z)[1], jacobian.det().abs().log())
    assert abs(transformed(z)[1]) > 0.01


def test_the_auxiliary_density_of_a_flow_is_normalised(flow):
    axis = torch.linspace(-30, 30, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        density = torch.func.vmap(lambda z: flow.log_auxiliary(z, flow.weight), randomness="same")(grid).exp()
    assert float(density.sum()) * 0.2**2 == pytest.approx(1, abs=0.01)


def test_the_bound_of_a_flow_is_the_kl_of_z_and_weights_together(flow):
    """E log q(W, z) - log p(W) r(z | W), by the definition, from many draws of z and W."""
    with torch.no_grad():
        torch.manual_seed(0)
        found = torch.stack([flow.divergence() for _ in range(700)])
        naive = []
        for _ in range(700):
            start = flow.own["z_mean"] + (0.5 * flow.own["z_log_var"]).exp() * torch.randn(2, dtype=torch.float64)
            z, log_det = flow._transform("q", start, None)
            scale = torch.distributions.Normal(flow.own["z_mean"], (0.5 * flow.own["z_log_var"]).exp())
            weights = torch.distributions.Normal(flow.weight * z, flow.own["log_std"].exp())
            weight = weights.sample()
            log_q = scale.log_prob(start).sum() - log_det + weights.log_prob(weight).sum()
            log_p = torch.distributions.Normal(0.0, 1.0).log_prob(weight).sum()
            naive.append(log_q - log_p - flow.log_auxiliary(z, weight))
        naive = torch.stack(naive)
    error = ((found.var() + naive.var()) / 700).sqrt()
    assert abs(float(found.mean() - naive.mean())) < 4 * float(error)
