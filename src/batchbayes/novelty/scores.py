r"""A Gaussian with one centre for each class and one shrunk covariance, for more statistics than examples.

The covariance within classes is $(1 - a) C + a I$. Its leading directions are kept, and the others share one variance
$\rho$, so that memory grows with statistics times directions and not with the square of the statistics.

Ranks among ordinary examples: how surprising a score is, and p-values that are valid at any number of examples.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from batchbayes.state import coded, nested

SHRINKAGE = 0.1
"""a. The ranking of inputs hardly depends on it between 0.03 and 0.5."""
DIRECTIONS, NUMBERS = 1024, 2**24
"""Largest number of directions, and of numbers in all of them."""
PRIOR_COUNT = 10
"""The centre of a class with n examples is shrunk to the common mean by n / (n + 10)."""
SMALLEST_STD = 1e-3
"""Statistics that vary less than this among the training examples, such as those of dead channels, count as constant.
Statistics are logarithms, or in units of running statistics, so this is a small number for all of them."""

LARGEST = 1e4
"""Standardised statistics are clipped here, so that no input makes a distance overflow."""


@dataclass(frozen=True, eq=False)
class ClassGaussian:
    """The fitted Gaussian over D statistics, with K centres and R directions."""

    mean: Tensor
    """(D,)"""
    std: Tensor
    """(D,)"""
    directions: Tensor
    r"""(D, R): eigenvectors times $\sqrt{1/\rho - 1/\lambda}$, with the eigenvalues of the shrunk covariance."""
    centres: Tensor
    """(K, D), of standardised statistics."""
    rest: float
    r"""$\rho$"""

    def standardise(self, statistics: Tensor) -> Tensor:
        """Return statistics (N, D) in standard deviations. Numbers that are not finite become the largest one."""
        return ((statistics - self.mean) / self.std).nan_to_num(nan=LARGEST).clamp(-LARGEST, LARGEST)

    def distances(self, z: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return how far standardised statistics (N, D) are from their class, and how little any class explains them.

        The first is the squared Mahalanobis distance to the centre of the class (N,) that the network predicts. The
        second is $-\log \sum_k \exp(\ell_k)$, where $\ell_k$ is the log-likelihood ratio of class k to the
        common mean. Both are (N,) in float64.
        """
        q, (centre_q, centre_norms) = z @ self.directions, self._projected_centres
        norms = z.double().square().sum(1) / self.rest - q.double().square().sum(1)
        products = (z @ self.centres.T).double() / self.rest - (q @ centre_q.T).double()  # (N, K)
        squares = norms[:, None] - 2 * products + centre_norms
        own = squares.gather(1, classes[:, None])[:, 0]
        return own, -(products - 0.5 * centre_norms).logsumexp(1)

    @cached_property
    def _projected_centres(self) -> tuple[Tensor, Tensor]:
        """The centres along the directions, (K, R), and their squared distances from the common mean, (K,)."""
        q = self.centres @ self.directions
        return q, self.centres.double().square().sum(1) / self.rest - q.double().square().sum(1)


def fit_gaussian(
    statistics: Tensor,
    classes: Tensor,
    num_classes: int,
    shrinkage: float = SHRINKAGE,
    most_directions: int | None = None,
) -> ClassGaussian:
    """Fit to statistics (n, D) and the classes (n,) that the network predicts."""
    mean, std = statistics.mean(0), statistics.std(0)
    std = torch.where(std < SMALLEST_STD, 1.0, std)
    z = (statistics - mean) / std
    members = torch.nn.functional.one_hot(classes, num_classes).to(z)  # (n, K)
    centres = (members.T @ z) / (members.sum(0)[:, None] + PRIOR_COUNT)
    z = z - centres[classes]
    values, vectors = _leading(z, DIRECTIONS if most_directions is None else most_directions)
    size = z.shape[1]
    left = float(z.double().square().sum() / len(z) - values.sum()) / max(1, size - len(values))
    rest = (1 - shrinkage) * max(0.0, left) + shrinkage
    scale = (1 / rest - 1 / ((1 - shrinkage) * values + shrinkage)).clamp_min(0).sqrt()
    return ClassGaussian(mean, std, (vectors * scale.float()).contiguous(), centres, rest)  # as files hold them


