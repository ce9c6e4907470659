"""The best score that a Gaussian of given mean can reach at a point whose error e = y - mean is known.

The variance is then chosen per point, with hindsight: an upper bound for any estimate of uncertainty around
the same mean. It is the 100 of the normalised score (``metrics.normalised_score``).
"""

import math

from torch import Tensor

from batchbayes._common.checks import check_finite, refuse

_ROOT_LOG_TWO = math.sqrt(math.log(2))


def crps_optimal_std(error: Tensor) -> Tensor:
    r"""Standard deviation with the lowest CRPS, :math:`\sigma^* = |e| / \sqrt{\ln 2} = 1.2011 |e|`.

    The derivative of the CRPS by :math:`\sigma` is :math:`2\varphi(e/\sigma) - 1/\sqrt\pi`, with this one
    root. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimal_std(torch.tensor([-2.0]))
    tensor([2.4022])
    """
    check_finite("error", error)
    return error.abs() / _ROOT_LOG_TWO


def crps_optimum(error: Tensor) -> Tensor:
    r"""The CRPS at that deviation, :math:`(2\Phi(\sqrt{\ln 2}) - 1) |e| = 0.594904 |e|`.

    Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> crps_optimum(torch.tensor([-2.0]))
    tensor([1.1898])
    """
    check_finite("error", error)
    return error.abs() * math.erf(_ROOT_LOG_TWO / math.sqrt(2))


def log_likelihood_optimal_precision(error: Tensor) -> Tensor:
    r"""Precision with the highest log-likelihood, :math:`\tau^* = 1 / e^2`. Shapes: (N, ...) -> (N, ...).

    >>> import torch
    >>> log_likelihood_optimal_precision(torch.tensor([-2.0]))
    tensor([0.2500])
    """
    _check_not_zero(error)
    return error.square().reciprocal()


def log_likelihood_optimum(error: Tensor) -> Tensor:
    r"""The log-likelihood at that precision, :math:`-\tfrac12 - \tfrac12 \log 2\pi - \log|e|`.

    Shapes: (N, ...) -> (N, ...). It has no upper limit as the error goes to zero, so a zero is refused.

    >>> import torch
    >>> log_likelihood_optimum(torch.tensor([-2.0]))
    tensor([-2.1121])
    """
    _check_not_zero(error)
    return -0.5 - 0.5 * math.log(2 * math.pi) - error.abs().log()


def _check_not_zero(error: Tensor) -> None:
    check_finite("error", error)
    zeros = int((error == 0).sum())
    if zeros:
        refuse(
            "errors that are not exactly zero: there the best log-likelihood is infinite",
            f"{zeros} zero",
            "Drop these points from all three scores, or compare by CRPS.",
        )
