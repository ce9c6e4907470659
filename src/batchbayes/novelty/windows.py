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
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.rng import generator
from batchbayes.novelty.scores import ClassGaussian, conformal_p_value, surprise
from batchbayes.state import coded, nested

WINDOWS = 999
"""Ordinary windows, so that p-values go down to 1 in 500."""
FEWEST = 10
"""Classes that fewer ordinary examples are predicted to have are looked at together."""


class Sample(NamedTuple):
    """What is known of single examples."""

    rows: Tensor
    """(n, D + 2): standardised statistics, then the logarithm of their distance, and the energy."""
    classes: Tensor
    """The predicted class, (n,)."""


def sample_of(gaussian: ClassGaussian, statistics: Tensor, classes: Tensor, energy: Tensor) -> Sample:
    """Return what is known of examples from statistics (n, D), predicted classes (n,) and energies (n,)."""
    z = gaussian.standardise(statistics)
    own = classes if len(gaussian.centres) > 1 else torch.zeros_like(classes)
    distance = gaussian.distances(z, own)[0].clamp_min(1e-6).log()
    return Sample(torch.cat([z, distance[:, None].float(), energy[:, None].float()], 1), classes)


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

    gaussian: ClassGaussian = field(metadata=coded(nested(ClassGaussian, "gaussian.")))
    rows: Tensor
    """Those of the examples, less the mean of their group, (N, D + 2)."""
    groups: Tensor
    """The group of each example, (N,)."""
    group_of: Tensor
    """The group of each class, (K,)."""
    centres: Tensor
    """Mean row of each group, (G, D + 2)."""
    seed: int

    @cached_property
    def _members(self) -> list[Tensor]:
        return [torch.where(self.groups == group)[0] for group in range(len(self.centres))]

    def evidence(self, sample: Sample, widths: Sequence[int], windows: int = WINDOWS) -> Evidence:
        """Return the evidence of a window. `widths` are the numbers of statistics of the sites."""
        groups, half = self.group_of[sample.classes], windows // 2
        mean = (sample.rows - self.centres[groups]).mean(0, keepdim=True)
        ordinary = self._ordinary_means(groups, windows)
        own, usual = self._parts(mean, len(groups)), self._parts(ordinary, len(groups))
        score, ranked = (surprise(usual[:half], part).sum(1) for part in (own, usual[half:]))
        at_site, usual_at = (
            torch.stack([part.square().mean(1) for part in means[:, :-2].split(list(widths), dim=1)], 1)
            for means in (mean, ordinary)
        )
        p_value, class_p_value = float(conformal_p_value(ranked, score)), self.class_p_value(sample.classes, windows)
        return Evidence(p_value, class_p_value, surprise(usual_at, at_site)[0])

    def _ordinary_means(self, groups: Tensor, windows: int) -> Tensor:
        """Return mean rows of ordinary windows with these groups, (windows, D + 2)."""
        random, drawn, weights = generator(self.seed, "windows", len(groups)), [], []
        for group, number in zip(*groups.unique(return_counts=True), strict=True):
            members, count = self._members[int(group)], int(number)
            drawn.append(members[torch.randint(len(members), (windows, count), generator=random)])
            each = (1 + count / len(members)) ** 0.5 / len(groups)
            weights.append(torch.full((windows, count), each, dtype=torch.float32))
        chosen, each = torch.cat(drawn, 1), torch.cat(weights, 1)
        return F.embedding_bag(chosen, self.rows, per_sample_weights=each, mode="sum")

    def _parts(self, means: Tensor, count: int) -> Tensor:
        """Return the three things that are looked at, (windows, 3)."""
        along = (means[:, :-2] @ self.gaussian.directions).double().square().sum(1)
        distance = means[:, :-2].double().square().sum(1) / self.gaussian.rest - along
        return torch.cat([count * distance[:, None], means[:, -2:].double()], 1)

    def class_p_value(self, classes: Tensor, windows: int = WINDOWS) -> float:
        """Return the p-value of the mix of predicted classes (n,), by Pearson's statistic of ordinary windows."""
        groups, total = self.group_of[classes], len(self.groups)
        expected = len(groups) * self.groups.bincount(minlength=len(self.centres)).double() / total
        random = generator(self.seed, "class mix", len(groups))
        drawn = self.groups[torch.randint(total, (windows, len(groups)), generator=random)]
        counts = torch.zeros(windows, len(expected), dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        own = groups.bincount(minlength=len(expected)).double()[None]
        usual, seen = (((each - expected).square() / expected).sum(1) for each in (counts, own))
        return float(conformal_p_value(usual * (1 + len(groups) / total), seen))

    def sample(self) -> Sample:
        """Return the examples as they were before means were taken off. Their groups stand for their classes."""
        return Sample(self.rows + self.centres[self.groups], self.groups)


def keep_ordinary(gaussian: ClassGaussian, sample: Sample, num_classes: int, seed: int) -> Ordinary:
    """Keep ordinary examples. Classes with few of them share the last group."""
    is_rare = sample.classes.bincount(minlength=num_classes) < FEWEST
    group_of = (~is_rare).cumsum(0) - 1
    group_of[is_rare] = int((~is_rare).sum())
    groups = group_of[sample.classes]
    number = int(groups.max()) + 1
    centres = torch.stack([sample.rows[groups == group].mean(0) for group in range(number)])
    group_of = group_of.clamp_max(number - 1)  # perhaps no ordinary example is predicted to be of a rare class
    return Ordinary(gaussian, sample.rows - centres[groups], groups, group_of, centres, seed)
