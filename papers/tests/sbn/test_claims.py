"""Small claims about batch norm that have no table: the bound of its training, its gradient, and the ELBO."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

import batchbayes as bb
from batchbayes.methods.weights.variational import negative_elbo
from batchbayes.models import MLP
from batchbayes.tools import GlobalStream
from batchbayes.training.loop import supervised

COUNT, SIZE = 7, 3


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(COUNT, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0, 1])


@pytest.fixture
def network() -> MLP:
    torch.manual_seed(1)
    return MLP(3, [5], 2).double()


def log_probability(network: MLP, x: Tensor, y: Tensor, example: int, others: tuple[int, ...]) -> Tensor:
    """Return log p(y_i given x_i, the rest of its batch), with batch norm written out."""
    (first, norm), last = network.hidden[0][:2], network.output
    hidden = first(x[[example, *others]])
    mean, variance = hidden.mean(0), hidden.var(0, correction=0)
    normalised = (hidden[0] - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    return log_softmax(last(normalised.relu()), 0)[y[example]]


def bound(network: MLP, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each example E[log p(y_i given x_i, B)] and log E[p(y_i given x_i, B)] over all batches with it."""
    expected, marginal = [], []
    for example in range(COUNT):
        rest = [other for other in range(COUNT) if other != example]
        each = torch.stack([log_probability(network, x, y, example, own) for own in combinations(rest, SIZE - 1)])
        expected.append(each.mean())
        marginal.append(each.logsumexp(0) - torch.tensor(float(len(each))).log())
    return torch.stack(expected), torch.stack(marginal)


def test_training_with_batch_norm_maximises_a_lower_bound_by_jensen(network, data):
    """The mean loss over all batches is the negative bound on the log-likelihood that averages over the batches."""
    expected, marginal = bound(network, *data)
    assert (marginal - expected > 1e-6).all()
    losses = [mini_batch_loss(network, data, rows) for rows in combinations(range(COUNT), SIZE)]
    torch.testing.assert_close(torch.stack(losses).mean(), -expected.mean())


def mini_batch_loss(network: MLP, data: tuple[Tensor, Tensor], rows: tuple[int, ...]) -> Tensor:
    return supervised(cross_entropy)(network.train(), (data[0][list(rows)], data[1][list(rows)]))


def test_the_gradient_of_a_mini_batch_is_unbiased_for_the_bound(network, data):
    parameters = list(network.parameters())
    expected = torch.autograd.grad(-bound(network, *data)[0].mean(), parameters)
    batches = list(combinations(range(COUNT), SIZE))
    each = [torch.autograd.grad(mini_batch_loss(network, data, rows), parameters) for rows in batches]
    for mine, gradients in zip(expected, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(gradients).mean(0), mine)
        assert torch.stack(gradients).std(0).max() > 1e-3  # of one batch it is not that of the bound


def test_a_gradient_that_takes_statistics_as_constants_is_biased(network, data):
    """So the test above could fail."""

    def constant(rows: tuple[int, ...]) -> Tensor:
        x, (first, norm) = data[0][list(rows)], network.hidden[0][:2]
        hidden = first(x)
        mean, variance = hidden.mean(0).detach(), hidden.var(0, correction=0).detach()
        normalised = (hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
        return cross_entropy(network.output(normalised.relu()), data[1][list(rows)])

    weight = network.hidden[0][0].weight
    (expected,) = torch.autograd.grad(-bound(network, *data)[0].mean(), [weight])
    each = [torch.autograd.grad(constant(rows), [weight])[0] for rows in combinations(range(COUNT), SIZE)]
    assert (torch.stack(each).mean(0) - expected).abs().max() > 1e-3


SCALE = 1.5


def with_batch_norm() -> nn.Module:
    """Return a linear classifier whose outputs are normalised by fixed statistics, and so scaled by SCALE."""
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(3, eps=0.0).double()
    norm.running_mean.copy_(torch.tensor([0.3, -0.2, 0.1]))  # type: ignore[operator, union-attr]
    norm.running_var.fill_(4.0)  # type: ignore[operator, union-attr]
    norm.weight.data.fill_(2 * SCALE)
    norm.bias.data.copy_(torch.tensor([0.5, 0.0, -0.4]))
    return nn.Sequential(nn.Linear(4, 3, bias=False).double(), norm).eval()


def without() -> nn.Module:
    """Return the linear classifier that is the same function for weights SCALE times as large."""
    linear = nn.Linear(4, 3).double()
    normalised = with_batch_norm()
    linear.weight.data.copy_(SCALE * normalised[0].weight.data)  # type: ignore[index, union-attr, operator]
    linear.bias.data.copy_(normalised(torch.zeros(1, 4, dtype=torch.float64))[0])
    return nn.Sequential(linear)


def elbo_optimum(module: nn.Module, prior_std: float) -> tuple[float, Tensor, Tensor]:
    """Maximise the ELBO of mean-field weights, for fixed noise. Return its value, the means and the deviations."""
    torch.manual_seed(3)
    batch = torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 3, (30,))
    random = bb.noisy(module, bb.MeanField(prior_std=prior_std, initial_std=0.5 * prior_std), layers=["0"]).eval()
    random.kl_weight.fill_(1.0)
    objective, log_std = negative_elbo(bb.categorical(), 30), random.parameters_of(random.sites[0])["log_std"]
    mean = random.module[0].weight  # type: ignore[index, union-attr]
    optimiser = torch.optim.LBFGS(
        [mean, log_std], max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        with GlobalStream(4):
            value = objective(random, batch)
        value.backward()
        return value

    optimiser.step(loss)  # type: ignore[arg-type]
    assert mean.grad.abs().max() < 1e-4  # type: ignore[union-attr]
    return -float(loss().detach()), mean.detach().clone(), log_std.detach().exp()  # type: ignore[union-attr]


def test_batch_norm_leaves_the_optimum_of_the_elbo_where_it_was():
    """With given statistics it scales weights. The optimum moves along with the prior, and the ELBO is the same.

    This is the part of the claim of Mukhoti et al. that can be tested without doubt: batch norm is another
    parametrisation of the same functions, and a divergence does not depend on the parametrisation.
    """
    normalised, plain = elbo_optimum(with_batch_norm(), 1.0), elbo_optimum(without(), SCALE)
    assert normalised[0] == pytest.approx(plain[0], abs=1e-6)
    torch.testing.assert_close(SCALE * normalised[1], plain[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(SCALE * normalised[2], plain[2], atol=1e-4, rtol=0)
    assert abs(elbo_optimum(without(), 1.0)[0] - plain[0]) > 0.01  # a prior that did not move along