def _leading(z: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the leading eigenvalues (R,) and eigenvectors (D, R) of z^T z / n, by the smaller of the two products."""
    count, size = z.shape
    rank = max(1, min(most, NUMBERS // size, size, count - 1))
    if size <= count:
        values, vectors = torch.linalg.eigh((z.T @ z).double() / count)
        return values[-rank:].clamp_min(0), vectors[:, -rank:].float()
    values, vectors = torch.linalg.eigh((z @ z.T).double() / count)
    values = values[-rank:].clamp_min(0)
    return values, z.T @ (vectors[:, -rank:] / (values * count).sqrt().clamp_min(1e-12)).float()


@dataclass(frozen=True, eq=False)
class LastFeatures:
    """What the last features (N, F) of a classifier say about its classes."""

    within: ClassGaussian = field(metadata=coded(nested(ClassGaussian, "within.", "within.")))
    """One centre for each class."""
    common: ClassGaussian = field(metadata=coded(nested(ClassGaussian, "common.", "common.")))
    """One centre for all of them, so that its covariance is that of all examples."""

    def parts(self, features: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return how little any class explains features, and how much further they are from their class than usual.

        The first is the evidence of `ClassGaussian.distances`. It compares with a Gaussian around the common mean that
        is as narrow as a class. The second is the relative Mahalanobis distance (Ren et al., arXiv:2106.09022): the
        distance from the class (N,) that the network predicts, less the distance from all examples. It compares with a
        Gaussian as wide as all classes together. Both are (N,) in float64, and higher is stranger.
        """
        own, evidence = self.within.distances(self.within.standardise(features), classes)
        common, _ = self.common.distances(self.common.standardise(features), torch.zeros_like(classes))
        return evidence, own - common


def fit_last_features(features: Tensor, classes: Tensor, num_classes: int) -> LastFeatures:
    """Fit to last features (n, F) and the classes (n,) that the network predicts."""
    within, common = (fit_gaussian(features, each, k) for each, k in ((classes, num_classes), (0 * classes, 1)))
    return LastFeatures(within, common)


def generalised_entropy(logits: Tensor) -> Tensor:
    r"""Return $\sum_k (p_k (1 - p_k))^{0.1}$ over the 100 most likely classes of logits (N, K), (N,).

    Reference: Liu et al., GEN: Pushing the limits of softmax-based out-of-distribution detection, CVPR 2023.
    """
    p = logits.softmax(1)
    return (p * (1 - p)).pow(0.1).topk(min(100, logits.shape[1]), dim=1).values.sum(1)


TAIL = 0.05
"""Above this share of the highest ordinary scores, surprise grows linearly, as for an exponential tail."""

TIE = 1e-9
"""Scores that differ by less are equal. They are sums of logarithms of ranks, so ties are common, and the last digit of
a sum depends on its parts. Parts of a score tie as well, as relative distances do in a network with one class."""


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
    ranks = -torch.log((1 + _at_least(ordered, values - TIE)).double() / (count + 1))
    beyond = -math.log((1 + tail) / (count + 1)) + (values - start) / excess
    return torch.where(values > start + TIE, beyond, ranks).T


def conformal_p_value(ordinary: Tensor, scores: Tensor) -> Tensor:
    r"""Return $(1 + \#\{s_i \geq s\}) / (n + 1)$ for scores s (N,) and ordinary scores $s_i$ (n,).

    If s and the $s_i$ are exchangeable, then $P(p \leq a) \leq a$ for every a and n.
    Reference: Vovk, Gammerman & Shafer, Algorithmic Learning in a Random World, 2005.

    >>> conformal_p_value(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0])).tolist()
    [1.0, 0.75, 0.25]
    """
    at_least = _at_least(ordinary.sort().values[None], scores.contiguous()[None] - TIE)[0]
    return (1 + at_least).double() / (len(ordinary) + 1)


def _at_least(ordered: Tensor, values: Tensor) -> Tensor:
    """Return how many of the ordered numbers (columns, n) are at least as high as each value (columns, N)."""
    if torch.compiler.is_exporting():  # runtimes of files have no binary search
        return (ordered[:, None] >= values[:, :, None]).double().sum(2)
    return ordered.shape[1] - torch.searchsorted(ordered, values)
