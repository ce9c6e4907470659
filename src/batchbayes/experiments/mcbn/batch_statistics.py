r"""The distribution of mini-batch statistics by the central limit theorem, and tests against it.

For batches of M examples, the appendix of the MCBN paper states $\mu_B \sim N(\mu, \sigma^2/M)$ and
$\sigma_B \sim N(\sigma, (\mu_4 - \sigma^4) / (4 \sigma^2 M))$.
"""

import math

import torch
from torch import Tensor
from torch.distributions import Normal

from batchbayes.methods.batchnorm.diagnostics.kolmogorov import kolmogorov_p_value, ks_distance, lilliefors_p_value
from batchbayes.methods.batchnorm.diagnostics.normality import ROUNDING, Statistic
from batchbayes.methods.batchnorm.omega import by_batch
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.models.mlp import MLP
from batchbayes.network import Network


def layer_inputs(network: MLP, inputs: Tensor) -> list[Tensor]:
    """Return the inputs of each batch norm, (N, C) in double precision, if all training rows form one batch."""
    sites, seen = all_sites(network), []
    with torch.no_grad():
        Network(network)(inputs, tensors=by_batch(sites), before={site.name: seen.append for site in sites})
    return [values.double() for values in seen]


def limit_gaussians(values: Tensor, batch_size: int) -> dict[Statistic, Normal]:
    """Return the Gaussians of the central limit theorem for batches of M, from all values of each unit, (N, C).

    >>> limits = limit_gaussians(torch.tensor([[-2.0], [0.0], [0.0], [2.0]]), batch_size=8)
    >>> [(round(float(limit.loc), 3), round(float(limit.variance), 3)) for limit in limits.values()]
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
    """Return the factor by which the variance of a batch mean shrinks if no row is drawn twice.

    >>> without_replacement(5, 3)
    0.5
    """
    return (num_rows - batch_size) / (num_rows - 1)


def compare_with_gaussians(observed: Tensor, limit: Normal, shrinkage: float) -> dict[str, Tensor]:
    """Test a statistic of C units in R batches, (R, C), against three Gaussians.

    Returns p-values against a Gaussian with the mean and the variance of the same batches ("fitted"), against that of
    the central limit theorem ("limit"), and against the latter, corrected for batches drawn without replacement
    ("finite"). "ratio" is the observed variance divided by that of the theorem. Each has a number for each unit that
    varies.

    Args:
        observed: the statistic in each batch.
        limit: the Gaussians of the central limit theorem, (C,).
        shrinkage: the factor by which the variance is smaller in batches drawn without replacement.

    >>> values = torch.randn(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> tests = compare_with_gaussians(values, Normal(torch.zeros(1), torch.ones(1) / 2), shrinkage=4.0)
    >>> [bool(tests[name] > 0.05) for name in ("fitted", "limit", "finite")], round(float(tests["ratio"]))
    ([True, False, True], 4)
    """
    own = Normal(observed.mean(0), observed.std(0), validate_args=False)
    varies = (own.scale > ROUNDING * own.loc.abs()) & (limit.scale > 0)
    finite = Normal(limit.loc, limit.scale * math.sqrt(shrinkage), validate_args=False)
    count = len(observed)
    tests = {
        "fitted": lilliefors_p_value(ks_distance(observed, own), count),
        "limit": kolmogorov_p_value(ks_distance(observed, limit), count),
        "finite": kolmogorov_p_value(ks_distance(observed, finite), count),
        "ratio": own.variance / limit.variance,
    }
    return {name: values[varies] for name, values in tests.items()}
