"""Likelihoods say how a network's output describes the target. They do not depend on the method.

A likelihood takes outputs with a leading axis of draws, (S, N, ...), and returns p(y | f) for each draw. It also makes
the running summary that turns blocks of draws into a predictive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, distributions

from batchbayes._common.checks import (
    as_tensor,
    check_probabilities,
    finite_number,
    fitting_labels,
    fitting_yes_or_no,
    shaped_like,
    whole_number,
)
from batchbayes.errors import BatchbayesError
from batchbayes.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    RunningBernoulli,
    RunningCategorical,
    RunningGaussian,
    RunningSummary,
)

P_co = TypeVar("P_co", covariant=True)

FEWEST_OUTPUTS = 16
"""This number of outputs between 0 and 1, and none outside, means probabilities. Fewer may be logits by chance."""


class Likelihood(Protocol[P_co]):
    """p(y | f), and the running summary of draws of f."""

    @property
    def shift_invariant(self) -> bool:
        """Whether p(y | f) stays the same when one number is added to all outputs of an example, as for logits of
        classes. Then the linear engine needs the differences of outputs only."""
        return False

    def __call__(self, outputs: Tensor) -> distributions.Distribution: ...

    def summary(self) -> RunningSummary[P_co]: ...


class TargetLikelihood(Likelihood[P_co], Protocol[P_co]):
    """A likelihood that knows the shape of its targets."""

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets in the shape that fits outputs (S, N, ...), or raise an error: others would broadcast."""
        ...


def require_likelihood(likelihood: object) -> None:
    """Raise an error unless the object is a likelihood: a common slip is to forget the brackets of `categorical()`."""
    if isinstance(likelihood, type) or not callable(getattr(likelihood, "summary", None)):
        name = getattr(likelihood, "__name__", None)
        makers = (categorical, bernoulli, gaussian, heteroscedastic_gaussian)
        raise BatchbayesError(
            expected="a likelihood: bb.categorical(), bb.bernoulli(), bb.gaussian(precision=...) or the like",
            got=f"the function {name}, not called" if name else f"a {type(likelihood).__name__}",
            fix=f"call it, as in bb.{name}()" if likelihood in makers else "pass one of these",
        )


@dataclass(frozen=True)
class Categorical(TargetLikelihood[CategoricalPredictive]):
    """Classes: the outputs are logits along `class_axis` of (N, K, ...), as in torch's cross-entropy.

    The logits are divided by the `temperature`. A temperature above one makes each draw less certain.
    """

    class_axis: int = 1
    temperature: float = 1.0
    ignore_index: int | None = None
    """Targets of this value do not count."""
    probabilities: bool | None = None
    """Whether the outputs are probabilities already; None refuses outputs that look so."""
    is_axis_given: bool = field(default=True, repr=False, compare=False)
    """Whether somebody said where the classes are. If not, outputs that may have them elsewhere are refused."""

    @property
    def shift_invariant(self) -> bool:
        return not self.probabilities

    def __call__(self, outputs: Tensor) -> distributions.Categorical:
        logits = self.logits(outputs)
        if self.ignore_index is None:
            return distributions.Categorical(logits=logits, validate_args=False)
        return _Ignoring(logits, self.ignore_index)

    def logits(self, outputs: Tensor) -> Tensor:
        """Move the classes last, (S, N, K, ...) -> (S, N, ..., K), and divide by the temperature."""
        moved = self.classes_last(outputs)
        moved = _log(moved) if self.probabilities else moved
        return moved if self.temperature == 1 else moved / self.temperature

    def classes_last(self, outputs: Tensor) -> Tensor:
        """Move the classes last, (S, N, K, ...) -> (S, N, ..., K), or raise an error that says where they could be."""
        axis = _with_draws(self.class_axis, outputs)
        if not 2 <= axis < outputs.ndim:
            raise BatchbayesError(
                expected=f"a network output (N, K, ...) with classes along axis {self.class_axis}",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.gaussian() for regression, bb.bernoulli() for one logit, or name the axis as in "
                "bb.categorical(class_axis=-1); axis 0 is that of the examples",
            )
        if not self.is_axis_given and _may_be_last(outputs.shape[1:]):
            raise BatchbayesError(
                expected="class_axis= for outputs that may have their classes first or last",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.categorical(class_axis=-1) for tokens (N, T, K) and other outputs with classes last, or "
                "bb.categorical(class_axis=1) for (N, K, ...)",
            )
        if outputs.shape[axis] == 1:
            raise BatchbayesError(
                expected=f"two classes or more along axis {self.class_axis}: one class has probability 1",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.bernoulli() for a network with one logit, or bb.gaussian() for regression",
            )
        return outputs.movedim(axis, -1)  # (S, N, ..., K)

    def check_outputs(self, outputs: Tensor) -> None:
        """Raise an error if outputs (n, K, ...) are probabilities, or are not although they should be."""
        values = self.classes_last(outputs[None])[0]  # (n, ..., K)
        if self.probabilities:
            check_probabilities(values)
        elif self.probabilities is None and values.numel():
            rounding = max(1e-5, 4 * torch.finfo(values.dtype).eps)
            if bool(values.min() >= 0) and bool(((values.sum(-1) - 1).abs() <= rounding).all()):
                raise _already_probabilities("categorical", "rows that are not negative and sum to one")

    def counts(self, targets: Tensor) -> Tensor:
        """Return whether each target counts, bool in the shape of the targets."""
        return torch.ones_like(targets, dtype=torch.bool) if self.ignore_index is None else targets != self.ignore_index

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.check_outputs(outputs[0])
        (_, *shape, num_classes), targets = self.logits(outputs).shape, as_tensor(targets, "labels").cpu()
        if self.ignore_index is None:
            return fitting_labels(targets, shape, num_classes)
        kept = self.counts(targets)
        if targets.numel() and not kept.any():
            raise BatchbayesError("labels that count", f"only {self.ignore_index}", "check ignore_index=")
        return torch.where(kept, fitting_labels(targets.where(kept, 0), shape, num_classes), targets.long())

    def summary(self) -> RunningCategorical:
        return RunningCategorical(self)


