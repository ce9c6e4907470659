r"""Stochastic batch normalisation: the noise of the batch statistics as a Gaussian.

What is random: the mean and the log standard deviation by which every batch-norm layer normalises.
q(omega): independent Gaussians whose moments match the statistics of mini-batches, that is a Normal mean and a
log-normal standard deviation. With `covariance="correlated"` it is `correlated_bn`.
Cost: that of MCBN.
Reference: Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018.
Where we differ: the moments are exact means over all mini-batches, not a moving
average. `estimator="moving-average"` gives the moving average of the authors' code: momentum 0.1 from zero, about 19
effective batches, 5 % too low.
"""

from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.statistics import MiniBatchOptions, fit_rows, prepare
from batchbayes.network.source import Batches

Covariance = Literal["factorised", "correlated"]
Estimator = Literal["exact", "moving-average"]
MOMENTUM = 0.1


@checked
def stochastic_bn(
    model: nn.Module,
    batches: Batches,
    *,
    covariance: Covariance = "factorised",
    estimator: Estimator = "exact",
    center: Center | None = None,
    dropout: bool = False,
    **options: Unpack[MiniBatchOptions],
) -> BatchNormPosterior:
    """Fit a Gaussian to the statistics of training mini-batches.

    Args:
        covariance: "factorised" is the published method. "correlated" keeps how channels and layers move together;
            without that, about two thirds of the disagreement between draws is lost.
        estimator: "exact" moments over all mini-batches, or the authors' "moving-average" (factorised only).
        num_samples: the number of mini-batches that the moments are estimated from. Draws are unlimited.

    The other arguments are those of `mcbn`.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> stochastic_bn(network, torch.randn(100, 2), batch_size=10, covariance="correlated").noise
    'correlated'
    """
    if covariance == "correlated" and estimator != "exact":
        raise BatchbayesError(
            expected='estimator="exact" for a correlated Gaussian', got=repr(estimator), fix="drop estimator="
        )
    whole_number("num_samples", options.get("num_samples", 64), least=2)  # a spread needs two mini-batches
    prepared = prepare(model, batches, **options)

    def gaussian(plain: BatchNormPosterior, rows: Tensor) -> BatchNormPosterior:
        if covariance == "correlated":
            return replace(plain, noise="correlated", method="correlated_stochastic_bn")
        middle, std = plain.center, plain.omega_var().sqrt()
        if estimator == "moving-average":
            averaged, std = moving_average_moments(rows)
            middle = averaged if plain.centered_on == "batches" else middle
        return replace(plain, center=middle, deviations=std[None], noise="factorised")

    return fit_rows(prepared, "stochastic_bn", center, dropout, gaussian)


def moving_average_moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and std of each statistic by exponential moving averages of x and x^2 that start from zero.

    >>> moving_average_moments(torch.ones(1, 1))
    (tensor([0.1000]), tensor([0.3000]))
    """
    first, second = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    for row in rows:
        first = (1 - MOMENTUM) * first + MOMENTUM * row
        second = (1 - MOMENTUM) * second + MOMENTUM * row.square()
    return first, (second - first.square()).clamp_min(0).sqrt()
