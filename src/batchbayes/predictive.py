"""Predictives: what S drawn functions say together about N examples, and the running sums that build them.

The sums are kept in float64 and do not grow with S. Axes: S (draws), N (examples), the rest, classes last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, distributions

from batchbayes.engines.linear_draws import Block, Kept, LinearDraws, distinct_draws, formed, join_draws
from batchbayes.errors import BatchbayesError

P_co = TypeVar("P_co", covariant=True)


class RunningSummary(Protocol[P_co]):
    """Takes blocks of draws for one chunk of examples, and gives their predictive."""

    needs_draws: bool

    def add(self, block: Block) -> None: ...

    def finish(self, draws: Kept | None) -> P_co: ...


@dataclass(frozen=True, eq=False)
class CategoricalPredictive:
    """Class probabilities averaged over draws, and how the uncertainty splits.

    Total `entropy` = `expected_entropy` (aleatoric: the drawn functions agree that it is ambiguous)
    + `mutual_information` (epistemic: they disagree).
    """

    log_probs: Tensor
    """log of the mean probability, (N, ..., K)."""
    entropy: Tensor
    """Entropy of the mean probability, (N, ...), in nats."""
    mutual_information: Tensor
    """Between the label and the drawn function, (N, ...), in nats; zero where all draws agree."""
    epistemic_variance: Tensor
    """Variance over draws of each probability, (N, ..., K)."""
    num_samples: int
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked."""

    def __repr__(self) -> str:
        examples, classes = tuple(self.entropy.shape), self.log_probs.shape[-1]
        return f"{type(self).__name__}(examples {examples}, {classes} classes, {self.num_samples} draws)"

    @property
    def probs(self) -> Tensor:
        """Mean probability over draws, (N, ..., K)."""
        return self.log_probs.exp()

    @property
    def expected_entropy(self) -> Tensor:
        """Mean over draws of the entropy, (N, ...), in nats."""
        return self.entropy - self.mutual_information

    @property
    def draws(self) -> Tensor:
        """Network outputs of every draw, (S, N, ...), if they were kept."""
        return _kept(self._draws)

    def log_prob(self, targets: Tensor) -> Tensor:
        """log p(y | x) of integer labels (N, ...), averaged over draws inside the log; one number a label."""
        labels = fitting_labels(targets, self.log_probs.shape[:-1], self.log_probs.shape[-1])
        return self.log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """Join predictives of consecutive examples."""
        return cls(
            torch.cat([p.log_probs for p in pieces]),
            torch.cat([p.entropy for p in pieces]),
            torch.cat([p.mutual_information for p in pieces]),
            torch.cat([p.epistemic_variance for p in pieces]),
            pieces[0].num_samples,
            join_draws([p._draws for p in pieces]),
        )


@dataclass(frozen=True, eq=False)
class GaussianPredictive:
    """A mixture over draws of Gaussians: one component N(f_s, noise) for each drawn function."""

    mean: Tensor
    """Mean over draws, in the shape of the network's (mean) output, (N, ...)."""
    epistemic_variance: Tensor
    """Variance over draws of the drawn means (divided by S), (N, ...)."""
    noise_variance: Tensor
    """Mean over draws of the observation noise: 1/tau, or what the network predicts, (N, ...)."""
    num_samples: int
    likelihood: Callable[[Tensor], distributions.Normal]
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mean of shape {tuple(self.mean.shape)}, {self.num_samples} draws)"

    @property
    def variance(self) -> Tensor:
        """Total variance: epistemic + observation noise, (N, ...)."""
        return self.epistemic_variance + self.noise_variance

    @property
    def std(self) -> Tensor:
        """Square root of the total variance, (N, ...)."""
        return self.variance.sqrt()

    @property
    def draws(self) -> Tensor:
        """Network outputs of every draw, (S, N, ...), if they were kept."""
        return _kept(self._draws)

    def components(self) -> distributions.Normal:
        """The S components of the mixture, as a float64 distribution over (S, N, ...)."""
        return self.likelihood(self.draws.double())

    def log_prob(self, targets: Tensor) -> Tensor:
        r"""Density of the mixture, $\log \frac1S \sum_s N(y; f_s, \sigma_s^2)$, in the shape of the targets."""
        shaped = shaped_like(targets, self.mean.shape).to(torch.float64)
        total = self.components().log_prob(shaped).logsumexp(0) - math.log(self.num_samples)
        return total.reshape(targets.shape).to(self.mean.dtype)

    def cdf(self, values: Tensor) -> Tensor:
        """P(y <= values) under the mixture, in the shape of the values."""
        shaped = shaped_like(values, self.mean.shape).to(torch.float64)
        return self.components().cdf(shaped).mean(0).reshape(values.shape).to(self.mean.dtype)

    def quantile(self, probability: float) -> Tensor:
        """The exact quantile of the mixture, (N, ...), by bisection between the components' quantiles."""
        if not 0 < probability < 1:
            raise BatchbayesError(
                expected="a probability between 0 and 1, both excluded", got=str(probability), fix="try 0.975"
            )
        mixture = self.components()
        each = mixture.icdf(torch.tensor(probability, dtype=torch.float64))  # (S, N, ...)
        low, high = each.amin(0), each.amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = mixture.cdf(middle).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).to(self.mean.dtype)

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """Join predictives of consecutive examples."""
        return cls(
            torch.cat([p.mean for p in pieces]),
            torch.cat([p.epistemic_variance for p in pieces]),
            torch.cat([p.noise_variance for p in pieces]),
            pieces[0].num_samples,
            pieces[0].likelihood,
            join_draws([p._draws for p in pieces]),
        )


