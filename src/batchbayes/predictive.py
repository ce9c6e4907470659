"""Predictives summarise what S drawn functions say about N examples. Running sums build them from blocks of draws.

The sums are in float64, and their size does not grow with S. Axes: S (draws), N (examples), any others, classes last.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, distributions

from batchbayes._common.checks import as_tensor, check_labels, check_no_nan, finite_number, without_ignored
from batchbayes._common.frames import to_array, to_frame
from batchbayes.engines.linear_draws import Block, Kept, LinearDraws, LinearPieces, distinct_draws, formed, join_draws
from batchbayes.errors import BatchbayesError

P_co = TypeVar("P_co", covariant=True)


class RunningSummary(Protocol[P_co]):
    """A running summary takes blocks of draws for one chunk of examples and builds their predictive."""

    needs_draws: bool

    def add(self, block: Block) -> None: ...

    def finish(self, draws: Kept | None) -> P_co: ...


class _Summary(ABC):
    """What all predictives can do: join, keep draws, and become arrays or a table."""

    likelihood: Any
    _draws: Kept | None

    @property
    def draws(self) -> Tensor:
        """Network outputs of every draw, (S, N, ...), if they were kept."""
        if self._draws is None:
            raise BatchbayesError(
                expected="a predictive that kept its draws",
                got="one that kept running sums only",
                fix="call predict(..., keep_draws=True), with fewer examples at a time if there is not enough memory",
            )
        return formed(self._draws)

    @abstractmethod
    def columns(self) -> dict[str, Tensor]:
        """Return the summaries by name. The first axis of each is N."""

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return the summaries as numpy arrays, by name."""
        return {name: to_array(values) for name, values in self.columns().items()}

    def to_pandas(self) -> Any:
        """Return the summaries as a pandas DataFrame with one row for each example."""
        return to_frame(self.columns())

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """Join predictives of consecutive examples."""
        first: Any = pieces[0]
        names = [field.name for field in fields(first) if field.name != "_draws"]
        tensors = [name for name in names if isinstance(getattr(first, name), Tensor)]
        joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in tensors}
        return replace(first, **joined, _draws=join_draws([piece._draws for piece in pieces]))


@dataclass(frozen=True, eq=False)
class CategoricalPredictive(_Summary):
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
    likelihood: Any = None
    """The likelihood that made it."""

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

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log of the mean probability of integer labels, (N, ...).

        If the likelihood has an `ignore_index`, labels of that value are left out, and the others come in one row.
        """
        ignored = getattr(self.likelihood, "ignore_index", None)
        log_probs, targets = without_ignored(self.log_probs, as_tensor(targets, "targets"), ignored)
        labels = fitting_labels(targets, log_probs.shape[:-1], log_probs.shape[-1])
        return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the range that holds this share of the drawn probabilities, (N, ..., K) each.

        It needs the draws: predict with `keep_draws=True`.
        """
        probs = self.likelihood.logits(self.draws.double()).softmax(-1)  # (S, N, ..., K)
        return _middle_range(probs, level, self.log_probs.dtype)

    def columns(self) -> dict[str, Tensor]:
        confidence, best = self.probs.max(-1)
        return {
            "predicted_class": best,
            "confidence": confidence,
            "entropy": self.entropy,
            "mutual_information": self.mutual_information,
            "probs": self.probs,
        }


