"""Running sums over draws: what predictives are built from, in `predict` and in exported files alike.

All of it can be traced. The sums keep the precision of what they are given.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]
"""From values of some draws (s, N, ...) to their sum over draws, (N, ...)."""


def class_sums(log_probs: Tensor, total: Total, *, squares: bool = False) -> list[Tensor]:
    """Return sums over draws of the probabilities (N, ..., K), of their entropies (N, ...), and of their squares.

    The logarithms of the probabilities (s, N, ..., K) are used up.
    """
    probs = log_probs.exp()
    found = [total(probs), -total(log_probs.mul_(probs).sum(-1))]
    return [*found, total(probs.square_())] if squares else found


def class_uncertainty(mean: Tensor, expected_entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Return entropy and mutual information (N, ...) of mean probabilities (N, ..., K), given the mean entropy."""
    entropy = 0.0 - torch.special.xlogy(mean, mean).sum(-1)  # a minus sign would make -0.0 of a certain class
    information = entropy - expected_entropy
    return entropy, torch.where(information > 1e-12, information, 0.0)  # smaller values are rounding errors


def merged_moments(
    old: Sequence[Tensor],
    before: int | Tensor,
    new: Sequence[Tensor],
    count: int,
    product: Callable[[Tensor], Tensor] = torch.square,
) -> list[Tensor]:
    """Return mean, variance and mean noise of `before + count` draws from those of both parts (Chan's update).

    `product` makes the shape of variances of that of means: squares, or the products of all pairs for covariances.
    """
    share = count / (before + count)
    (mean, variance, noise), (new_mean, new_variance, new_noise) = old, new
    shift = new_mean - mean
    spread = product(shift) * (share * (1 - share))
    variance = torch.lerp(variance, new_variance, share) + spread
    return [mean + shift * share, variance, torch.lerp(noise, new_noise, share)]
