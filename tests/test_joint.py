"""Several outputs of a regression together: covariance, joint density, scores."""

import math

import pytest
import torch
from helpers.settled import settled
from scipy import stats
from torch import nn

import batchbayes as bb
from batchbayes.metrics import evaluate

X = torch.randn(300, 3, generator=torch.Generator().manual_seed(2)).double()


def fitted(outputs=2):
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)
    return bb.mcbn(settled(nn.Sequential(*layers).double(), X), X, batch_size=64, num_samples=12)


@pytest.mark.parametrize("engine", ["sample", "linear"])
@pytest.mark.filterwarnings("ignore:the network is not linear")
def test_covariance_and_joint_density_are_those_of_the_mixture(engine):
    posterior, y = fitted(), torch.randn(5, 2).double()
    likelihood = bb.gaussian([4.0, 1.0])
    answer = bb.predict(posterior, X[:5], likelihood, num_samples=12, engine=engine, keep_draws=True)
    noise = torch.tensor([0.25, 1.0]).double()
    for row in range(5):
        means = answer.draws[:, row]
        truth = torch.cov(means.T, correction=0) + noise.diag()
        torch.testing.assert_close(answer.covariance[row], truth)
        each = [stats.multivariate_normal(m.numpy(), noise.diag().numpy()).pdf(y[row].numpy()) for m in means]
        assert float(answer.joint_log_prob(y)[row]) == pytest.approx(math.log(sum(each) / 12), rel=1e-9)
    torch.testing.assert_close(answer.covariance.diagonal(dim1=1, dim2=2), answer.variance)
    assert (answer.joint_log_prob(y) - answer.log_prob(y).sum(1)).abs().max() > 1e-6  # they are not independent


def test_one_output_has_one_density():
    y = torch.randn(5, 1).double()
    answer = bb.predict(fitted(1), X[:5], bb.gaussian(2.0), num_samples=12)
    torch.testing.assert_close(answer.joint_log_prob(y), answer.log_prob(y)[:, 0])
    torch.testing.assert_close(answer.joint_log_prob(y[:, 0]), answer.log_prob(y)[:, 0])
    assert answer.covariance.shape == (5, 1, 1)


def test_a_network_that_predicts_its_noise_has_a_covariance():
    answer = bb.predict(fitted(4), X[:5], bb.heteroscedastic_gaussian(), num_samples=12)
    assert answer.covariance.shape == (5, 2, 2)
    torch.testing.assert_close(answer.covariance.diagonal(dim1=1, dim2=2), answer.variance)
    assert answer.joint_log_prob(torch.zeros(5, 2)).shape == (5,)


def test_evaluate_has_the_joint_density():
    y = torch.randn(20, 2).double()
    answer = bb.predict(fitted(), X[:20], bb.gaussian(2.0), num_samples=12)
    found = evaluate(answer, y)
    assert found["joint_nll"] == pytest.approx(-float(answer.joint_log_prob(y).mean()))
    assert found["nll"] == pytest.approx(-float(answer.log_prob(y).mean()))
    assert "joint_nll" not in evaluate(bb.predict(fitted(1), X[:20], bb.gaussian(2.0)), y[:, :1])


def test_too_many_outputs_for_matrices_are_refused(monkeypatch):
    monkeypatch.setattr("batchbayes.predictive.MOST_COVARIANCES", 10)
    with pytest.raises(bb.BatchbayesError, match="use variance"):
        _ = bb.predict(fitted(), X[:5], bb.gaussian(2.0), num_samples=12).covariance
