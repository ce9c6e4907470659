"""The best score that a Gaussian with a given mean can reach at a point with a known error e = y - mean.

The variance is chosen for each point when the error is already known. So this score is a bound: no estimate of
uncertainty around the same mean can do better. `metrics.normalised_score` gives it the value 100.
"""

import math

from torch import Tensor

from batchbayes._common.checks import Values, check_finite, real, takes_arrays
from batchbayes.errors import BatchbayesError

_ROOT_LOG_TWO = math.sqrt(math.log(2))


@takes_arrays
def crps_optimal_std(error: Values) -> Tensor:
    r"""Return the standard deviation with the lowest CRPS, $\sigma^* = |e| / \sqrt{\ln 2} = 1.2011 |e|$.

    It is the only root of the derivative of the CRPS by $\sigma$, $2\varphi(e/\sigma) - 1/\sqrt\pi$.
    Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimal_std(torch.tensor([-2.0]))
    tensor([2.4022])
    """
    check_finite("error", error)
    return real(error).abs() / _ROOT_LOG_TWO


@takes_arrays
def crps_optimum(error: Values) -> Tensor:
    r"""Return the CRPS at `crps_optimal_std`, $(2\Phi(\sqrt{\ln 2}) - 1) |e| = 0.594904 |e|$.

    Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimum(torch.tensor([-2.0]))
    tensor([1.1898])
    """
    check_finite("error", error)
    return real(error).abs() * math.erf(_ROOT_LOG_TWO / math.sqrt(2))


@takes_arrays
def log_likelihood_optimal_precision(error: Values) -> Tensor:
    r"""Return the precision with the highest log-likelihood, $\tau^* = 1 / e^2$. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> log_likelihood_optimal_precision(torch.tensor([-2.0]))
    tensor([0.2500])
    """
    _check_not_zero(error)
    return real(error).square().reciprocal()


@takes_arrays
def log_likelihood_optimum(error: Values) -> Tensor:
    r"""Return the log-likelihood at `log_likelihood_optimal_precision`, $-\frac12 - \frac12 \log 2\pi - \log|e|$.

    It grows without limit as the error goes to zero, so an error of zero is not allowed. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> log_likelihood_optimum(torch.tensor([-2.0]))
    tensor([-2.1121])
    """
    _check_not_zero(error)
    return -0.5 - 0.5 * math.log(2 * math.pi) - real(error).abs().log()


def _check_not_zero(error: Tensor) -> None:
    check_finite("error", error)
    if zeros := int((error == 0).sum()):
        raise BatchbayesError(
            expected="errors other than zero, where the best log-likelihood is infinite",
            got=f"{zeros} zero",
            fix="drop these points from all scores that are compared, or compare by CRPS",
        )
