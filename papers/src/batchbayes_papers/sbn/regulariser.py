r"""Training by the exact variational objective: a KL divergence in place of weight decay.

q: the Gaussian of the central limit theorem for the mean and the standard deviation of each batch (paper). p is the
prior that weight decay implies (`batchbayes.methods.batchnorm.prior`).
Cost: about a third of a training step of a ResNet-20 on one CPU core.
Reference: Teye, Azizpour, Smith, ICML 2018: section 3 and its appendix.
Where we differ: in convolutions examples, not pixels, are independent. The paper does not say what the regulariser
does: the loss of a batch-normalised network does not depend on the scale of a unit's weights. So the scale follows the
regulariser alone, and settles at $E[\sigma_B^2] = 2/(N\tau\lambda)$. The rest of the regulariser favours heavy-tailed
units, whose statistics are noisier.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from batchbayes import BatchbayesError
from batchbayes.methods.batchnorm.prior import flat_kl, gaussian_kl, implied_prior_var
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.network.function import inputs_watched
from batchbayes.tools import as_network


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
