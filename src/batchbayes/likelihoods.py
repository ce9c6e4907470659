"""Likelihoods say how a network's output describes the target. They do not depend on the method.

A likelihood takes outputs with a leading axis of draws, (S, N, ...), and returns p(y | f) for each draw. It also makes
the running summary that turns blocks of draws into a predictive.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, distributions

from batchbayes.errors import BatchbayesError
from batchbayes.predictive import (
    CategoricalPredictive,
    GaussianPredictive,
    RunningCategorical,
    RunningGaussian,
    RunningSummary,
    fitting_labels,
    shaped_like,
)

P_co = TypeVar("P_co", covariant=True)


class Likelihood(Protocol[P_co]):
    """p(y | f), and the running summary of draws of f."""

    shift_invariant: ClassVar[bool]
    """Whether it changes nothing to add one number to all outputs of an example. Then one output less is computed."""

    def __call__(self, outputs: Tensor) -> distributions.Distribution: ...

    def summary(self) -> RunningSummary[P_co]: ...


class TargetLikelihood(Likelihood[P_co], Protocol[P_co]):
    """A likelihood that knows the shape of its targets."""

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets in the shape that fits outputs (S, N, ...), or raise an error: others would broadcast."""
        ...


@dataclass(frozen=True)
class Categorical:
    """Classes: the outputs are logits along `class_axis` of (N, K, ...), as in torch's cross-entropy.

    The logits are divided by the `temperature`. A temperature above one makes each draw less certain.
    """

    class_axis: int = 1
    temperature: float = 1.0
    shift_invariant: ClassVar[bool] = True

    def __call__(self, outputs: Tensor) -> distributions.Categorical:
        return distributions.Categorical(logits=self.logits(outputs), validate_args=False)

    def logits(self, outputs: Tensor) -> Tensor:
        """Move the classes last, (S, N, K, ...) -> (S, N, ..., K), and divide by the temperature."""
        axis = self.class_axis + 1 if self.class_axis >= 0 else self.class_axis
        if outputs.ndim < 3 or not -outputs.ndim < axis < outputs.ndim:
            raise BatchbayesError(
                expected=f"a network output (N, K, ...) with classes along axis {self.class_axis}",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.gaussian() for regression, or name the axis as in bb.categorical(class_axis=-1)",
            )
        moved = outputs.movedim(axis, -1)  # (S, N, ..., K)
        return moved if self.temperature == 1 else moved / self.temperature

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(outputs)
        return fitting_labels(targets, logits.shape[1:-1], logits.shape[-1])

    def summary(self) -> RunningSummary[CategoricalPredictive]:
        return RunningCategorical(self.logits)


@dataclass(frozen=True)
class Gaussian:
    """Real targets with one noise precision tau for all: y ~ N(f, 1/tau), in the unit of the outputs."""

    precision: float
    shift_invariant: ClassVar[bool] = False

    def __call__(self, outputs: Tensor) -> distributions.Normal:
        scale = torch.as_tensor(self.precision**-0.5, dtype=outputs.dtype, device=outputs.device)
        return distributions.Normal(outputs, scale, validate_args=False)

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return shaped_like(targets, outputs.shape[1:]).to(outputs.dtype)

    def summary(self) -> RunningSummary[GaussianPredictive]:
        return RunningGaussian(self, same_noise=True)


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Real targets with noise that the network predicts.

    The outputs (N, 2 D, ...) hold D means and then D log variances along `axis`.
    """

    axis: int = 1
    shift_invariant: ClassVar[bool] = False

    def __call__(self, outputs: Tensor) -> distributions.Normal:
        axis = self.axis + 1 if self.axis >= 0 else self.axis
        if outputs.ndim < 3 or not -outputs.ndim < axis < outputs.ndim or outputs.shape[axis] % 2:
            raise BatchbayesError(
                expected="an even number of outputs: means, then log variances",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.gaussian(precision=...) if the network predicts means only",
            )
        mean, log_variance = outputs.chunk(2, dim=axis)  # (S, N, D, ...) each
        return distributions.Normal(mean, (0.5 * log_variance).exp(), validate_args=False)

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return shaped_like(targets, self(outputs).mean.shape[1:]).to(outputs.dtype)

    def summary(self) -> RunningSummary[GaussianPredictive]:
        return RunningGaussian(self, same_noise=False)


def categorical(class_axis: int = 1, temperature: float = 1.0) -> Categorical:
    """Make the likelihood of classification and segmentation: logits (N, K, ...) -> probabilities (N, ..., K).

    >>> categorical(temperature=2.0)(torch.tensor([[[0.0, 2.0]]])).logits
    tensor([[[-1.3133, -0.3133]]])
    """
    if not 0 < temperature < float("inf"):
        raise BatchbayesError(
            expected="a positive, finite temperature",
            got=str(temperature),
            fix="pass 1 to leave the logits as they are",
        )
    return Categorical(class_axis, float(temperature))


def gaussian(precision: float) -> Gaussian:
    """Make the likelihood of regression with observation noise of variance 1 / precision.

    >>> gaussian(precision=4.0)(torch.zeros(1, 2, 1)).stddev[0, 0]
    tensor([0.5000])
    """
    if not (precision > 0 and precision < float("inf")):
        raise BatchbayesError(
            expected="a positive, finite precision tau",
            got=str(precision),
            fix="pass tau = 1 / noise variance",
        )
    return Gaussian(float(precision))


def heteroscedastic_gaussian(axis: int = 1) -> HeteroscedasticGaussian:
    """Make the likelihood of regression by a network that returns means and then log variances along `axis`."""
    return HeteroscedasticGaussian(axis)
