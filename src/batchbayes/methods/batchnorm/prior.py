r"""The prior that weight decay implies for batch statistics, and the distance from it.

What is random: the mean $\mu_B$ and the standard deviation $\sigma_B$ by which a unit is normalised; the latter is
what the layer divides by, $\sqrt{\mathrm{var} + \epsilon}$.
p: flat in $\mu_B$; $\sigma_B \sim N(0, 1/(N\tau\lambda))$, the variance at which the penalty
$\frac{\lambda}{2}\|W\|^2$ on a mean loss has the gradient of a KL divergence. $\lambda$ is the `weight_decay` of
torch's optimisers, which add $\lambda W$ to the gradient of the mean loss; the paper writes the penalty as
$\lambda_p\|W\|^2$, so that $\lambda_p = \lambda/2$ and the variance is $1/(2N\tau\lambda_p)$.
q: independent over units and statistics. `kl_to_implied_prior` takes the q that a posterior draws from, Normal means
and log-normal standard deviations.
The flat prior is improper. It counts as the density 1, so its part of the KL divergence is the negative entropy of q.
Only differences between KL divergences have a meaning.
Cost: O(D) for each batch size.
Reference: Teye, Azizpour, Smith, ICML 2018: section 3 and its appendix.
Where we differ: the KL of the log-normal is exact; a Gaussian matched by the delta method would drop terms of order
1/M. A training by this divergence, in place of weight decay, is `batch_norm_regulariser` in batchbayes-papers.
"""

import math
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import is_mean, site_of
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, require_noise


def gaussian_kl(mean: Tensor, var: Tensor, prior_mean: Tensor | float, prior_var: Tensor | float) -> Tensor:
    r"""Return $KL(N(m, v) \| N(m_0, v_0)) = \frac12[\log(v_0/v) + (v + (m - m_0)^2)/v_0 - 1]$ of each element.

    For factorised Gaussians the divergence is the sum.

    >>> gaussian_kl(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), 0.0, 1.0)
    tensor([0.0000, 0.5000])
    """
    prior_var = torch.as_tensor(prior_var, dtype=var.dtype, device=var.device)
    return 0.5 * ((prior_var / var).log() + (var + (mean - prior_mean).square()) / prior_var - 1)


def log_normal_kl(log_mean: Tensor, log_var: Tensor, prior_var: float) -> Tensor:
    r"""Return the KL divergence of a log-normal distribution from a Gaussian around zero, of each element.

    $KL(\mathrm{LogN}(\ell, v) \| N(0, v_0)) = \frac12[\log(v_0/v) + e^{2\ell + 2v}/v_0 - 1] - \ell$. To first
    order in v it is `gaussian_kl` of the delta method, $N(e^{\ell + v/2}, v e^{2\ell})$.
    """
    second_moment = (2 * log_mean + 2 * log_var).exp()
    return 0.5 * ((prior_var / log_var).log() + second_moment / prior_var - 1) - log_mean


def flat_kl(var: Tensor) -> Tensor:
    """Return the KL divergence of a Gaussian from the improper density 1, by element: its negative entropy."""
    return -0.5 * (2 * math.pi * math.e * var).log()


def implied_prior_var(*, num_examples: int, weight_decay: float, precision: float = 1.0) -> float:
    """Return the variance 1 / (N tau lambda) of the Gaussian that weight decay implies for a batch standard deviation.

    Args:
        num_examples: N, the size of the training set.
        weight_decay: lambda of the penalty lambda/2 ||W||^2 on the mean loss, as torch's optimisers take it.
        precision: tau, the inverse variance of a Gaussian likelihood whose loss was half the squared error; 1 for
            classification by cross-entropy.

    >>> implied_prior_var(num_examples=100, weight_decay=0.01, precision=2.0)
    0.5
    """
    given = {"num_examples": num_examples, "weight_decay": weight_decay, "precision": precision}
    for name, value in given.items():
        if not 0 < value < math.inf:
            why = "without weight decay the implied prior is flat, and there is no divergence from it: "
            fix = f"{why if name == 'weight_decay' else ''}pass what the network was trained with"
            raise BatchbayesError(f"{name} above zero", str(value), fix)
    return 1 / (num_examples * precision * weight_decay)


def kl_by_site(posterior: BatchNormPosterior, batch_sizes: Tensor, **options: Any) -> Tensor:
    """Return KL(q_M || p) in nats for each batch size M and each site, (K, sites); see `kl_to_implied_prior`."""
    prior_var = implied_prior_var(**options)
    require_noise(posterior)
    mean, noisy = is_mean(posterior.sites), posterior.omega_var() > 0
    index = site_of(posterior.sites)
    totals = torch.zeros(len(batch_sizes), len(posterior.sites), dtype=torch.float64)
    for total, batch_size in zip(totals, batch_sizes.tolist(), strict=True):
        moved = posterior.at_batch_size(batch_size)
        center, var = moved.center.double(), moved.omega_var().double()
        divergence = torch.where(mean, flat_kl(var), log_normal_kl(center, var, prior_var))
        total.index_add_(0, index[noisy], divergence[noisy])
    return totals


def kl_to_implied_prior(posterior: BatchNormPosterior, batch_sizes: Tensor, **options: Any) -> Tensor:
    r"""Return KL(q_M || p) in nats for each of K batch sizes M, (K,) in float64.

    q_M is the posterior at batch size M, with independent statistics. The posterior's own covariance is ignored,
    because a correlated q with fewer rows than statistics has no density. Statistics that never vary are left out: they
    add the same constant at every M. The divergence rises about as $\frac{D}{2}\log M$. Its origin is arbitrary,
    because the prior is flat, so compare only values at different M.

    The options are those of `implied_prior_var`.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> from batchbayes import clt_bn
    >>> posterior = clt_bn(network, torch.randn(100, 2), batch_size=10)
    >>> small, large = kl_to_implied_prior(posterior, torch.tensor([8.0, 64.0]), num_examples=100, weight_decay=1e-4)
    >>> bool(small < large)
    True
    """
    return kl_by_site(posterior, batch_sizes, **options).sum(1)