class _Ignoring(distributions.Categorical):
    """Labels of one value have a log-probability of zero."""

    def __init__(self, logits: Tensor, ignore_index: int) -> None:
        super().__init__(logits=logits, validate_args=False)
        self._ignore_index = ignore_index

    def log_prob(self, value: Tensor) -> Tensor:
        kept = value != self._ignore_index
        return torch.where(kept, super().log_prob(value.where(kept, 0)), 0.0)


@dataclass(frozen=True)
class Bernoulli(TargetLikelihood[BernoulliPredictive]):
    """Yes or no: each output is the logit of yes. One logit (N,) or (N, 1), several labels (N, K), or pixels.

    The logits are divided by the `temperature`. A temperature above one makes each draw less certain.
    """

    temperature: float = 1.0
    probabilities: bool | None = None
    """Whether the outputs are probabilities already; None refuses outputs that look so."""

    def __call__(self, outputs: Tensor) -> distributions.Bernoulli:
        return distributions.Bernoulli(logits=self._logit(outputs), validate_args=False)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of no and yes, (S, N, ...) -> (S, N, ..., 2)."""
        logit = self._logit(outputs)
        return torch.stack([torch.zeros_like(logit), logit], -1)

    def _logit(self, outputs: Tensor) -> Tensor:
        if self.probabilities:
            outputs = _log(outputs) - _log(1 - outputs)
        return outputs if self.temperature == 1 else outputs / self.temperature

    def check_outputs(self, outputs: Tensor) -> None:
        """Raise an error if outputs (n, ...) are probabilities, or are not although they should be."""
        inside = bool(((outputs >= 0) & (outputs <= 1)).all())
        if self.probabilities and not inside:
            raise BatchbayesError(
                expected="outputs between 0 and 1, as probabilities=True says",
                got=f"values from {float(outputs.min()):.3g} to {float(outputs.max()):.3g}",
                fix="leave out probabilities=True if the outputs are logits",
            )
        if self.probabilities is None and inside and outputs.numel() >= FEWEST_OUTPUTS:
            raise _already_probabilities("bernoulli", f"{outputs.numel()} outputs, all between 0 and 1")

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.check_outputs(outputs[0])
        return fitting_yes_or_no(targets, outputs.shape[1:]).to(outputs.dtype)

    def summary(self) -> RunningBernoulli:
        return RunningBernoulli(self)


def _may_be_last(shape: Sequence[int]) -> bool:
    """Whether outputs (N, ...) may have classes last: sequences, and maps that are square then, or whose last axis is
    the shortest."""
    is_square = len(shape) == 4 and shape[1] == shape[2] != shape[3]
    return len(shape) == 3 or is_square or (len(shape) > 3 and shape[-1] < min(shape[1:-1]))


def _with_draws(axis: int, outputs: Tensor) -> int:
    """Return where an axis of the network's output is in outputs with a leading axis of draws."""
    return axis + 1 if axis >= 0 else axis + outputs.ndim


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _already_probabilities(name: str, got: str) -> BatchbayesError:
    return BatchbayesError(
        expected="logits, to which the likelihood applies softmax or sigmoid",
        got=f"{got}: these look like probabilities, so it would be applied twice",
        fix=f"drop the last layer, or use bb.{name}(probabilities=True); if they are logits, "
        f"bb.{name}(probabilities=False)",
    )


@dataclass(frozen=True)
class Gaussian(TargetLikelihood[GaussianPredictive]):
    """Real targets with noise of precision tau: y ~ N(f, 1/tau), in the unit of the outputs.

    Tau is one number, or one for each of the D outputs (N, D, ...).
    """

    precision: float | tuple[float, ...]

    def __call__(self, outputs: Tensor) -> distributions.Normal:
        return distributions.Normal(outputs, self.noise_std(outputs), validate_args=False)

    def noise_std(self, outputs: Tensor) -> float | Tensor:
        """Return the standard deviation of the noise of outputs (S, N, ...): one number, or (D, 1, ...)."""
        if not isinstance(self.precision, tuple):
            return self.precision**-0.5
        if outputs.ndim < 3 or outputs.shape[2] != len(self.precision):
            raise BatchbayesError(
                expected=f"{len(self.precision)} outputs for each example, one for each precision",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="pass one precision for each output (N, D, ...), or one number for all",
            )
        each = torch.tensor([precision**-0.5 for precision in self.precision]).to(outputs)
        return each.view(-1, *[1] * (outputs.ndim - 3))

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return shaped_like(targets, outputs.shape[1:]).to(outputs.dtype)

    def summary(self) -> RunningGaussian:
        return RunningGaussian(self, self.noise_std)