Predictive = CategoricalPredictive | GaussianPredictive


def fitting_labels(targets: Tensor, shape: torch.Size, num_classes: int) -> Tensor:
    """Class numbers of the right shape, or an error."""
    if targets.shape != shape or targets.is_floating_point():
        raise BatchbayesError(
            expected=f"integer labels of shape {tuple(shape)}",
            got=f"{targets.dtype} of shape {tuple(targets.shape)}",
            fix="pass class numbers, not one-hot rows or probabilities",
        )
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
        raise BatchbayesError(
            expected=f"labels from 0 to {num_classes - 1}",
            got=f"labels from {int(targets.min())} to {int(targets.max())}",
            fix="renumber the labels, or leave out what should be ignored",
        )
    return targets.long().cpu()


def shaped_like(values: Tensor, shape: torch.Size) -> Tensor:
    """Targets (N,) for outputs (N, 1) are meant column-wise; any other mismatch would broadcast silently."""
    if values.shape == shape:
        return values.cpu()
    if values.shape == shape[:-1] and shape[-1] == 1:
        return values.cpu().unsqueeze(-1)
    raise BatchbayesError(
        expected=f"targets of shape {tuple(shape)}",
        got=f"shape {tuple(values.shape)}",
        fix="reshape the targets like the network's output",
    )


def _kept(draws: Kept | None) -> Tensor:
    if draws is None:
        raise BatchbayesError(
            expected="a predictive that kept its draws",
            got="one that kept running sums only",
            fix="call predict(..., keep_draws=True), with fewer examples at a time if memory is short",
        )
    return formed(draws)


class RunningCategorical:
    """Sums of p, p^2 and entropy over draws; the mean probability is right down to exp(-745)."""

    needs_draws = False

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits, self._count, self._dtype = logits, 0, torch.float32
        self._probs = self._squares = self._entropy = torch.zeros((), dtype=torch.float64)

    def add(self, block: Block) -> None:
        for outputs, counts in distinct_draws(block):
            log_probs = self._logits(outputs).double().log_softmax(-1)  # (u, n, ..., K)
            probs = log_probs.exp()
            self._dtype, self._count = outputs.dtype, self._count + int(counts.sum())
            self._probs = self._probs + torch.tensordot(counts, probs, 1)
            self._entropy = self._entropy - torch.tensordot(counts, log_probs.mul_(probs).sum(-1), 1)
            self._squares = self._squares + torch.tensordot(counts, probs.square_(), 1)

    def finish(self, draws: Kept | None) -> CategoricalPredictive:
        mean = self._probs / self._count
        variance = (self._squares / self._count - mean.square()).clamp_min(0)
        entropy = -torch.special.xlogy(mean, mean).sum(-1)
        information = entropy - self._entropy / self._count
        return CategoricalPredictive(
            mean.log().to(self._dtype),
            entropy.to(self._dtype),
            torch.where(information > 1e-12, information, 0.0).to(self._dtype),  # below is rounding, not disagreement
            variance.to(self._dtype),
            self._count,
            draws,
        )


class RunningGaussian:
    """Mean and sum of squared deviations over draws, merged block by block (Chan's update), and mean noise."""

    needs_draws = True  # for the density and the quantiles of the mixture

    def __init__(self, likelihood: Callable[[Tensor], distributions.Normal], *, same_noise: bool) -> None:
        """With the same noise everywhere, p(y | f) = N(f, noise), so that linear draws have moments in closed form."""
        self._likelihood, self._same_noise, self._count, self._dtype = likelihood, same_noise, 0, torch.float32
        self._mean = self._deviation = self._noise = torch.zeros((), dtype=torch.float64)

    def add(self, block: Block) -> None:
        self._dtype = block.middle.dtype if isinstance(block, LinearDraws) else block.dtype
        if isinstance(block, LinearDraws) and self._same_noise:
            mean, variance = (moment.double() for moment in block.moments())
            self._merge(len(block), mean, variance, self._likelihood(mean).variance)
            return
        for outputs, counts in distinct_draws(block):
            components, shares = self._likelihood(outputs.double()), counts / counts.sum()
            each = components.mean  # (u, n, ...)
            mean = torch.tensordot(shares, each, 1)
            noise = torch.tensordot(shares, components.variance.expand_as(each), 1)
            self._merge(int(counts.sum()), mean, torch.tensordot(shares, (each - mean).square_(), 1), noise)

    def _merge(self, count: int, mean: Tensor, variance: Tensor, noise: Tensor) -> None:
        """Join the moments of `count` more draws."""
        total = self._count + count
        shift, share = mean - self._mean, count / total
        self._deviation = self._deviation + variance * count + shift.square() * (self._count * share)
        self._mean = self._mean + shift * share
        self._noise = self._noise + noise * count
        self._count = total

    def finish(self, draws: Kept | None) -> GaussianPredictive:
        return GaussianPredictive(
            self._mean.to(self._dtype),
            (self._deviation / self._count).to(self._dtype),
            (self._noise / self._count).to(self._dtype),
            self._count,
            self._likelihood,
            draws,
        )
