"""Last-layer Laplace against Bayesian linear regression, autograd, dense matrices, and numbers of laplace-torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import attention
from torch import nn

import batchbayes as bb
from batchbayes.methods.laplace import last_layer_laplace as last_layer
from batchbayes.methods.laplace.curvature import FullCurvature, KroneckerCurvature
from batchbayes.methods.laplace.last_layer_laplace import log_evidence


def formula(*shape, speed):
    """Numbers that look random and are the same everywhere, as in benchmarks/laplace_oracle.py."""
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(speed * count * count.sqrt()).reshape(shape).float()


def network(outputs, norm=False, bias=True):
    middle = [nn.BatchNorm1d(12)] if norm else []
    made = nn.Sequential(nn.Linear(3, 12), *middle, nn.Tanh(), nn.Linear(12, outputs, bias=bias)).eval()
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(formula(*parameter.shape, speed=0.7 + 0.1 * index))
    return made


X, NEW = formula(200, 3, speed=0.37), 2 * formula(20, 3, speed=0.91)

LAPLACE_TORCH = {
    "regression": (2, False, bb.gaussian(precision=4.0), [0.109938, 0.109938, 0.133021, 0.133021, 0.123313, 0.123313]),
    "regression, norm": (2, True, bb.gaussian(precision=4.0), [0.047707, 0.047707, 0.142962, 0.142961, 0.361289]),
    "classes": (4, False, bb.categorical(), [3.71208, 4.102038, 4.289297, 3.465172, 3.924739, 3.815181, 3.732237]),
    "classes, norm": (4, True, bb.categorical(), [3.217297, 3.174689, 3.323029, 3.369572, 3.236849, 3.209022]),
}
"""Variances of the outputs by laplace-torch 0.3, made by benchmarks/laplace_oracle.py."""


@pytest.mark.parametrize(("outputs", "norm", "likelihood", "variances"), LAPLACE_TORCH.values(), ids=LAPLACE_TORCH)
def test_variances_are_those_of_laplace_torch(outputs, norm, likelihood, variances):
    posterior = bb.last_layer_laplace(network(outputs, norm), X, likelihood, prior_precision=0.7)
    _, covariance = posterior.outputs(NEW)
    found = covariance.diagonal(dim1=1, dim2=2).flatten()[: len(variances)]
    torch.testing.assert_close(found, torch.tensor(variances), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_regression_is_bayesian_linear_regression(bias):
    model = network(1, bias=bias).double()
    phi, new = (model[:-1](part.double()) for part in (X, NEW))
    if bias:
        phi, new = (F.pad(part, (0, 1), value=1.0) for part in (phi, new))
    precision = 9.0 * phi.T @ phi + 0.3 * torch.eye(phi.shape[1])
    expected = torch.einsum("np,pq,nq->n", new, precision.inverse(), new)
    posterior = bb.last_layer_laplace(model, X.double(), bb.gaussian(precision=9.0), prior_precision=0.3)
    mean, covariance = posterior.outputs(NEW.double())
    torch.testing.assert_close(covariance[:, 0, 0], expected)
    assert torch.equal(mean, model(NEW.double()))


LIKELIHOODS = {"categorical": bb.categorical(temperature=1.3), "bernoulli": bb.bernoulli(0.8)}
TARGETS = {"categorical": torch.arange(200) % 3, "bernoulli": (formula(200, 3, speed=1.1) > 0).float()}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_curvature_is_that_of_autograd(name):
    model, likelihood = network(3).double(), LIKELIHOODS[name]
    features = F.pad(model[:-1](X.double()).detach(), (0, 1), value=1.0)

    def negative_log_likelihood(weights):
        return -likelihood((features @ weights.view(3, -1).T)[None]).log_prob(TARGETS[name].to(torch.float64)).sum()

    posterior = bb.last_layer_laplace(model, X.double(), likelihood, prior_precision=1.0)
    hessian = torch.autograd.functional.hessian(negative_log_likelihood, posterior.center)
    assert isinstance(posterior.curvature, FullCurvature)
    rebuilt = (posterior.curvature.vectors * posterior.curvature.eigenvalues) @ posterior.curvature.vectors.T
    torch.testing.assert_close(rebuilt, hessian, rtol=1e-6, atol=1e-8)


def test_kronecker_is_the_dense_product(monkeypatch):
    monkeypatch.setattr(last_layer, "MOST_FULL", 0)
    model = network(3).double()
    posterior = bb.last_layer_laplace(model, X.double(), bb.categorical(), prior_precision=0.5)
    assert isinstance(posterior.curvature, KroneckerCurvature)
    with torch.no_grad():
        phi, new = (F.pad(model[:-1](part.double()), (0, 1), value=1.0) for part in (X, NEW))
        probs = model(X.double()).softmax(-1)
    mean_hessian = (probs.diag_embed() - probs[:, :, None] * probs[:, None]).mean(0)
    covariance = (torch.kron(mean_hessian, phi.T @ phi) + 0.5 * torch.eye(39)).inverse()
    jacobian = torch.stack([torch.kron(torch.eye(3), row[None]) for row in new])  # (n, 3, 39)
    torch.testing.assert_close(posterior.outputs(NEW.double())[1], jacobian @ covariance @ jacobian.mT)
    draws = posterior.deviations(0, range(20_000)).flatten(1)
    error = (draws.T @ draws / len(draws) - covariance).abs() / covariance.diagonal().outer(
        covariance.diagonal()
    ).sqrt()
    assert error.max() < 6 * (2 / 20_000) ** 0.5


@pytest.mark.parametrize(
    "likelihood", [bb.categorical(), bb.gaussian(precision=[1.0, 3.0, 9.0])], ids=["classes", "real"]
)
def test_draws_have_the_moments_of_the_closed_form(likelihood):
    posterior = bb.last_layer_laplace(network(3), X, likelihood, prior_precision=2.0)
    mean, covariance = posterior.outputs(NEW)
    draws = posterior.draw_together(5, range(20_000))(NEW)  # (S, n, K)
    spread = covariance.diagonal(dim1=1, dim2=2)
    assert ((draws.mean(0) - mean).abs() < 5 * (spread / 20_000).sqrt()).all()
    ratio = draws.var(0) / spread
    assert ((ratio - 1).abs() < 5 * (2 / 20_000) ** 0.5).all()
    with torch.no_grad():
        torch.testing.assert_close(posterior.draw(5, 7)(NEW), draws[7], rtol=1e-4, atol=1e-4)


def test_the_linear_engine_is_exact():
    posterior = bb.last_layer_laplace(network(3), X, bb.categorical(), prior_precision=2.0)
    exact, linear = (bb.predict(posterior, NEW, bb.categorical(), engine=engine) for engine in ("sample", "auto"))
    assert linear.engine.startswith("linear")
    torch.testing.assert_close(linear.probs, exact.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whole", [True, False], ids=["full", "Kronecker"])
def test_draws_that_are_not_formed_are_the_same(whole, monkeypatch):
    """With many classes all draws at once would be large. They are made one after the other."""
    monkeypatch.setattr(last_layer, "MOST_FULL", 10**6 if whole else 0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x = torch.randn(40, 2).double()
    posterior = bb.last_layer_laplace(network, x, bb.categorical(), prior_precision=1.0)
    naive = torch.stack([posterior.draw(3, s)(x) for s in range(9)])
    monkeypatch.setattr(last_layer, "MATRICES", 0)
    deviations = last_layer.LaplacePosterior.deviations

    def of_one(self, seed, indices):
        assert len(indices) == 1  # nobody asks for the weights of several draws
        return deviations(self, seed, indices)

    monkeypatch.setattr(last_layer.LaplacePosterior, "deviations", of_one)
    assert (posterior.draw(3, 4)(x) - naive[4]).abs().max() < 1e-12
    found = bb.predict(posterior, x, bb.gaussian(1.0), num_samples=9, seed=3, engine="linear", keep_draws=True)
    assert (found.draws - naive).abs().max() < 1e-12
    found = bb.predict(posterior, x[:5], bb.categorical(), num_samples=9, seed=3, engine="linear")
    assert (found.probs - naive[:, :5].softmax(-1).mean(0)).abs().max() < 1e-12


def test_under_a_narrow_posterior_probit_is_near_the_mean_of_draws():
    posterior = bb.last_layer_laplace(network(3), X, bb.categorical(), prior_precision=5.0)
    drawn = posterior.draw_together(0, range(4000))(NEW).softmax(-1).mean(0)
    plain = posterior.outputs(NEW)[0].softmax(-1)
    probit = posterior.probit_probs(NEW)
    assert (probit - drawn).abs().mean() < 0.7 * (plain - drawn).abs().mean()
    assert (probit - drawn).abs().max() < 0.02


def test_evidence_is_that_of_the_exact_gaussian_integral():
    """With fixed features a regression has a Gaussian marginal likelihood: y ~ N(0, phi phi^T / delta + I / tau)."""
    model, tau = network(1).double(), 4.0
    with torch.no_grad():
        phi = F.pad(model[:-1](X.double()), (0, 1), value=1.0)
        y = phi @ torch.full((13, 1), 0.4, dtype=torch.float64) + 0.5 * formula(200, 1, speed=1.7)
        best = torch.linalg.solve(tau * phi.T @ phi + 0.9 * torch.eye(13), tau * phi.T @ y)  # the mode under delta 0.9
        model[-1].weight.copy_(best[:-1].T)
        model[-1].bias.copy_(best[-1])
    posterior = bb.last_layer_laplace(model, X.double(), bb.gaussian(precision=tau), prior_precision=0.9)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(200), phi @ phi.T / 0.9 + torch.eye(200) / tau)
    at_mode = torch.distributions.Normal(phi @ best, tau**-0.5).log_prob(y).sum()
    assert math.isclose(log_evidence(posterior, 0.9) + at_mode, marginal.log_prob(y[:, 0]), rel_tol=1e-6)


def test_the_prior_is_chosen_by_evidence_or_by_held_out_data():
    model = network(3)
    by_evidence = bb.last_layer_laplace(model, X, bb.categorical())
    grid = [log_evidence(by_evidence, precision) for precision in torch.logspace(-4, 5, 200).tolist()]
    assert log_evidence(by_evidence, by_evidence.prior_precision) >= max(grid) - 1e-6
    right = model(X).argmax(-1)
    assert bb.last_layer_laplace(model, X, bb.categorical(), held_out=(X, right)).prior_precision > 1e4
    held_out = [(X, (right + torch.arange(200) % 3) % 3)]  # two of three labels are wrong: less certain is better
    assert bb.last_layer_laplace(model, X, bb.categorical(), held_out=held_out).prior_precision < 0.1


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        return {"first": self.first(h), "second": self.second(h)}


def test_the_layer_is_found_by_what_it_makes():
    model = TwoHeads()
    for output in ("first", "second"):
        posterior = bb.last_layer_laplace(model, X, bb.categorical(), output=output, prior_precision=1.0)
        assert posterior.layer.name == output
    attended = bb.last_layer_laplace(attention().eval(), torch.randn(16, 5, 3), bb.categorical(), prior_precision=1.0)
    assert attended.layer.name == "3"


class Shifted(nn.Module):
    """A network with two inputs; the second may be in the place where many loaders have the targets."""

    def __init__(self):
        super().__init__()
        self.network = network(3)

    def forward(self, x, kind):
        return self.network(x + kind[:, None])


def test_held_out_targets_are_last_or_where_they_are_said_to_be():
    kinds, right = torch.arange(len(X)) % 3, network(3)(X).argmax(1)
    first = bb.last_layer_laplace(network(3), X, bb.categorical(), held_out=(X, right)).prior_precision
    named = [{"x": X, "class": right}]
    for batches, options in (([(X, kinds, right)], {}), (named, {"inputs": "x", "targets": "class"})):
        fit = bb.last_layer_laplace(network(3), batches, bb.categorical(), held_out=batches, **options)
        assert fit.prior_precision == first
    model = Shifted()
    with torch.no_grad():
        right = model(X, kinds).argmax(1)
    batches = [(X, kinds, right)]
    fit = bb.last_layer_laplace(model, batches, bb.categorical(), held_out=batches, inputs=(0, 1))
    assert fit.prior_precision > 1e4  # as all answers are right, the weights need no spread


@pytest.mark.parametrize("likelihood", [bb.gaussian(4.0), bb.bernoulli()])
def test_a_network_may_take_the_axis_of_its_one_output_away(likelihood, tmp_path):
    """A network that returns (N,) has the posterior of one that returns (N, 1), by both engines and from a file."""
    plain = network(1)
    flat, targets = nn.Sequential(plain, nn.Flatten(0)), (X[:, 0] > 0).float()
    fits = [bb.last_layer_laplace(each, X, likelihood, held_out=[(X, targets)]) for each in (plain, flat)]
    assert fits[0].prior_precision == fits[1].prior_precision
    for ours, theirs in zip(fits[1].outputs(NEW), fits[0].outputs(NEW), strict=True):
        torch.testing.assert_close(ours, theirs)
    bb.save(fits[1], tmp_path / "flat")
    expected = bb.predict(fits[0], NEW, likelihood, num_samples=8, keep_draws=True).draws
    for posterior in (fits[1], bb.load(tmp_path / "flat", flat)):
        for engine in ("sample", "linear"):
            draws = bb.predict(posterior, NEW, likelihood, num_samples=8, keep_draws=True, engine=engine).draws
            torch.testing.assert_close(draws, expected[..., 0], rtol=1e-4, atol=1e-5)


def test_an_embedding_that_shares_the_weights_of_the_last_layer_stays_as_it_is():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).mean(1))

    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (30, 3))
    posterior = bb.last_layer_laplace(Tied(), tokens, bb.categorical(), prior_precision=1.0)
    drawn, linear = (bb.predict(posterior, tokens, bb.categorical(), engine=e) for e in ("sample", "linear"))
    torch.testing.assert_close(drawn.probs, linear.probs)


BAD = {
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), {}, "without a softmax after it"),
    "no linear": (lambda: nn.Sequential(nn.Tanh()), {}, "linear layers are none"),
    "wrong name": (lambda: network(3), {"layer": "0"}, "a linear layer '0'"),
    "prior": (lambda: network(3), {"prior_precision": -1.0}, "a prior precision above 0"),
    "prior as text": (lambda: network(3), {"prior_precision": "1"}, "a prior precision above 0"),
    "no held-out data": (lambda: network(3), {"held_out": []}, "at least one batch as held_out="),
    "no labels": (lambda: network(3), {"held_out": X}, "labelled batches"),
    "likelihood": (lambda: network(4), {"likelihood": bb.heteroscedastic_gaussian()}, "for the Laplace approximation"),
    "precisions": (lambda: network(4), {"likelihood": bb.gaussian((1.0, 2.0))}, "one for each precision"),
    "NaN": (lambda: nn.Linear(3, 2).requires_grad_(False).apply(lambda layer: layer.weight.fill_(torch.nan)), {},
            "finite outputs of the network"),
    "brackets": (lambda: network(4), {"likelihood": bb.categorical}, "not called"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "options", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(build, options, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.last_layer_laplace(build(), X, **{"likelihood": bb.categorical(), **options})


def test_another_network_and_no_data_are_refused(tmp_path):
    posterior = bb.last_layer_laplace(network(3), X, bb.categorical(), prior_precision=1.0)
    bb.save(posterior, tmp_path / "laplace.safetensors")
    with pytest.raises(bb.BatchbayesError, match="without it"):
        bb.load(tmp_path / "laplace.safetensors", network(4))
    with pytest.raises(bb.BatchbayesError, match="at least one training example"):
        bb.last_layer_laplace(network(3), [], bb.categorical())


def test_held_out_draws_of_many_classes_are_made_part_by_part():
    """64 draws of 300 classes for 400 examples are more numbers than one part holds: the loss is that of the whole."""
    torch.manual_seed(0)
    network, x, y = nn.Linear(5, 300).double(), torch.randn(400, 5).double(), torch.randint(0, 300, (400,))
    posterior = bb.last_layer_laplace(network, x, bb.categorical(), prior_precision=2.0)
    loss = last_layer._held_out_loss(posterior, [(x, y)], bb.categorical())
    draws = torch.stack([posterior.draw(0, index)(x) for index in range(64)]).detach()
    expected = draws.softmax(-1).mean(0)[torch.arange(400), y].log().mean()
    assert loss(2.0) == pytest.approx(-float(expected), rel=1e-9)


def test_an_assessment_of_one_logit_has_laplace_too():
    """Likelihoods of reports drop the last axis of one logit (N, 1)."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(300, 2)
    for _ in range(20):
        network(x)
    y = (x[:, 0] > 0).long()
    options = {"method": ("last-layer-laplace",), "recommend": "Last-layer Laplace", "draws": 8, "no_figures": True}
    found = bb.assess(network.eval(), (x[:150], y[:150]), (x[150:], y[150:]), batch_size=16, **options)
    assert found.recommended.name.startswith("Last-layer Laplace")
