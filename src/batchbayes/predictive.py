"""Predictives summarise what S drawn functions say about N examples. Running sums build them from blocks of draws.

The sums are in float64, and their size does not grow with S. Axes: S (draws), N (examples), any others, classes last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, distributions

from batchbayes._common.checks import check_labels
from batchbayes.engines.linear_draws import Block, Kept, LinearDraws, distinct_draws, formed, join_draws
from batchbayes.errors import BatchbayesError

P_co = TypeVar("P_co", covariant=True)


class RunningSummary(Protocol[P_co]):
    """A running summary takes blocks of draws for one chunk of examples and builds their predictive."""

    needs_draws: bool

    def add(self, block: Block) -> None: ...

    def finish(self, draws: Kept | None) -> P_co: ...


@dataclass(frozen=True, eq=False)
class CategoricalPredictive:
    """Class probabilities averaged over draws, and the two parts of their uncertainty.

    The total `entropy` is the sum of `expected_entropy` (aleatoric: each drawn function is unsure) and
    `mutual_information` (epistemic: the drawn functions disagree).
    """

    log_probs: Tensor
    """Log of the mean probability, (N, ..., K)."""
    entropy: Tensor
    """Entropy of the mean probability, (N, ...), in nats."""
    mutual_information: Tensor
    """Mutual information of the label and the drawn function, (N, ...), in nats; zero where all draws agree."""
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
        """Return the log of the mean probability of integer labels, (N, ...)."""
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
    """Mean over draws of the predicted mean, (N, ...)."""
    epistemic_variance: Tensor
    """Variance over draws of the predicted mean, with divisor S, (N, ...)."""
    noise_variance: Tensor
    """Mean over draws of the variance of the observation noise, (N, ...): 1/tau, or what the network predicts."""
    num_samples: int
    likelihood: Callable[[Tensor], distributions.Normal]
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mean of shape {tuple(self.mean.shape)}, {self.num_samples} draws)"

    @property
    def variance(self) -> Tensor:
        """Total variance: epistemic variance plus observation noise, (N, ...)."""
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
        """Return the S components of the mixture, as a distribution over (S, N, ...) in float64."""
        return self.likelihood(self.draws.double())

    def log_prob(self, targets: Tensor) -> Tensor:
        r"""Return the log-density of the mixture, $\log \frac1S \sum_s N(y; f_s, \sigma_s^2)$, shaped like targets."""
        shaped = shaped_like(targets, self.mean.shape).to(torch.float64)
        total = self.components().log_prob(shaped).logsumexp(0) - math.log(self.num_samples)
        return total.reshape(targets.shape).to(self.mean.dtype)

    def cdf(self, values: Tensor) -> Tensor:
        """Return P(y <= values) under the mixture, in the shape of the values."""
        shaped = shaped_like(values, self.mean.shape).to(torch.float64)
        return self.components().cdf(shaped).mean(0).reshape(values.shape).to(self.mean.dtype)

    def quantile(self, probability: float) -> Tensor:
        """Return the exact quantile of the mixture, (N, ...), by bisection between the quantiles of the components."""
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
    """Return labels as int64 on the CPU, or raise an error if they do not fit. Bool labels are classes 0 and 1."""
    labels = targets.long() if targets.dtype == torch.bool else targets
    check_labels(labels, shape, num_classes)
    return labels.long().cpu()


def shaped_like(values: Tensor, shape: torch.Size) -> Tensor:
    """Return values in the given shape. Values (N,) fit (N, 1); any other shape is an error, as it would broadcast."""
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
            fix="call predict(..., keep_draws=True), with fewer examples at a time if there is not enough memory",
        )
    return formed(draws)


class RunningCategorical:
    """Sums over draws of p, p^2 and the entropy. Mean probabilities down to exp(-745) stay above zero."""

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
            torch.where(information > 1e-12, information, 0.0).to(self._dtype),  # smaller values are rounding errors
            variance.to(self._dtype),
            self._count,
            draws,
        )


class RunningGaussian:
    """Mean and sum of squared deviations over draws, merged block by block (Chan's update), and sum of the noise."""

    needs_draws = True  # the density and the quantiles of the mixture need them

    def __init__(self, likelihood: Callable[[Tensor], distributions.Normal], *, same_noise: bool) -> None:
        """`same_noise` means p(y | f) = N(f, noise) with one noise. Then linear draws have moments in closed form."""
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
        """Add the moments of `count` more draws."""
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