@dataclass(frozen=True, eq=False)
class BernoulliPredictive(_Summary):
    """Probabilities of yes, averaged over draws, one for each output: one logit, several labels, or pixels."""

    class_log_probs: Tensor
    """Log of the mean probability of no and of yes, (N, ..., 2)."""
    entropy: Tensor
    """Entropy of the mean probability, (N, ...), in nats."""
    mutual_information: Tensor
    """Mutual information of the label and the drawn function, (N, ...), in nats; zero where all draws agree."""
    epistemic_variance: Tensor
    """Variance over draws of the probability, (N, ...)."""
    num_samples: int
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked."""
    likelihood: Any = None
    """The likelihood that made it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(probabilities of shape {tuple(self.entropy.shape)}, {self.num_samples} draws)"

    @property
    def probs(self) -> Tensor:
        """Mean probability of yes over draws, (N, ...)."""
        return self.class_log_probs[..., 1].exp()

    @property
    def expected_entropy(self) -> Tensor:
        """Mean over draws of the entropy, (N, ...), in nats."""
        return self.entropy - self.mutual_information

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log of the mean probability of targets 0 and 1, in the shape of the targets."""
        targets = as_tensor(targets, "targets")
        labels = fitting_yes_or_no(targets, self.entropy.shape).long()
        return self.class_log_probs.gather(-1, labels.unsqueeze(-1)).reshape(targets.shape)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the range that holds this share of the drawn probabilities, (N, ...) each.

        It needs the draws: predict with `keep_draws=True`.
        """
        probs = self.likelihood.logits(self.draws.double()).softmax(-1)[..., 1]  # (S, N, ...)
        return _middle_range(probs, level, self.entropy.dtype)

    def columns(self) -> dict[str, Tensor]:
        return {"probs": self.probs, "entropy": self.entropy, "mutual_information": self.mutual_information}


@dataclass(frozen=True, eq=False)
class GaussianPredictive(_Summary):
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

    def components(self) -> distributions.Normal:
        """Return the S components of the mixture, as a distribution over (S, N, ...) in float64."""
        return self.likelihood(self.draws.double())

    def log_prob(self, targets: Tensor) -> Tensor:
        r"""Return the log-density of the mixture, $\log \frac1S \sum_s N(y; f_s, \sigma_s^2)$, shaped like targets."""
        shaped = shaped_like(targets, self.mean.shape).to(torch.float64)
        total = self._log_density(
            self._draws if isinstance(self._draws, LinearDraws | LinearPieces) else self.draws, shaped
        )
        total = total - math.log(self.num_samples)
        return total.reshape(targets.shape).to(self.mean.dtype)

    def _log_density(self, draws: Kept, targets: Tensor) -> Tensor:
        """Return the log of the sum of the components' densities, (N, ...). Linear draws are formed block by block."""
        if isinstance(draws, LinearPieces):
            parts = targets.split([len(piece.middle) for piece in draws.pieces])
            return torch.cat([self._log_density(piece, part) for piece, part in zip(draws.pieces, parts, strict=True)])
        if isinstance(draws, Tensor):
            return self.likelihood(draws.double()).log_prob(targets).logsumexp(0)
        total = torch.full_like(targets, -math.inf)
        for outputs, counts in draws.blocks():
            each = self.likelihood(outputs.double()).log_prob(targets)  # (u, N, ...)
            weights = counts.log().view(-1, *[1] * targets.ndim)
            total = torch.logaddexp(total, (each + weights).logsumexp(0))
        return total

    def cdf(self, values: Tensor) -> Tensor:
        """Return P(y <= values) under the mixture, in the shape of the values."""
        shaped = shaped_like(values, self.mean.shape).to(torch.float64)
        return self.components().cdf(shaped).mean(0).reshape(values.shape).to(self.mean.dtype)

    def quantile(self, probability: float) -> Tensor:
        """Return the exact quantile of the mixture, (N, ...), by bisection between the quantiles of the components."""
        probability = finite_number("a probability", probability, above=0, below=1, fix="try 0.975")
        mixture = self.components()
        location, scale = mixture.loc, mixture.scale.expand_as(mixture.loc)
        # Torch's own icdf and cdf of a Normal lose all digits of a probability below 1e-16.
        each = location + scale * torch.special.ndtri(torch.tensor(probability, dtype=torch.float64))  # (S, N, ...)
        low, high = each.amin(0), each.amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - location) / scale).mean(0) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).to(self.mean.dtype)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds a target with probability `level`, (N, ...) each."""
        tail = (1 - _checked_level(level)) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def columns(self) -> dict[str, Tensor]:
        return {
            "mean": self.mean,
            "std": self.std,
            "epistemic_std": self.epistemic_variance.sqrt(),
            "noise_std": self.noise_variance.sqrt(),
        }


Predictive = CategoricalPredictive | BernoulliPredictive | GaussianPredictive


def _checked_level(level: float) -> float:
    return finite_number("a level", level, above=0, below=1, fix="pass 0.9 for an interval that holds 90 %")


def _middle_range(draws: Tensor, level: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the quantiles over draws (S, ...) that leave out equal shares at both ends."""
    tail, ordered = (1 - _checked_level(level)) / 2, draws.sort(0).values
    places = [share * (len(ordered) - 1) for share in (tail, 1 - tail)]
    below = [min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0 for place in places]
    ends = [
        torch.lerp(ordered[b], ordered[min(b + 1, len(ordered) - 1)], p - b) for b, p in zip(below, places, strict=True)
    ]
    return ends[0].to(dtype), ends[1].to(dtype)


