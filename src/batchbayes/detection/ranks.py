"""Ranks among ordinary examples: how surprising a score is, and p-values that are valid at any number of examples."""

import math

import torch
from torch import Tensor

TAIL = 0.05
"""Above this share of the highest ordinary scores, surprise grows linearly, as for an exponential tail."""


def surprise(ordinary: Tensor, scores: Tensor) -> Tensor:
    r"""Return $-\log p$ of scores (N, ...) among ordinary ones (n, ...), column by column.

    p is the share of ordinary scores that are at least as high. Ranks end at the highest ordinary score, so an
    exponential distribution with the mean of the highest 5 % continues them. It tells strange from very strange.

    >>> surprise(torch.arange(99.0), torch.tensor([0.0, 50.0, 1000.0])).round(decimals=2).tolist()
    [-0.0, 0.69, 365.4]
    """
    if ordinary.ndim == 1:
        return surprise(ordinary[:, None], scores[:, None])[:, 0]
    ordered = ordinary.double().sort(0).values.T.contiguous()  # (columns, n)
    values = scores.double().T.contiguous()
    count = ordered.shape[1]
    tail = max(1, int(TAIL * count))
    start = ordered[:, -tail - 1 :][:, :1]
    excess = (ordered[:, -tail:] - start).mean(1, keepdim=True).clamp_min(1e-9)
    ranks = -torch.log((1 + count - torch.searchsorted(ordered, values)).double() / (count + 1))
    beyond = -math.log((1 + tail) / (count + 1)) + (values - start) / excess
    return torch.where(values > start, beyond, ranks).T


def conformal_p_value(ordinary: Tensor, scores: Tensor) -> Tensor:
    r"""Return $(1 + \#\{s_i \geq s\}) / (n + 1)$ for scores s (N,) and ordinary scores $s_i$ (n,).

    If s and the $s_i$ are exchangeable, then $P(p \leq a) \leq a$ for every a and n.
    Reference: Vovk, Gammerman & Shafer, Algorithmic Learning in a Random World, 2005.

    >>> conformal_p_value(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0])).tolist()
    [1.0, 0.75, 0.25]
    """
    at_least = len(ordinary) - torch.searchsorted(ordinary.sort().values, scores.contiguous())
    return (1 + at_least).double() / (len(ordinary) + 1)
