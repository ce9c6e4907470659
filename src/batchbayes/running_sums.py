"""Running sums over blocks of draws, from which predictives are built.

The sums are in float64, and their size does not grow with the number of draws S.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributions

from batchbayes.engines.linear_draws import Block, Kept, LinearDraws, distinct_draws
from batchbayes.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

NOTHING = torch.zeros((), dtype=torch.float64)
"""What sums begin with. It is never changed in place."""


class RunningSummary(Protocol[P_co]):
    """A running summary takes blocks of draws for one chunk of examples and builds their predictive."""

    needs_draws: bool

    def add(self, block: Block) -> None: ...

    def finish(self, draws: Kept | None) -> P_co: ...


def summarised(summary: RunningSummary[P], draws: Tensor, *, keep: bool = True) -> P:
    """Return the predictive of draws (S, N, ...) by a new running summary of a likelihood. It may keep the draws.

    >>> import batchbayes as bb
    >>> summarised(bb.gaussian(1.0).summary(), torch.tensor([[1.0], [3.0]])).mean
    tensor([2.])
    """
    summary.add(draws)
    return summary.finish(draws if keep else None)


class _RunningClasses:
    """Sums over draws of p, p^2 and the entropy. Mean probabilities down to exp(-745) stay above zero."""

    needs_draws = False

    def __init__(self, likelihood: Any) -> None:
        """The likelihood has `logits`, which puts classes last, and `check_outputs` for the first block."""
        self._likelihood, self._count, self._dtype = likelihood, 0, torch.float32
        self._probs = self._squares = self._entropy = NOTHING

    def add(self, block: Block) -> None:
        if not self._count:
            self._likelihood.check_outputs(block.middle if isinstance(block, LinearDraws) else block[0])
        for outputs, counts in distinct_draws(block):
            finer = outputs.to(at_least_single(outputs.dtype))
            log_probs = self._likelihood.logits(finer).double().log_softmax(-1)  # (u, n, ..., K)
            probs = log_probs.exp()
            self._dtype, self._count = outputs.dtype, self._count + int(counts.sum())
            self._probs = self._probs + torch.tensordot(counts, probs, 1)
            self._entropy = self._entropy - torch.tensordot(counts, log_probs.mul_(probs).sum(-1), 1)
            self._squares = self._squares + torch.tensordot(counts, probs.square_(), 1)

    def _parts(self) -> list[Tensor]:
        """Return entropy, mutual information, variance and log of the mean of the probabilities."""
        mean = self._probs / self._count
        variance = (self._squares / self._count - mean.square()).clamp_min(0)
        entropy = 0.0 - torch.special.xlogy(mean, mean).sum(-1)  # a minus sign would make -0.0 of a certain class
        information = entropy - self._entropy / self._count
        information = torch.where(information > 1e-12, information, 0.0)  # smaller values are rounding errors
        return [part.to(at_least_single(self._dtype)) for part in (entropy, information, variance, mean.log())]

    def _origin(self, draws: Kept | None) -> dict[str, Any]:
        return {"num_samples": self._count, "likelihood": self._likelihood, "_draws": draws}


class RunningCategorical(_RunningClasses):
    """The sums of all classes."""

    def finish(self, draws: Kept | None) -> CategoricalPredictive:
        return CategoricalPredictive(*self._parts(), **self._origin(draws))


class RunningBernoulli(_RunningClasses):
    """The sums of two classes, no and yes."""

    def finish(self, draws: Kept | None) -> BernoulliPredictive:
        entropy, information, variance, log_probs = self._parts()
        return BernoulliPredictive(entropy, information, variance[..., 1], log_probs, **self._origin(draws))


class RunningGaussian:
    """Mean and variance over draws, merged block by block (Chan's update), and the mean of the noise variance."""

    needs_draws = True  # the density and the quantiles of the mixture need them

    def __init__(
        self,
        likelihood: Callable[[Tensor], distributions.Normal],
        noise_std: Callable[[Tensor], float | Tensor] | None = None,
    ) -> None:
        """`noise_std` gives the noise of outputs (S, N, ...), if that is the same for all draws.

        Then linear draws have moments in closed form.
        """
        self._likelihood, self._noise_std, self._count, self._dtype = likelihood, noise_std, 0, torch.float32
        self._mean = self._variance = self._noise = NOTHING

    def add(self, block: Block) -> None:
        self._dtype = block.middle.dtype if isinstance(block, LinearDraws) else block.dtype
        if isinstance(block, LinearDraws) and self._noise_std:
            mean, variance = block.moments()
            self._merge(len(block), mean, variance, torch.zeros_like(mean) + self._noise_std(mean[None]) ** 2)
            return
        for outputs, counts in distinct_draws(block):
            components, shares = self._likelihood(outputs.double()), counts / counts.sum()
            each = components.mean  # (u, n, ...)
            mean = torch.tensordot(shares, each, 1)
            noise = torch.tensordot(shares, components.variance.expand_as(each), 1)
            self._merge(int(counts.sum()), mean, torch.tensordot(shares, (each - mean).square_(), 1), noise)

    def _merge(self, count: int, mean: Tensor, variance: Tensor, noise: Tensor) -> None:
        """Add the moments of `count` more draws."""
        before, self._count = self._count, self._count + count
        if not before:
            self._mean, self._variance, self._noise = mean, variance, noise
            return
        shift, share = mean - self._mean, count / self._count
        spread = shift.square() * (share * (1 - share))
        self._mean = self._mean + shift * share
        self._variance = torch.lerp(self._variance, variance, share) + spread
        self._noise = torch.lerp(self._noise, noise, share)

    def finish(self, draws: Kept | None) -> GaussianPredictive:
        origin: Any = {"num_samples": self._count, "likelihood": self._likelihood, "_draws": draws}
        moments = (self._mean, self._variance, self._noise)
        return GaussianPredictive(*(moment.to(at_least_single(self._dtype)) for moment in moments), **origin)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return the type of results: that of the outputs, or float32 if this is finer. Few digits do not sum to one."""
    return torch.promote_types(dtype, torch.float32)
