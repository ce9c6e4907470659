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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchbayes.methods.weights.closed_form import ClosedForm, Moments
from batchbayes.methods.weights.family import exp, full
from batchbayes.methods.weights.sites import Site

K1, K2, K3 = 0.63576, 1.87320, 1.48695
LIMIT = 8.0
"""The largest |log alpha|; beyond it the gradient is zero."""
THRESHOLD = 3.0
"""Weights with a larger log alpha are pruned."""
TINY = 1e-16
"""It is added to the square of a mean, whose logarithm is infinite at zero."""


@dataclass(frozen=True)
class SparseVD(ClosedForm):
    """Gaussian weights with a log-uniform prior, which prunes them."""

    kind: ClassVar[str] = "sparse-vd"

    initial_log_var: float = -10.0
    """log sigma^2 before training."""

    def start(self, weight: Tensor, site: Site) -> dict[str, Tensor]:
        return {"log_var": full(weight, self.initial_log_var)}

    def moments(self, *parameters: Tensor) -> Moments:
        """Do what `sparse_moments` does, with few passes over the weights."""
        weight, log_var = parameters
        square = weight.square().add_(TINY)
        log_square_slope = torch.div(weight, square).mul_(2)  # d log square / d weight
        log_square = square.log_()
        log_alpha = torch.sub(log_var, log_square).clamp_(-LIMIT, LIMIT)
        variance = exp(log_square.add_(log_alpha))
        kept = log_alpha.clone().le_(THRESHOLD)
        inside = log_alpha.abs().lt_(LIMIT)
        noise = log_alpha.sigmoid()  # alpha / (1 + alpha)
        share = log_alpha.mul_(K3).add_(K2).sigmoid_()
        kl = K1 * (weight.numel() - share.sum()) - 0.5 * sum_of_logs(noise)
        slope = share.addcmul_(share, share, value=-1).mul_(-K1 * K3)  # dKL / d log alpha
        slope.add_(noise.sub_(1), alpha=0.5).mul_(inside)
        return weight * kept, variance, kl, (log_square_slope, variance, kept, inside, slope)

    def gradients(
        self, kept: tuple[Tensor, ...], by_mean: Tensor, by_variance: Tensor, by_kl: Tensor
    ) -> tuple[Tensor, ...]:
        log_square_slope, variance, unpruned, inside, slope = kept
        by_log_variance = by_variance.mul_(variance)
        by_log_var = (by_log_variance * inside).addcmul_(slope, by_kl)
        # Inside the limits the variance does not depend on the weight. At a limit it is a multiple of its square.
        by_log_square = by_log_variance.sub_(by_log_var)
        return by_mean.mul_(unpruned).addcmul_(by_log_square, log_square_slope), by_log_var


def clipped_log_alpha(weight: Tensor, log_var: Tensor) -> Tensor:
    """Return log(sigma^2 / theta^2), between the limits."""
    return (log_var - (weight.square() + TINY).log()).clamp(-LIMIT, LIMIT)


def log_uniform_divergence(log_alpha: Tensor) -> Tensor:
    """Return the approximate KL between N(theta, alpha theta^2) and the log-uniform prior, for each weight.

    >>> log_uniform_divergence(torch.tensor([-2.0, 0.0, 2.0]))
    tensor([1.5405, 0.4312, 0.0684])
    """
    return K1 - K1 * torch.sigmoid(K2 + K3 * log_alpha) + 0.5 * torch.nn.functional.softplus(-log_alpha)


def sparse_moments(weight: Tensor, log_var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean (zero where pruned) and variance of each weight, and the KL of all of them."""
    log_alpha = clipped_log_alpha(weight, log_var)
    kl = log_uniform_divergence(log_alpha).sum()
    return weight * (log_alpha <= THRESHOLD), log_alpha.exp() * (weight.square() + TINY), kl


def sum_of_logs(shares: Tensor) -> Tensor:
    """Return the sum of the logarithms of numbers between exp(-LIMIT) and 1.

    Products of eight of them do not underflow, so that one logarithm does for eight.

    >>> sum_of_logs(torch.full((3, 4, 4), 0.5)) / torch.tensor(0.5).log()
    tensor(48.)
    """
    products = shares.flatten()
    while len(products) % 2 == 0 and 8 * len(products) > shares.numel():
        products = products[: len(products) // 2] * products[len(products) // 2 :]
    return products.log().sum()