@dataclass(frozen=True)
class HeteroscedasticGaussian(TargetLikelihood[GaussianPredictive]):
    """Real targets with noise that the network predicts.

    The outputs (N, 2 D, ...) hold D means and then D log variances along `axis`.
    """

    axis: int = 1

    def __call__(self, outputs: Tensor) -> distributions.Normal:
        axis = _with_draws(self.axis, outputs)
        if not 2 <= axis < outputs.ndim or outputs.shape[axis] % 2:
            raise BatchbayesError(
                expected="an even number of outputs: means, then log variances",
                got=f"an output of shape {tuple(outputs.shape[1:])}",
                fix="use bb.gaussian(precision=...) if the network predicts means only",
            )
        mean, log_variance = outputs.chunk(2, dim=axis)  # (S, N, D, ...) each
        return distributions.Normal(mean, (0.5 * log_variance).exp(), validate_args=False)

    def fitting(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return shaped_like(targets, self(outputs).mean.shape[1:]).to(outputs.dtype)

    def summary(self) -> RunningGaussian:
        return RunningGaussian(self)


def categorical(
    class_axis: int | None = None,
    temperature: float = 1.0,
    *,
    ignore_index: int | None = None,
    probabilities: bool | None = None,
) -> Categorical:
    """Make the likelihood of classification and segmentation: logits (N, K, ...) -> probabilities (N, ..., K).

    Args:
        class_axis: where the classes are in the output of the network: by default 1, as in torch's cross-entropy. It
            has to be said for outputs (N, K, L) or (N, T, K), which do not tell, and for maps (N, H, W, K).
        temperature: a number that the logits are divided by.
        ignore_index: a label that does not count, as in torch's cross-entropy.
        probabilities: True if the network ends in a softmax, so that its outputs are probabilities. By default such
            outputs are refused. False takes all outputs as logits.

    >>> categorical(temperature=2.0)(torch.tensor([[[0.0, 2.0]]])).logits
    tensor([[[-1.3133, -0.3133]]])
    """
    axis = 1 if class_axis is None else whole_number("class_axis", class_axis, least=None)
    ignored = None if ignore_index is None else whole_number("ignore_index", ignore_index, least=None)
    return Categorical(axis, _temperature(temperature), ignored, _flag(probabilities), class_axis is not None)


def bernoulli(temperature: float = 1.0, *, probabilities: bool | None = None) -> Bernoulli:
    """Make the likelihood of yes or no: a network with one logit, with several labels (N, K), or for each pixel.

    Args:
        temperature: a number that the logits are divided by.
        probabilities: True if the network ends in a sigmoid, so that its outputs are probabilities. By default such
            outputs are refused if there are at least 16 of them. False takes all outputs as logits.

    >>> bernoulli()(torch.tensor([[0.0, 2.0]])).probs
    tensor([[0.5000, 0.8808]])
    """
    return Bernoulli(_temperature(temperature), _flag(probabilities))


def gaussian(precision: float | Sequence[float]) -> Gaussian:
    """Make the likelihood of regression with noise of variance 1 / precision. Outputs (N, D, ...) may have one each.

    >>> gaussian(precision=[4.0, 1.0])(torch.zeros(1, 2, 2)).stddev[0, 0]
    tensor([0.5000, 1.0000])
    """
    if hasattr(precision, "__len__") and not isinstance(precision, str):
        each = as_tensor(precision, "the precision")
        if each.ndim == 1 and len(each):
            return Gaussian(tuple(_precision(value) for value in each.tolist()))
    return Gaussian(_precision(precision))


def heteroscedastic_gaussian(axis: int = 1) -> HeteroscedasticGaussian:
    """Make the likelihood of regression by a network that returns means and then log variances along `axis`.

    >>> heteroscedastic_gaussian()(torch.tensor([[[3.0, 0.0]]])).variance  # a mean of 3, a log variance of 0
    tensor([[[1.]]])
    """
    return HeteroscedasticGaussian(whole_number("axis", axis, least=None))


def _temperature(value: float) -> float:
    return finite_number("a positive, finite temperature, that is", value, above=0, fix="pass 1 to change nothing")


def _precision(value: object) -> float:
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    name = "a positive, finite precision tau, that is"
    return finite_number(name, value, above=0, fix="pass tau = 1 / noise variance")


def _flag(value: bool | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise BatchbayesError(expected="probabilities=True, False or None", got=repr(value), fix="choose one of them")
