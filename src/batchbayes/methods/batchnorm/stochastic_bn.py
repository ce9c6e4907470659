r"""Stochastic batch normalisation: the noise of the batch statistics as a Gaussian.

What is random: the mean and the log standard deviation by which every batch-norm layer normalises.
q(omega): `stochastic_bn(covariance="factorised")`: independent Gaussians, that is a Normal mean and a log-normal
standard deviation, moments matched to the statistics of mini-batches (the published method). `covariance="correlated"`:
a Gaussian with the full covariance across channels and layers, in low rank: a draw is a random combination of the
observed deviations. `clt_bn`: independent Gaussians by the central limit theorem, from population moments up to the
fourth: $\mathrm{Var}(\mu_B) = \sigma^2/M$ and $\mathrm{Var}(\sigma_B) = (\mu_4 - \sigma^4)/(4\sigma^2 M)$, so that
$\mathrm{Var}(\log\sigma_B) = (\mu_4/\sigma^4 - 1)/(4M)$. Values within an example are not independent in convolutions:
there the moments are those of a whole example's contribution (see `ExampleMoments`). The theorem takes the examples
of a batch as independent, but a deeper layer sees them normalised together, which pins its batch means: there `clt_bn`
is too wide (on a CIFAR-10 ResNet-20 at M = 32 by factors of 2.6 to 5 in the means of deeper layers, 1.1 in the first).
Cost: that of MCBN; `clt_bn` needs no mini-batches, but one pass over the data.
Reference: Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018; for the central limit
theorem the appendix of Teye et al., 2018.
Where we differ: the cross-layer covariance is ours; the moments are exact means over all mini-batches, not a moving
average (`estimator="moving-average"` has that: momentum 0.1 from zero, about 19 effective batches, 5 % low).
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream
from batchbayes.batches import Batches, Picker
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.fit import gather_rows, posterior_from_rows, prepare
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select

Covariance = Literal["factorised", "correlated"]
Estimator = Literal["exact", "moving-average"]
MOMENTUM = 0.1


def stochastic_bn(
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    covariance: Covariance = "factorised",
    center: Center = "batches",
    estimator: Estimator = "exact",
    batch_size: int | None = None,
    training_batch_size: int | None = None,
    sites: Select = None,
    dropout: bool = False,
    inputs: Picker = None,
    output: str | int | None = None,
) -> BatchNormPosterior:
    """Fit a Gaussian to the statistics of training mini-batches.

    Args:
        covariance: "factorised" is the published method; "correlated" keeps how channels and layers move together,
            without which about half of the disagreement between draws is lost.
        estimator: "exact" moments over all mini-batches, or the authors' "moving-average" (factorised only).
        num_samples: the number of mini-batches that the moments are estimated from. Draws are unlimited.

    The other arguments are those of `mcbn`.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> stochastic_bn(network, torch.randn(100, 2), batch_size=10, covariance="correlated").noise
    'correlated'
    """
    if covariance not in ("factorised", "correlated") or estimator not in ("exact", "moving-average"):
        raise BatchbayesError(
            expected='covariance "factorised" or "correlated" and estimator "exact" or "moving-average"',
            got=f"{covariance!r} and {estimator!r}",
            fix="choose among these",
        )
    if covariance == "correlated" and estimator != "exact":
        raise BatchbayesError(
            expected='estimator="exact" for a correlated Gaussian', got=repr(estimator), fix="drop estimator="
        )
    if num_samples < 2:
        raise BatchbayesError(
            expected="two mini-batches or more", got=f"num_samples={num_samples}", fix="a spread needs two: pass 64"
        )
    with GlobalStream(seed):
        prepared = prepare(
            model,
            batches,
            num_samples=num_samples,
            seed=seed,
            batch_size=batch_size,
            training_batch_size=training_batch_size,
            sites=sites,
            inputs=inputs,
            output=output,
        )
        rows = gather_rows(prepared, num_samples, dropout=dropout)
    posterior = posterior_from_rows(prepared, rows, center, "stochastic_bn")
    if covariance == "correlated":
        return replace(posterior, noise="correlated", method="correlated_stochastic_bn")
    std = posterior.noise_variance().sqrt()
    middle = posterior.center
    if estimator == "moving-average":
        averaged, std = moving_average_moments(rows)
        middle = averaged if center == "batches" else middle
    return replace(posterior, center=middle, deviations=std[None], noise="factorised", influence=None)


def moving_average_moments(rows: Tensor, momentum: float = MOMENTUM) -> tuple[Tensor, Tensor]:
    """Mean and std of each statistic by exponential moving averages of x and x^2 that start from zero.

    >>> moving_average_moments(torch.ones(1, 1))
    (tensor([0.1000]), tensor([0.3000]))
    """
    first, second = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    for row in rows:
        first = (1 - momentum) * first + momentum * row
        second = (1 - momentum) * second + momentum * row.square()
    return first, (second - first.square()).clamp_min(0).sqrt()
