"""Stein variational gradient descent against its definition and an exact posterior."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import batchbayes as bb
from batchbayes.methods.samples.svgd import direction, outputs_of
from batchbayes.models import MLP
from batchbayes.training.loop import TrainingConfig, half_squared_error

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(60, 2, generator=RANDOM) @ torch.tensor([[1.0, 0.0], [0.5, 0.8]])
Y = X @ torch.tensor([[1.0], [-0.5]]) + 0.5 * torch.randn(60, 1, generator=RANDOM)


def make():
    return nn.Sequential(nn.Linear(2, 1, bias=False))


def test_the_direction_is_that_of_the_definition():
    particles, slopes = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    distances = torch.tensor([[float((a - b).norm() ** 2) for b in particles] for a in particles]).double()
    apart = torch.tensor([distances[i, j] for i in range(5) for j in range(5) if i != j])
    width = apart.median() / torch.tensor(5.0).log()
    expected = torch.zeros(5, 3).double()
    for i in range(5):
        for j in range(5):
            leaf = particles[j].clone().requires_grad_()
            kernel = (-(leaf - particles[i]).square().sum() / width).exp()
            expected[i] += (kernel * slopes[j] + torch.autograd.grad(kernel, leaf)[0]).detach() / 5
    torch.testing.assert_close(direction(particles, slopes), expected, rtol=1e-4, atol=1e-6)


def test_particles_have_the_moments_of_a_conjugate_regression():
    config = TrainingConfig(epochs=300, batch_size=60, learning_rate=0.02)
    loss = lambda outputs, targets: 4 * half_squared_error(outputs, targets)  # noqa: E731
    samples = bb.svgd(make, (X, Y), loss, config, num_members=25, prior_precision=2.0)
    covariance = (4 * X.T @ X + 2 * torch.eye(2)).inverse()
    mean = 4 * covariance @ X.T @ Y
    found = samples.weights["0.weight"][:, 0]
    assert ((found.mean(0) - mean[:, 0]).abs() < 0.1 * covariance.diagonal().sqrt()).all()
    ratio = found.T.cov() / covariance
    assert ((ratio.diagonal() - 1).abs() < 0.3).all()
    assert abs(ratio[0, 1] - 1) < 0.4


class Doubled(MLP):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


@pytest.mark.parametrize("kind", [MLP, Doubled])
def test_outputs_of_all_particles_are_those_of_the_networks(kind):
    networks = [kind(3, [5, 4], 2, norm=False) for _ in range(3)]
    x, weights = torch.randn(6, 3), torch.stack([nn.utils.parameters_to_vector(n.parameters()) for n in networks])
    found = outputs_of(networks[0], {name: each.shape for name, each in networks[0].named_parameters()}, weights, x)
    torch.testing.assert_close(found, torch.stack([network(x) for network in networks]))


BAD = {
    "batch norm": (lambda: MLP(2, [4], 1), {}, "without batch norm and dropout"),
    "precision": (lambda: make().double(), {}, "inputs of torch.float64, as the networks are"),
    "one": (make, {"num_members": 1}, "num_members as a whole number of at least 2"),
    "prior": (make, {"prior_precision": -1.0}, "a prior precision above 0"),
    "diverges": (make, {"config": TrainingConfig(3, 60, 1e30)}, "finite weights"),
    "sum": (make, {"loss": nn.MSELoss(reduction="sum")}, "reduction='sum'"),
    "decay": (make, {"config": TrainingConfig(1, 60, weight_decay=0.1)}, "no weight decay beside the prior"),
    "-100": (make, {"data": (X, torch.full((60,), -100)), "loss": cross_entropy}, "got a label of -100"),
    "optimiser": (
        make,
        {"config": TrainingConfig(1, 60, optimiser="sgd")},
        "steps are taken by Adam; got optimiser='sgd'",
    ),
}


@pytest.mark.parametrize(("build", "options", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(build, options, words):
    options = {"data": (X, Y), "config": TrainingConfig(1, 60), "loss": half_squared_error, **options}
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.svgd(build, **options)
