"""Predictives summarise what S drawn functions say about N examples.

Axes: S (draws), N (examples), any others, classes last.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, distributions

from batchbayes._common.checks import (
    Values,
    as_tensor,
    finite_number,
    fitting_labels,
    fitting_yes_or_no,
    shaped_like,
    without_ignored,
)
from batchbayes._common.text import count
from batchbayes.engines.linear_draws import Kept, LinearDraws, LinearPieces, formed, join_draws
from batchbayes.errors import BatchbayesError


@dataclass(init=False, frozen=True, eq=False, repr=False, kw_only=True)
class _Summary(ABC):
    """What all predictives share: their origin, how they are joined, and how they become arrays or a table."""

    num_samples: int
    likelihood: Any
    """The likelihood that made it."""
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked."""

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
        from batchbayes._common.frames import to_array

        return {name: to_array(values) for name, values in self.columns().items()}

    def to_pandas(self) -> Any:
        """Return the summaries as a pandas DataFrame with one row for each example."""
        from batchbayes._common.frames import to_frame

        return to_frame(self.columns())

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """Join predictives of consecutive examples."""
        first: Any = pieces[0]
        names = [field.name for field in fields(first) if field.name != "_draws"]
        tensors = [name for name in names if isinstance(getattr(first, name), Tensor)]
        shapes = {", ".join(["N", *map(str, getattr(piece, tensors[0]).shape[1:])]): None for piece in pieces}
        if len(shapes) > 1:
            raise BatchbayesError(
                expected="outputs of one shape for all examples, so that they fit into one tensor",
                got=f"shapes {' and '.join(f'({shape})' for shape in list(shapes)[:3])}",
                fix="use predict_stream, which gives each batch by itself",
            )
        joined = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in tensors}
        return replace(first, **joined, _draws=join_draws([piece._draws for piece in pieces]))


@dataclass(init=False, frozen=True, eq=False, repr=False)
class _ClassSummary(_Summary):
    """The uncertainty about classes, and its two parts."""

    entropy: Tensor
    """Entropy of the mean probability, (N, ...), in nats."""
    mutual_information: Tensor
    """Mutual information of the label and the drawn function, (N, ...), in nats; zero where all draws agree."""
    epistemic_variance: Tensor
    """Variance over draws of each probability, in the shape of `probs`."""

    @property
    def expected_entropy(self) -> Tensor:
        """Mean over draws of the entropy, (N, ...), in nats."""
        return self.entropy - self.mutual_information

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the range that holds this share of the drawn probabilities, each in the shape of `probs`.

        It needs the draws: predict with `keep_draws=True`.
        """
        drawn = self.likelihood.logits(self.draws.double()).softmax(-1)  # (S, N, ..., K)
        return _middle_range(drawn, level, self.entropy.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class CategoricalPredictive(_ClassSummary):
    """Class probabilities averaged over draws, and the two parts of their uncertainty.

    The total `entropy` is the sum of `expected_entropy` (aleatoric: each drawn function is unsure) and
    `mutual_information` (epistemic: the drawn functions disagree).
    """

    log_probs: Tensor
    """Log of the mean probability, (N, ..., K)."""

    def __repr__(self) -> str:
        examples, classes = tuple(self.entropy.shape), self.log_probs.shape[-1]
        return f"{type(self).__name__}(examples {examples}, {classes} classes, {count(self.num_samples, 'draw')})"

    @property
    def probs(self) -> Tensor:
        """Mean probability over draws, (N, ..., K)."""
        return self.log_probs.exp()

    def log_prob(self, targets: Values) -> Tensor:
        """Return the log of the mean probability of integer labels, (N, ...).

        If the likelihood has an `ignore_index`, labels of that value are left out, and the others come in one row.
        """
        ignored = getattr(self.likelihood, "ignore_index", None)
        log_probs, targets = without_ignored(self.log_probs, as_tensor(targets, "targets"), ignored)
        labels = fitting_labels(targets, log_probs.shape[:-1], log_probs.shape[-1])
        return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def columns(self) -> dict[str, Tensor]:
        confidence, best = self.probs.max(-1)
        return {
            "predicted_class": best,
            "confidence": confidence,
            "entropy": self.entropy,
            "mutual_information": self.mutual_information,
            "probs": self.probs,
        }


@dataclass(frozen=True, eq=False, repr=False)
class BernoulliPredictive(_ClassSummary):
    """Probabilities of yes, averaged over draws, one for each output: one logit, several labels, or pixels."""

    class_log_probs: Tensor
    """Log of the mean probability of no and of yes, (N, ..., 2)."""

    def __repr__(self) -> str:
        shape, draws = tuple(self.entropy.shape), count(self.num_samples, "draw")
        return f"{type(self).__name__}(probabilities of shape {shape}, {draws})"

    @property
    def probs(self) -> Tensor:
        """Mean probability of yes over draws, (N, ...)."""
        return self.class_log_probs[..., 1].exp()

    def log_prob(self, targets: Values) -> Tensor:
        """Return the log of the mean probability of targets 0 and 1, in the shape of the targets."""
        targets = as_tensor(targets, "targets")
        labels = fitting_yes_or_no(targets, self.entropy.shape).long()
        return self.class_log_probs.gather(-1, labels.unsqueeze(-1)).reshape(targets.shape)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        low, high = super().interval(level)
        return low[..., 1], high[..., 1]

    def columns(self) -> dict[str, Tensor]:
        return {"probs": self.probs, "entropy": self.entropy, "mutual_information": self.mutual_information}


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPredictive(_Summary):
    """A mixture over draws of Gaussians: one component N(f_s, noise) for each drawn function."""

    mean: Tensor
    """Mean over draws of the predicted mean, (N, ...)."""
    epistemic_variance: Tensor
    """Variance over draws of the predicted mean, with divisor S, (N, ...)."""
    noise_variance: Tensor
    """Mean over draws of the variance of the observation noise, (N, ...): 1/tau, or what the network predicts."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mean of shape {tuple(self.mean.shape)}, {count(self.num_samples, 'draw')})"

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

    def log_prob(self, targets: Values) -> Tensor:
        r"""Return the log-density of the mixture, $\log \frac1S \sum_s N(y; f_s, \sigma_s^2)$, shaped like targets."""
        targets = as_tensor(targets, "targets")
        shaped = shaped_like(targets, self.mean.shape).to(torch.float64)
        kept = self._draws if isinstance(self._draws, LinearDraws | LinearPieces) else self.draws
        total = self._log_density(kept, shaped) - math.log(self.num_samples)
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

    def cdf(self, values: Values) -> Tensor:
        """Return P(y <= values) under the mixture, in the shape of the values."""
        values = as_tensor(values, "values")
        shaped = shaped_like(values, self.mean.shape).to(torch.float64)
        return self.components().cdf(shaped).mean(0).reshape(values.shape).to(self.mean.dtype)

    def crps(self, targets: Values) -> Tensor:
        """Return the exact CRPS of the mixture, in the shape and the unit of the targets. Lower is better.

        It takes O(S^2) time for each example, as `scores.mixture_crps` does.
        """
        from batchbayes.scores import mixture_crps

        targets, mixture = as_tensor(targets, "targets"), self.components()
        precision = mixture.variance.expand_as(mixture.loc).reciprocal()  # (S, N, ...)
        found = mixture_crps(mixture.loc, precision, shaped_like(targets, self.mean.shape))
        return found.reshape(targets.shape).to(self.mean.dtype)

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
