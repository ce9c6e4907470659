"""Our last-layer Laplace beside laplace-torch: predictive variances, probabilities and prior precisions.

    pip install laplace-torch
    python benchmarks/laplace_oracle.py

Networks and data are made by formulas, so that the numbers are the same everywhere. The largest relative differences
are printed. tests/methods/laplace/test_laplace.py keeps some of the numbers.
"""

import torch
from package_cost import skip_torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes.methods.laplace.last_layer_laplace import log_evidence

skip_torchvision()
from laplace import Laplace  # noqa: E402


def formula(*shape: int, speed: float) -> Tensor:
    """Return numbers that look random and are the same everywhere."""
    count = torch.arange(1, int(torch.tensor(shape).prod()) + 1, dtype=torch.float64)
    return torch.sin(speed * count * count.sqrt()).reshape(shape).float()


def network(outputs: int, *, norm: bool) -> nn.Module:
    middle = [nn.BatchNorm1d(12)] if norm else []
    made = nn.Sequential(nn.Linear(3, 12), *middle, nn.Tanh(), nn.Linear(12, outputs)).eval()
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(formula(*parameter.shape, speed=0.7 + 0.1 * index))
    return made


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs() / theirs.abs().clamp_min(1e-12)).max())


def compare(name: str, outputs: int, likelihood: object, kind: str, noise_std: float = 1.0) -> None:
    x, new = formula(200, 3, speed=0.37), 2 * formula(20, 3, speed=0.91)
    y = (formula(200, outputs, speed=0.5)) if kind == "regression" else (torch.arange(200) % outputs)
    for norm in (False, True):
        model = network(outputs, norm=norm)
        theirs = Laplace(model, kind, subset_of_weights="last_layer", hessian_structure="full", prior_precision=0.7,
                         sigma_noise=noise_std)  # fmt: skip
        theirs.fit(DataLoader(TensorDataset(x, y), batch_size=50))
        ours = bb.last_layer_laplace(model, x, likelihood, prior_precision=0.7)
        mean, covariance = theirs._glm_predictive_distribution(new)
        own_mean, own_covariance = ours.outputs(new)
        print(f"{name}, batch norm {norm}: mean {difference(own_mean, mean):.1e}, "
              f"covariance {difference(own_covariance, covariance):.1e}")  # fmt: skip
        if kind == "classification":
            probs = theirs(new, pred_type="glm", link_approx="probit")
            print(f"  probit {difference(ours.probit_probs(new), probs):.1e}")
        evidence = [float(theirs.log_marginal_likelihood(torch.tensor(p))) for p in (0.1, 0.7, 5.0)]
        own = [log_evidence(ours, p) for p in (0.1, 0.7, 5.0)]
        steps = [(own[i] - own[1]) - (evidence[i] - evidence[1]) for i in (0, 2)]
        print(f"  differences of the log evidence between three priors agree to {max(map(abs, steps)):.1e}")
        best = bb.last_layer_laplace(model, x, likelihood).prior_precision
        print(f"  best prior precision {best:.4f}")
        print("  for the test:", [round(v, 6) for v in covariance.diagonal(dim1=1, dim2=2)[:3].flatten().tolist()])


if __name__ == "__main__":
    torch.manual_seed(0)
    compare("regression", 2, bb.gaussian(precision=4.0), "regression", noise_std=0.5)
    compare("classification", 4, bb.categorical(), "classification")
