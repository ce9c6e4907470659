r"""Is a window of n inputs an ordinary one? Windows of ordinary inputs answer, and they cost no pass.

The statistics of each ordinary example are kept, so that windows of any size are sums of rows. A window is compared
with 999 windows of the same size **and of the same predicted classes**: another mix of classes is no evidence that
inputs have changed. It has a test of its own.

Three things are looked at, all relative to the predicted class: the Mahalanobis distance of the mean statistics, the
mean of the distances of single examples, and the mean energy of the logits. Each becomes a surprise, -log p among half
of the ordinary windows, and the sum is ranked in the other half: the p-value is conformal.

Windows drawn from N ordinary examples scatter around the mean of these, but a new window around the true mean. With
the variance s^2 of one example, that is s^2 / n against s^2 (1 / n + 1 / N), and the drawn windows are widened by the
ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes.novelty.scores import ClassGaussian, conformal_p_value, surprise

WINDOWS = 999
"""Ordinary windows, so that p-values go down to 1 in 500."""
FEWEST = 10
"""Classes that fewer ordinary examples are predicted to have are looked at together."""


class Sample(NamedTuple):
    """What is known of single examples."""

    statistics: Tensor
    """Standardised, (n, D)."""
    scores: Tensor
    """The distance and the energy, (n, 2), in logarithms or nats."""
    classes: Tensor
    """The predicted class, (n,)."""


class Evidence(NamedTuple):
    """How a window differs from ordinary ones."""

    p_value: float
    """Of changed inputs, whatever the mix of classes."""
    class_p_value: float
    """Of another mix of classes."""
    sites: Tensor
    """How unusual each site is: -log p of the mean statistics there, (sites,)."""


@dataclass(frozen=True, eq=False)
class Ordinary:
    """Ordinary examples, and what windows of them look like."""

    gaussian: ClassGaussian
    statistics: Tensor
    """(N, D), less their mean of the group."""
    scores: Tensor
    """(N, 2), less their mean of the group."""
    groups: Tensor
    """The group of each example, (N,)."""
    group_of: Tensor
    """The group of each class, (K,)."""
    centres: Tensor
    """Mean statistics and scores of each group, (G, D + 2)."""
    seed: int

    @cached_property
    def _members(self) -> list[Tensor]:
        return [torch.where(self.groups == group)[0] for group in range(len(self.centres))]

    def evidence(self, sample: Sample, widths: Sequence[int], windows: int = WINDOWS) -> Evidence:
        """Return the evidence of a window. `widths` are the numbers of statistics of the sites."""
        groups, count = self.group_of[sample.classes], len(sample.classes)
        left = torch.cat([sample.statistics, sample.scores], 1) - self.centres[groups]
        mean, ordinary = left.mean(0, keepdim=True), self._ordinary_means(groups, windows)
        own, usual = self._parts(mean, count), self._parts(ordinary, count)
        half = windows // 2
        score, ranked = (surprise(usual[:half], part).sum(1) for part in (own, usual[half:]))
        size = self.statistics.shape[1]
        at_site, usual_at = (_by_site(part[:, :size], widths) for part in (mean, ordinary))
        return Evidence(
            float(conformal_p_value(ranked, score)),
            self.class_p_value(sample.classes, windows),
            surprise(usual_at, at_site)[0],
        )

    def _ordinary_means(self, groups: Tensor, windows: int) -> Tensor:
        """Return mean statistics and scores of ordinary windows with these groups, (windows, D + 2)."""
        random = generator(self.seed, "windows", len(groups))
        weights = torch.zeros(windows, len(self.groups))
        for group, number in zip(*groups.unique(return_counts=True), strict=True):
            members = self._members[int(group)]
            chosen = torch.randint(len(members), (windows, int(number)), generator=random)
            wider = (1 + int(number) / len(members)) ** 0.5
            each = torch.full(chosen.shape, wider / len(groups))
            weights.scatter_add_(1, members[chosen], each)
        return weights @ torch.cat([self.statistics, self.scores], 1)

    def _parts(self, means: Tensor, count: int) -> Tensor:
        """Return the three things that are looked at, (windows, 3)."""
        size, gaussian = self.statistics.shape[1], self.gaussian
        of_mean = means[:, :size]
        along = (of_mean @ gaussian.directions).double().square().sum(1)
        distance = of_mean.double().square().sum(1) / gaussian.rest - along
        return torch.cat([count * distance[:, None], means[:, size:].double()], 1)

    def class_p_value(self, classes: Tensor, windows: int = WINDOWS) -> float:
        """Return the p-value of the mix of predicted classes (n,), by Pearson's statistic of ordinary windows."""
        groups = self.group_of[classes]
        shares = self.groups.bincount(minlength=len(self.centres)).double() / len(self.groups)
        expected = len(groups) * shares.clamp_min(1 / len(self.groups))
        random = generator(self.seed, "class mix", len(groups))
        drawn = self.groups[torch.randint(len(self.groups), (windows, len(groups)), generator=random)]
        counts = torch.zeros(windows, len(shares), dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        own = groups.bincount(minlength=len(shares)).double()[None]
        usual, seen = (((each - expected).square() / expected).sum(1) for each in (counts, own))
        wider = 1 + len(groups) / len(self.groups)
        return float(conformal_p_value(usual * wider, seen))

    def sample(self) -> Sample:
        """Return the examples as they were before means were taken off. Their groups stand for their classes."""
        whole = torch.cat([self.statistics, self.scores], 1) + self.centres[self.groups]
        return Sample(whole[:, :-2], whole[:, -2:], self.groups)


def keep_ordinary(gaussian: ClassGaussian, sample: Sample, num_classes: int, seed: int) -> Ordinary:
    """Keep ordinary examples. Classes with few of them share the last group."""
    counts = sample.classes.bincount(minlength=num_classes)
    group_of, rest = torch.empty_like(counts), int((counts >= FEWEST).sum())
    group_of[counts >= FEWEST] = torch.arange(rest)
    group_of[counts < FEWEST] = rest
    groups = group_of[sample.classes]
    number = int(groups.max()) + 1
    if number <= rest:
        group_of = group_of.clamp_max(number - 1)  # no ordinary example is predicted to be of a rare class
    each = torch.cat([sample.statistics, sample.scores], 1)
    centres = torch.stack([each[groups == group].mean(0) for group in range(number)])
    left = each - centres[groups]
    size = sample.statistics.shape[1]
    return Ordinary(gaussian, left[:, :size], left[:, size:], groups, group_of, centres, seed)


def _by_site(means: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.stack([part.square().mean(1) for part in means.split(list(widths), dim=1)], 1)
