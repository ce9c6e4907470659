r"""What the central limit theorem says of the statistics of mini-batches, and tests of whether they obey.

For batches of M examples: $\mu_B \sim N(\mu, \sigma^2/M)$ and
$\sigma_B \sim N(\sigma, (\mu_4 - \sigma^4) / (4 \sigma^2 M))$, as in the appendix of the MCBN paper.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from batchbayes.methods.batchnorm.diagnostics.kolmogorov import kolmogorov_p_value, ks_distance, lilliefors_p_value
from batchbayes.methods.batchnorm.diagnostics.normality import ROUNDING, Statistic
from batchbayes.models.mlp import MLP
from batchbayes.network import Network


def layer_inputs(network: MLP, inputs: Tensor) -> list[Tensor]:
    """What each batch norm is given, (N, C), when all training rows are one batch; in double precision."""
    names = [f"hidden.{number}.norm" for number in range(len(network.hidden))]
    seen: list[Tensor] = []

    def see(values: Tensor) -> None:
        seen.append(values.double())

    by_batch = {f"{name}.running_{kind}": None for name in names for kind in ("mean", "var")}
    with torch.no_grad():
        Network(network)(inputs, tensors=by_batch, before=dict.fromkeys(names, see))
    return seen


def limit_gaussians(values: Tensor, batch_size: int) -> dict[Statistic, Normal]:
    """The Gaussians of the central limit theorem for batches of M, from all values of each unit, (N, C).

    >>> claims = limit_gaussians(torch.tensor([[-2.0], [0.0], [0.0], [2.0]]), batch_size=8)
    >>> [(round(float(claim.loc), 3), round(float(claim.variance), 3)) for claim in claims.values()]
    [(0.0, 0.25), (1.414, 0.062)]
    """
    variance, mean = torch.var_mean(values, 0, correction=0)
    fourth = (values - mean).pow(4).mean(0)
    of_std = (fourth - variance.square()).clamp_min(0) / (4 * variance * batch_size)
    return {
        "mean": Normal(mean, (variance / batch_size).sqrt(), validate_args=False),
        "std": Normal(variance.sqrt(), of_std.sqrt(), validate_args=False),
    }


def without_replacement(num_rows: int, batch_size: int) -> float:
    """How much less a mean of M of N rows varies when none is drawn twice.

    >>> without_replacement(5, 3)
    0.5
    """
    return (num_rows - batch_size) / (num_rows - 1)


@dataclass(frozen=True, eq=False)
class Verdicts:
    """On one statistic of the C units of a layer, (c,) each, without those that never vary."""

    fitted: Tensor
    """p-values against a Gaussian with the moments of the same batches."""
    limit: Tensor
    """p-values against that of the central limit theorem."""
    finite: Tensor
    """p-values against the same, for batches drawn without replacement."""
    ratio: Tensor
    """Observed variance over that of the central limit theorem."""


def hold_against(observed: Tensor, claim: Normal, shrinkage: float) -> Verdicts:
    """Test one statistic of C units in R batches, (R, C), against three Gaussians.

    Args:
        observed: the statistic in each batch.
        claim: the Gaussians of the central limit theorem, (C,).
        shrinkage: by how much the variance is less in batches drawn without replacement.

    >>> values = torch.randn(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> tests = hold_against(values, Normal(torch.zeros(1), torch.ones(1) / 2), shrinkage=4.0)
    >>> [bool(p > 0.05) for p in (tests.fitted, tests.limit, tests.finite)], round(float(tests.ratio))
    ([True, False, True], 4)
    """
    own = Normal(observed.mean(0), observed.std(0), validate_args=False)
    varies = (own.scale > ROUNDING * own.loc.abs()) & (claim.scale > 0)
    finite = Normal(claim.loc, claim.scale * math.sqrt(shrinkage), validate_args=False)
    count = len(observed)
    fitted = lilliefors_p_value(ks_distance(observed, own), count)
    limit, corrected = (kolmogorov_p_value(ks_distance(observed, each), count) for each in (claim, finite))
    ratio = own.variance / claim.variance
    return Verdicts(*(each[varies] for each in (fitted, limit, corrected, ratio)))
