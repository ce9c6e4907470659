r"""Sparse variational dropout: most weights become noise around zero and can be left out.

What is random: each weight $w_i$ of the chosen layers.
q(omega): $w_i \sim N(\theta_i, \sigma_i^2)$ with $\alpha_i = \sigma_i^2 / \theta_i^2$. The prior is log-uniform,
$p(|w_i|) \propto 1/|w_i|$. The KL depends on alpha alone. We use the approximation
$KL \approx \sum_i k_1 - k_1 sigmoid(k_2 + k_3 \log\alpha_i) + 0.5 \log(1 + 1/\alpha_i)$, which is off by at most 0.011
nats for each weight and goes to zero as alpha grows. A weight with $\log\alpha_i > 3$ is pruned: it is more noise than
signal.
Parameters: $\theta$ and $\log\sigma^2$ (the additive parametrisation), whose gradients do not explode as alpha grows.
Cost of a training step: two products of a layer instead of one, and the KL.
Reference: Molchanov, Ashukha, Vetrov, "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017. As in the
authors' code, log alpha is clipped to [-8, 8], and the means of pruned weights are zero during training too.
Where we differ: their convolutions lose the noise of pruned weights too. Ours keep it, as their dense layers do.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchbayes._common.signatures import Finite, checked
from batchbayes.methods.weights.family import exp, log2
from batchbayes.methods.weights.mean_field import ClosedForm, Moments
from batchbayes.methods.weights.sites import Site

K1, K2, K3 = 0.63576, 1.87320, 1.48695
LOG_2 = math.log(2)
LIMIT = 8.0
"""The largest |log alpha|; beyond it the gradient is zero."""
THRESHOLD = 3.0
"""Weights with a larger log alpha are pruned."""
RATIOS = math.exp(-LIMIT), math.exp(LIMIT)
"""The limits of 1 / alpha."""
UNPRUNED = math.exp(-THRESHOLD), math.inf
"""Where 1 / alpha of the weights is that are not pruned."""
TINY = 1e-16
"""It is added to the square of a mean, whose logarithm is infinite at zero."""


@checked
@dataclass(frozen=True)
class SparseVD(ClosedForm):
    """Gaussian weights with a log-uniform prior, which prunes them."""

    kind: ClassVar[str] = "sparse-vd"

    initial_log_var: Finite = -10.0
    """log sigma^2 before training."""

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        return {"log_var": torch.full_like(weight, self.initial_log_var)}

    def moments(self, *parameters: Tensor) -> Moments:
        """Return the mean (zero where pruned) and variance of each weight, and the KL of all of them.

        The KL is the sum of `log_uniform_divergence`, computed with few passes over the weights and few buffers.
        """
        weight, log_var = parameters
        variance, square = exp(log_var), torch.addcmul(weight.new_full((), TINY), weight, weight)
        ratio = torch.div(square, variance).clamp_(*RATIOS)  # 1 / alpha
        torch.div(square, ratio, out=variance)
        half_slope = torch.div(weight, square, out=square)  # d log square / d weight = 2 weight / square
        share = log2(ratio)  # it becomes 1 - sigmoid(k2 + k3 log alpha)
        torch.add(weight.new_full((), -K2), share, alpha=K3 * LOG_2, out=share).sigmoid_()
        kl, sums = share.sum(), ratio + 1
        slope = share.addcmul_(share, share, value=-1).addcdiv_(ratio, sums, value=0.5 / (K1 * K3))
        kl.add_(sum_of_log2(sums), alpha=0.5 * LOG_2 / K1).mul_(K1)
        mean = where_between(weight, ratio, *UNPRUNED, out=sums)
        return mean, variance, kl, (half_slope, variance, ratio, slope)

    def gradients(
        self, kept: tuple[Tensor, ...], by_mean: Tensor, by_variance: Tensor, by_kl: Tensor
    ) -> tuple[Tensor, ...]:
        half_slope, variance, ratio, slope = kept  # dKL / d log alpha = -K1 K3 slope
        by_log_variance = by_variance.mul_(variance)
        by_log_var = torch.addcmul(by_log_variance, slope, by_kl, value=-K1 * K3)
        where_between(by_log_var, ratio, *RATIOS, out=by_log_var)
        # Inside the limits the variance does not depend on the weight. At a limit it is a multiple of its square.
        by_log_square = by_log_variance.sub_(by_log_var)
        where_between(by_mean, ratio, *UNPRUNED, out=by_mean)
        return by_mean.addcmul_(by_log_square, half_slope, value=2), by_log_var


def where_between(values: Tensor, numbers: Tensor, low: float, high: float, *, out: Tensor) -> Tensor:
    """Write the values to `out` where numbers are between two limits, and zeros elsewhere.

    The gradient of torch's hardtanh does that in one pass. A mask of truth values takes ten times as long.

    >>> where_between(torch.ones(3), torch.tensor([1.0, 2.0, 4.0]), 1, 3, out=torch.empty(3))
    tensor([0., 1., 0.])
    """
    return torch.ops.aten.hardtanh_backward.grad_input(values, numbers, low, high, grad_input=out)


def log_uniform_divergence(log_alpha: Tensor) -> Tensor:
    """Return the approximate KL between N(theta, alpha theta^2) and the log-uniform prior, for each weight.

    >>> log_uniform_divergence(torch.tensor([-2.0, 0.0, 2.0]))
    tensor([1.5405, 0.4312, 0.0684])
    """
    return K1 - K1 * torch.sigmoid(K2 + K3 * log_alpha) + 0.5 * torch.nn.functional.softplus(-log_alpha)


def sum_of_log2(numbers: Tensor) -> Tensor:
    """Return the sum of the binary logarithms of numbers between 1 and 1 + exp(LIMIT).

    Products of eight of them do not overflow, so that one logarithm does for eight.

    >>> [int(sum_of_log2(torch.full(shape, 2.0))) for shape in ((3, 4, 4), (7,))]
    [48, 7]
    """
    flat = numbers.reshape(-1)
    return log2(flat.view(8, -1).prod(0) if len(flat) % 8 == 0 else flat).sum()