def fitting_labels(targets: Tensor, shape: torch.Size, num_classes: int) -> Tensor:
    """Return labels as int64 on the CPU, or raise an error if they do not fit. Bool labels are classes 0 and 1."""
    targets = as_tensor(targets, "labels")
    labels = targets.long() if targets.dtype == torch.bool else targets
    check_labels(labels, shape, num_classes)
    return labels.long().cpu()


def shaped_like(values: Tensor, shape: torch.Size) -> Tensor:
    """Return values in the given shape. Values (N,) fit (N, 1); any other shape is an error, as it would broadcast."""
    values = as_tensor(values, "targets")
    check_no_nan("targets", values)
    if values.shape == shape:
        return values.cpu()
    if values.shape == shape[:-1] and shape[-1] == 1:
        return values.cpu().unsqueeze(-1)
    raise BatchbayesError(
        expected=f"targets of shape {tuple(shape)}",
        got=f"shape {tuple(values.shape)}",
        fix="reshape the targets like the network's output",
    )


def fitting_yes_or_no(targets: Tensor, shape: torch.Size) -> Tensor:
    """Return targets 0 and 1 in the given shape, on the CPU. Targets (N, ...) also fit outputs (N, 1, ...)."""
    targets = as_tensor(targets, "targets")
    if len(shape) > 1 and shape[1] == 1 and targets.shape == (shape[0], *shape[2:]):
        targets = targets.unsqueeze(1)
    targets = shaped_like(targets, shape)
    if bad := int(((targets != 0) & (targets != 1)).sum()):
        raise BatchbayesError(
            expected="targets of 0 and 1", got=f"{bad} others", fix="use bb.categorical() for more than two classes"
        )
    return targets


class RunningCategorical:
    """Sums over draws of p, p^2 and the entropy. Mean probabilities down to exp(-745) stay above zero."""

    needs_draws = False

    def __init__(self, likelihood: Any) -> None:
        """The likelihood has `logits`, which puts classes last, and `check_outputs` for the first block."""
        self._likelihood, self._count, self._dtype = likelihood, 0, torch.float32
        self._probs = self._squares = self._entropy = torch.zeros((), dtype=torch.float64)

    def add(self, block: Block) -> None:
        if not self._count:
            self._likelihood.check_outputs(block.middle if isinstance(block, LinearDraws) else block[0])
        for outputs, counts in distinct_draws(block):
            log_probs = self._likelihood.logits(outputs).double().log_softmax(-1)  # (u, n, ..., K)
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
            likelihood=self._likelihood,
        )


class RunningBernoulli:
    """The sums of two classes, no and yes."""

    needs_draws = False

    def __init__(self, likelihood: Any) -> None:
        self._likelihood, self._two = likelihood, RunningCategorical(likelihood)

    def add(self, block: Block) -> None:
        self._two.add(block)

    def finish(self, draws: Kept | None) -> BernoulliPredictive:
        two = self._two.finish(draws)
        parts = (two.log_probs, two.entropy, two.mutual_information, two.epistemic_variance[..., 1], two.num_samples)
        return BernoulliPredictive(*parts, draws, likelihood=self._likelihood)


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
            self._merge(len(block), mean, variance, self._likelihood(mean[None]).variance[0])
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
