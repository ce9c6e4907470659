"""Numbers at the edge of what types hold, outputs without numbers, and networks that look at their batch."""

import numpy as np
import pytest
import torch
from helpers.settled import settled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes import calibrate, metrics

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_network_without_outputs_is_refused():
    for likelihood in (bb.gaussian(1.0), bb.categorical(), bb.bernoulli()):
        with pytest.raises(bb.BatchbayesError, match=r"at least one output|two classes"):
            bb.predict(bb.deterministic(nn.Linear(3, 0)), X, likelihood)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantised_tensors_are_refused_in_words():
    quantised = torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.quint8)
    with pytest.raises(bb.BatchbayesError, match="dequantize"):
        metrics.gaussian_crps(quantised, torch.ones(5), torch.zeros(5))
    with pytest.raises(bb.BatchbayesError, match="dequantize"):
        bb.predict(bb.deterministic(nn.Linear(5, 1)), quantised.view(1, 5), bb.gaussian(1.0))


@pytest.mark.parametrize(
    "make", [lambda v: np.array(v, dtype=np.uint64), lambda v: torch.tensor(v, dtype=torch.uint64)]
)
def test_uint64_above_the_largest_int64_is_refused(make):
    with pytest.raises(bb.BatchbayesError, match=r"below 2\^63"):
        metrics.root_mean_squared_error(make([2**63, 1]), np.array([0, 1]))
    assert metrics.root_mean_squared_error(make([3, 1]), np.array([3, 1])) == 0


def test_whole_numbers_in_intervals_are_compared_exactly():
    target = torch.tensor([2**24 + 1])
    assert metrics.interval_summary(torch.tensor([0.0]), torch.tensor([2.0**24]), target).coverage == 0
    large = torch.tensor([2**53 + 1])
    assert metrics.interval_summary(large - 5, large - 1, large).coverage == 0


@pytest.mark.parametrize("level", [1e-12, 1e-9, 0.01, 0.5, 0.9])
def test_conformal_ends_are_in_order_at_every_level(level):
    answer = bb.predict(bb.deterministic(nn.Linear(3, 1)), X, bb.gaussian(1.0))
    lower, upper = calibrate.conformal_intervals(answer, torch.randn(200), level)(answer)
    assert (lower <= upper).all()


def test_running_statistics_that_overflowed_are_refused():
    network = settled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), X)
    network[1].running_var[2] = 1e5
    half = network.half()
    with pytest.raises(bb.BatchbayesError, match="float16, which ends at 65504"):
        bb.mcbn(half, X.half(), batch_size=20)


class LooksAround(nn.Module):
    """Subtracts the largest of the batch, if there are many examples: with four of them nothing happens."""

    def __init__(self, fewest):
        super().__init__()
        self.fewest, self.last = fewest, nn.Linear(3, 1)

    def forward(self, x):
        y = self.last(x)
        return y - y.max() if len(x) >= self.fewest else y


@pytest.mark.parametrize("fewest", [1, 5, 16])
def test_a_network_that_looks_at_its_whole_batch_is_refused(fewest):
    with pytest.raises(bb.BatchbayesError, match="treats each example by itself"):
        bb.predict(bb.deterministic(LooksAround(fewest)), X, bb.gaussian(1.0))


def test_rounding_of_an_output_near_zero_is_no_neighbour():
    """Sums of another number of rows round in another way. The unit is the largest output, not that of one example."""

    class Rounds(nn.Module):
        def forward(self, x):
            return x[:, :1] + 1e-7 * len(x)

    x = torch.linspace(0, 2, 200)[:, None].expand(-1, 3)
    assert torch.isfinite(bb.predict(bb.deterministic(Rounds()), x, bb.gaussian(1.0)).mean).all()


def test_laplace_says_if_examples_are_dropped():
    loader = DataLoader(TensorDataset(X, torch.randn(200, 1)), batch_size=128, drop_last=True)
    with pytest.warns(bb.BatchbayesWarning, match="the last 72 of 200 examples do not count"):
        bb.last_layer_laplace(nn.Linear(3, 1), loader, bb.gaussian(1.0), prior_precision=1.0)


@pytest.mark.parametrize("fit", ["kronecker", "full"])
def test_laplace_accumulates(fit, monkeypatch):
    """The same numbers, without a matrix for each example: (300, 200, 200) in float64 would be 96 MB."""
    outputs = 200 if fit == "kronecker" else 6
    torch.manual_seed(0)
    network, x = nn.Linear(30, outputs).double(), torch.randn(300, 30).double()
    made = []
    whole = torch.Tensor.diag_embed
    monkeypatch.setattr(
        torch.Tensor, "diag_embed", lambda t, *a, **k: made.append(t.numel() * t.shape[-1]) or whole(t, *a, **k)
    )
    monkeypatch.setattr("batchbayes.methods.laplace.curvature.MATRICES", 2**12)
    posterior = bb.last_layer_laplace(network, x, bb.categorical(), prior_precision=1.0)
    assert max(made, default=0) <= 2**16
    p = network(x).softmax(-1).detach()
    phi = torch.cat([x, torch.ones(300, 1).double()], 1)
    if fit == "full":
        hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        truth = torch.einsum("nkj,np,nq->kpjq", hessians, phi, phi).reshape(6 * 31, 6 * 31)
        vectors = posterior.curvature.vectors
        torch.testing.assert_close(vectors @ posterior.curvature.eigenvalues.diag() @ vectors.T, truth)
    else:
        b = (p.sum(0).diag() - p.T @ p) / 300
        vectors = posterior.curvature.output_vectors
        values = posterior.curvature.eigenvalues[:, -1] / torch.linalg.eigvalsh(phi.T @ phi)[-1]
        torch.testing.assert_close(vectors @ values.diag() @ vectors.T, b)
    mean, covariance = posterior.outputs(x[:4])
    scale = (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).rsqrt()
    torch.testing.assert_close(posterior.probit_probs(x[:4]), (mean * scale).softmax(-1))


def test_novelty_tells_how_many_examples_it_needs_before_it_runs():
    network = settled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), X)
    network.register_forward_pre_hook(lambda *_: pytest.fail("no pass was needed"))
    loader = DataLoader(TensorDataset(X[:39]), batch_size=8)
    for data in (X[:39], loader, [X[:20], X[20:39]], TensorDataset(X[:39])):
        with pytest.raises(bb.BatchbayesError, match="at least 40 training examples"):
            bb.novelty(network, data)
        with pytest.raises(bb.BatchbayesError, match="at least 40 calibration examples"):
            bb.novelty(network, X, calibration=data)
    assert "At least 40" in bb.novelty.__doc__
