r"""The prior that weight decay implies for batch statistics, and the distance from it.

What is random: the mean $\mu_B$ and the standard deviation $\sigma_B$ by which a unit is normalised; the latter is
what the layer divides by, $\sqrt{\mathrm{var} + \epsilon}$.
p: flat in $\mu_B$; $\sigma_B \sim N(0, 1/(N\tau\lambda))$, the variance at which the penalty
$\frac{\lambda}{2}\|W\|^2$ on a mean loss has the gradient of a KL divergence. $\lambda$ is the `weight_decay` of
torch's optimisers, which add $\lambda W$ to the gradient of the mean loss; the paper writes the penalty as
$\lambda_p\|W\|^2$, so that $\lambda_p = \lambda/2$ and the variance is $1/(2N\tau\lambda_p)$.
q: independent over units and statistics. `kl_to_implied_prior` takes the q that a posterior draws from, Normal means
and log-normal standard deviations; `batch_norm_regulariser` the Gaussian of the central limit theorem (paper).
The flat prior is improper. It counts as the density 1, so its part of the KL divergence is the negative entropy of q.
Only differences between KL divergences have a meaning.
Cost: O(D) for each batch size; the regulariser adds about a third to a training step of a ResNet-20 on one CPU core.
Reference: Teye, Azizpour, Smith, ICML 2018: section 3 and its appendix.
Where we differ: the KL of the log-normal is exact; a Gaussian matched by the delta method would drop terms of order
1/M. In convolutions examples, not pixels, are independent. The paper does not say what the regulariser does: the loss
of a batch-normalised network does not depend on the scale of a unit's weights. So the scale follows the regulariser
alone, and settles at $E[\sigma_B^2] = 2/(N\tau\lambda)$. The rest of the regulariser favours heavy-tailed units, whose
statistics are noisier.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import is_mean, site_of
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, require_noise
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.network.function import as_network, inputs_watched


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

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> from batchbayes import clt_bn
    >>> posterior = clt_bn(network, torch.randn(100, 2), batch_size=10)
    >>> small, large = kl_to_implied_prior(posterior, torch.tensor([8.0, 64.0]), num_examples=100, weight_decay=1e-4)
    >>> bool(small < large)
    True
    """
    return kl_by_site(posterior, batch_sizes, **options).sum(1)


def batch_kl(inputs: Tensor, epsilon: float, prior_var: float) -> Tensor:
    r"""Return KL(q || p) of one batch-norm layer, with a gradient for the inputs (M, C, ...) that it will normalise.

    q is that of the central limit theorem: $\mu_B \sim N(\mu, \mathrm{Var}(a)/M)$ and
    $\sigma_B \sim N(\sigma, \mathrm{Var}(q)/(4\sigma^2 M))$, where an example contributes a, the mean of its values,
    and q, their mean squared distance from the mean. The batch stands for the population. The layer's epsilon is added
    to both variances, so that a unit that is always zero has a finite divergence.
    """
    values = (inputs if inputs.ndim > 2 else inputs.unsqueeze(2)).flatten(2)  # (M, C, P)
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    values = values - values.detach().mean((0, 2), keepdim=True)  # a constant: cheap to differentiate through
    a = values.mean(2)  # (M, C)
    shift = a.mean(0)  # zero, but for its gradient
    a, q = a - shift, torch.linalg.vecdot(values, values, dim=2) / values.shape[2] - 2 * shift * a + shift.square()
    divided = q.mean(0) + epsilon
    mean_var = (a.square().mean(0) + epsilon) / len(values)
    std_var = (q.var(0, correction=0) + epsilon**2) / (4 * divided * len(values))
    return (flat_kl(mean_var) + gaussian_kl(divided.sqrt(), std_var, 0.0, prior_var)).sum()


@contextmanager
def batch_norm_regulariser(
    network: nn.Module, *, num_examples: int, weight_decay: float, precision: float = 1.0
) -> Iterator[Callable[[], Tensor]]:
    r"""Train by the exact variational objective: $\Omega(\theta) = KL(q_\theta\|p)/(N\tau)$ in place of weight decay.

    The block gives a function. Call it after each forward pass of the training, and add its value to the mean loss:
    half the squared error (`precision` is tau, that of the noise in the targets) or the cross-entropy (`precision` 1).
    It replaces the weight decay of the weights before batch-norm layers. The other weights keep the weight decay of the
    optimiser. Passes in evaluation mode or without gradients are ignored.

    >>> net = nn.Sequential(nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> groups = [{"params": net[:3].parameters()}, {"params": net[3].parameters(), "weight_decay": 1e-3}]
    >>> stepper, x, y = torch.optim.Adam(groups), torch.randn(100, 2), torch.randn(100, 1)
    >>> with batch_norm_regulariser(net, num_examples=100, weight_decay=1e-3) as regulariser:
    ...     for rows in torch.randperm(100).split(20):
    ...         loss = 0.5 * nn.functional.mse_loss(net(x[rows]), y[rows]) + regulariser()
    ...         stepper.zero_grad()
    ...         loss.backward()
    ...         stepper.step()
    """
    prior_var = implied_prior_var(num_examples=num_examples, weight_decay=weight_decay, precision=precision)
    sites = {site.name: site for site in all_sites(as_network(network).module)}
    if not sites:
        raise BatchbayesError(
            expected="a network with batch normalisation", got="none of it", fix="use the optimiser's weight_decay"
        )
    seen: list[tuple[str, Tensor]] = []

    def see(name: str, inputs: Tensor) -> None:
        if sites[name].layer.training and torch.is_grad_enabled():
            seen.append((name, batch_kl(inputs, sites[name].epsilon, prior_var)))

    def regulariser() -> Tensor:
        names, divergences = [name for name, _ in seen], [divergence for _, divergence in seen]
        seen.clear()
        if not names or len(set(names)) < len(names):
            raise BatchbayesError(
                expected="one forward pass in training mode before each regulariser(), each batch-norm layer run once",
                got=f"{len(names)} runs of {len(set(names))} batch-norm layers",
                fix="call it right after network(inputs), and give each use of a shared layer a BatchNorm of its own",
            )
        return torch.stack(divergences).sum() / (num_examples * precision)

    with inputs_watched({name: site.layer for name, site in sites.items()}, see):
        yield regulariser
