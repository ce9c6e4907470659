r"""Gradient estimators of the expected loss $E_q L(W)$, to compare them.

- Local reparametrisation: noise in the outputs of layers, independent for each example (`Noisy` with
  estimator="local").
- Reparametrisation: one draw of the weights for the whole batch, through which the gradient passes
  (estimator="weights").
- Score function: $L(W) \nabla \log q(W)$, which needs no gradient of the loss, here with the mean loss of the other
  draws as a baseline. It is the only one for discrete weights, and has by far the largest variance.

Reference: Mohamed et al., "Monte Carlo Gradient Estimation in Machine Learning", JMLR 2020.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.noisy import Noisy


def score_function_loss(network: Noisy, loss: Callable[[dict[str, Tensor]], Tensor], *, num_draws: int = 2) -> Tensor:
    """Return a number whose gradient is the score-function estimate of that of the expected loss.

    Args:
        network: the random weights.
        loss: from weights by name to the loss; it needs no gradient.
        num_draws: draws to average over. The baseline of each draw is the mean loss of the others, so two at least.
    """
    if num_draws < 2:
        raise BatchbayesError("two draws or more, for the baseline", str(num_draws), "raise num_draws")
    given = network.distributions()
    with torch.no_grad():
        fixed = network.distributions()
        drawn = [{name: each.sample() for name, each in fixed.items()} for _ in range(num_draws)]
        losses = torch.stack([loss(weights) for weights in drawn])
    baselines = (losses.sum() - losses) / (num_draws - 1)
    scores = torch.stack([_log_density(given, weights) for weights in drawn])
    return ((losses - baselines) * scores).mean()


def _log_density(given: Mapping[str, Any], weights: dict[str, Tensor]) -> Tensor:
    """Return log q(W) of all weights together, as a number with a gradient."""
    odd = [type(each).__name__ for each in given.values() if not hasattr(each, "log_density")]
    if odd:
        raise BatchbayesError("weights whose density is known", odd[0], "use another family or estimator")
    return torch.stack([given[name].log_density(weight) for name, weight in weights.items()]).sum()


def random_parameters(network: Noisy) -> dict[str, Tensor]:
    """Return the parameters of each random weight that are trained.

    The names are that of the weight for its means, and that of the weight and of the parameter for the family's own.
    """
    parameters = {site.name: site.weight for site in network.sites if site.weight.requires_grad}
    for site in network.sites:
        parameters |= {f"{site.name} {name}": value for name, value in network.parameters_of(site).items()}
    return parameters


def gradient_moments(
    parameters: Mapping[str, Tensor], estimate: Callable[[], Tensor], num_draws: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and variance over draws of the gradient with respect to some parameters, by their names.

    Args:
        parameters: mostly `random_parameters(network)`.
        estimate: returns a new estimate of the loss, with a gradient.
        num_draws: how often it is called.
    """
    total, squares = torch.zeros(2, sum(value.numel() for value in parameters.values()), dtype=torch.float64)
    for _ in range(num_draws):
        found = torch.autograd.grad(estimate(), list(parameters.values()))
        gradient = torch.cat([each.flatten() for each in found]).double()
        total += gradient
        squares += gradient.square()
    mean = total / num_draws
    variance = (squares - num_draws * mean.square()) / (num_draws - 1)
    sizes = [value.numel() for value in parameters.values()]
    return {
        name: (m.view(value.shape), v.view(value.shape))
        for (name, value), m, v in zip(parameters.items(), mean.split(sizes), variance.split(sizes), strict=True)
    }
