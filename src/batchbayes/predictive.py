"""Predictives summarise what S drawn functions say about N examples.

Axes: S (draws), N (examples), any others, classes last.

Running sums over blocks of draws, from which predictives are built.

The sums are in float64, and their size does not grow with the number of draws S.

Tensors as numpy arrays and as a pandas table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, distributions
from torch.nn.functional import ctc_loss

from batchbayes._common.checks import (
    Values,
    as_tensor,
    check_classes,
    finite_number,
    fitting_labels,
    fitting_yes_or_no,
    shaped_like,
    without_ignored,
)
from batchbayes._common.text import count
from batchbayes.engines.linear import Block, Drawn, Kept, LinearDraws, LinearPieces, distinct_draws, formed, join_draws
from batchbayes.errors import BatchbayesError
from batchbayes.sums import class_sums, class_uncertainty, merged_moments


@dataclass(init=False, frozen=True, eq=False, repr=False, kw_only=True)
class _Summary(ABC):
    """What all predictives share: their origin, how they are joined, and how they become arrays or a table."""

    num_samples: int
    likelihood: Any
    """The likelihood that made it."""
    _draws: Kept | None = None
    engine: str = "sample"
    """How the draws were made, and how far that was checked, in words."""
    drawn: Drawn = Drawn.EXACT
    """How the draws were made."""

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

    def select(self, mask: Values) -> Self:
        """Return the predictive of the places where a mask (N, ...) is true, a row for each: the tokens or frames that
        count, the nodes of one graph. Draws that were kept come along."""
        mask, own = as_tensor(mask, "the mask"), {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor) and name != "_draws"}
        shape = next(iter(tensors.values())).shape[: mask.ndim]
        if mask.dtype != torch.bool or mask.shape != shape or not mask.ndim:
            got = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise BatchbayesError(f"a mask of bool in the shape {tuple(shape)}", got, "compare, as in labels != -100")
        likelihood, draws = self.likelihood, None if self._draws is None else formed(self._draws)
        if draws is not None and hasattr(likelihood, "class_axis"):
            draws = likelihood.classes_last(draws)
            likelihood = replace(likelihood, class_axis=-1)
        draws = None if draws is None or draws.shape[1 : 1 + mask.ndim] != mask.shape else draws[:, mask]
        changed: Any = {name: value[mask] for name, value in tensors.items()}
        return replace(self, **changed, likelihood=likelihood, _draws=draws)  # type: ignore[type-var]

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

    def ctc_log_prob(self, targets: Values, input_lengths: Values, target_lengths: Values, blank: int = 0) -> Tensor:
        r"""Return the log-probability of whole sequences of labels by CTC, (N,), for logits of frames (N, T, K).

        It is $\log \frac1S \sum_s p(y | f_s)$, where a draw gives all paths of labels and blanks that spell y. Frames
        and labels beyond the lengths (N,) do not count. It needs the draws. Arguments are those of torch's `ctc_loss`.
        """
        frames = self.likelihood.logits(self.draws.double()).log_softmax(-1).transpose(1, 2)  # (S, T, N, K)
        lengths = [as_tensor(each, "lengths") for each in (input_lengths, target_lengths)]
        labels = _ctc_labels(as_tensor(targets, "targets"), frames.shape, lengths[0], lengths[1], blank)
        each = [ctc_loss(draw, labels, lengths[0].long(), lengths[1].long(), blank, "none") for draw in frames]
        return (torch.stack(each).neg().logsumexp(0) - math.log(len(each))).to(self.log_probs.dtype)

    def columns(self) -> dict[str, Tensor]:
        confidence, best = self.probs.max(-1)
        return {
            "predicted_class": best,
            "confidence": confidence,
            "entropy": self.entropy,
            "mutual_information": self.mutual_information,
            "probs": self.probs,
        }


def _ctc_labels(labels: Tensor, shape: torch.Size, frames: Tensor, counts: Tensor, blank: int) -> Tensor:
    """Return labels (N, L) or (sum of counts,) for torch, which reads outside of memory if they or lengths are wrong.

    Draws of frames have `shape` (S, T, N, K).
    """
    _, most_frames, examples, classes = shape
    most = labels.shape[1] if labels.ndim == 2 else len(labels)
    for name, each, limit in (("input_lengths", frames, most_frames), ("target_lengths", counts, most)):
        if each.shape != (examples,) or not bool(((each >= 0) & (each <= limit) & (each == each.floor())).all()):
            fix = "pass a whole number for each example"
            raise BatchbayesError(f"{name} ({examples},) from 0 to {limit}", f"{each.tolist()}"[:200], fix)
    if labels.ndim == 2:
        used = labels[torch.arange(most) < counts[:, None]] if len(labels) == examples else labels[:0]
    else:
        used = labels
    if labels.ndim not in (1, 2) or len(used) != int(counts.sum()):
        fix = "pass labels (N, L), or those of all examples one after the other"
        raise BatchbayesError(f"{int(counts.sum())} labels", f"shape {tuple(labels.shape)}", fix)
    check_classes("labels", used, classes)
    if not 0 <= blank < classes or bool((used == blank).any()):
        fix = "labels never are the blank: name its class by blank="
        raise BatchbayesError(f"a blank that no label is, from 0 to {classes - 1}", f"blank={blank}", fix)
    return labels.long()


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

    @property
    def covariance(self) -> Tensor:
        """Total covariance of the D outputs of each example, (N, D, D): over draws, with divisor S, plus the noise.

        Outputs of one draw move together. `variance` has the diagonal alone. It needs the draws.
        """
        means, noise = self.components().mean.flatten(2), self.noise_variance.double().flatten(1)  # (S, N, D), (N, D)
        if noise.numel() * noise.shape[1] > MOST_COVARIANCES:
            raise BatchbayesError(
                expected="few enough outputs and examples for a matrix of each example",
                got=f"{len(noise)} examples with {noise.shape[1]} outputs",
                fix="predict fewer examples at a time, or use variance",
            )
        moved = (means - means.mean(0)).transpose(0, 1)  # (N, S, D)
        return (moved.mT @ moved / len(means) + noise.diag_embed()).to(self.mean.dtype)

    def log_prob(self, targets: Values) -> Tensor:
        r"""Return the log-density of each output by itself, $\log \frac1S \sum_s N(y; f_s, \sigma_s^2)$, shaped like
        targets. Several outputs of one example are not independent, so their sum is not `joint_log_prob`."""
        return self._mixed(targets, joint=False)

    def joint_log_prob(self, targets: Values) -> Tensor:
        r"""Return the log-density of all D outputs of an example together, (N,):
        $\log \frac1S \sum_s \prod_d N(y_d; f_{sd}, \sigma_{sd}^2)$. With one output it is `log_prob`."""
        return self._mixed(targets, joint=True)

    def _mixed(self, targets: Values, *, joint: bool) -> Tensor:
        targets = as_tensor(targets, "targets")
        shaped = shaped_like(targets, self.mean.shape).to(torch.float64)
        kept = self._draws if isinstance(self._draws, LinearDraws | LinearPieces) else self.draws
        total = self._log_density(kept, shaped, joint) - math.log(self.num_samples)
        return total.reshape(targets.shape[:1] if joint else targets.shape).to(self.mean.dtype)

    def _log_density(self, draws: Kept, targets: Tensor, joint: bool) -> Tensor:
        """Return the log of the sum of the components' densities, (N, ...), or (N,) of all outputs jointly.

        Linear draws are formed block by block.
        """
        if isinstance(draws, LinearPieces):
            pieces = zip(draws.pieces, targets.split([len(piece.middle) for piece in draws.pieces]), strict=True)
            return torch.cat([self._log_density(piece, part, joint) for piece, part in pieces])
        if isinstance(draws, Tensor):
            return self._components_density(draws, targets, joint).logsumexp(0)
        total: Tensor | None = None
        for outputs, counts in draws.blocks():
            each = self._components_density(outputs, targets, joint)  # (u, N, ...)
            added = (each + counts.log().view(-1, *[1] * (each.ndim - 1))).logsumexp(0)
            total = added if total is None else torch.logaddexp(total, added)
        assert total is not None  # there is a draw
        return total

    def _components_density(self, outputs: Tensor, targets: Tensor, joint: bool) -> Tensor:
        each = self.likelihood(outputs.double()).log_prob(targets)  # (s, N, ...)
        return each.flatten(2).sum(2) if joint and each.ndim > 2 else each

    def cdf(self, values: Values) -> Tensor:
        """Return P(y <= values) under the mixture, in the shape of the values."""
        values = as_tensor(values, "values")
        shaped = shaped_like(values, self.mean.shape).to(torch.float64)
        return self.components().cdf(shaped).mean(0).reshape(values.shape).to(self.mean.dtype)

    def crps(self, targets: Values) -> Tensor:
        """Return the exact CRPS of the mixture, in the shape and the unit of the targets. Lower is better.

        It takes O(S^2) time for each example, as `metrics.mixture_crps` does.
        """
        from batchbayes.metrics import mixture_crps

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


MOST_COVARIANCES = 2**27
"""Numbers in all covariance matrices, at most (1 GiB)."""
Predictive = CategoricalPredictive | BernoulliPredictive | GaussianPredictive


def _checked_level(level: float) -> float:
    return finite_number("a level", level, above=0, below=1, fix="pass 0.9 for an interval that holds 90 %")


def _middle_range(draws: Tensor, level: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the quantiles over draws (S, ...) that leave out equal shares at both ends."""
    tail = (1 - _checked_level(level)) / 2
    low, high = np.quantile(draws.numpy(), (tail, 1 - tail), axis=0)  # torch's takes few numbers only
    return torch.as_tensor(low).to(dtype), torch.as_tensor(high).to(dtype)


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


def require_outputs(block: Block) -> None:
    """Raise an error if a network has no outputs: there is nothing to predict."""
    shape = tuple((block.middle if isinstance(block, LinearDraws) else block[0]).shape)
    if 0 in shape[1:]:
        fix = "check the last layer of the network, or output="
        raise BatchbayesError(expected="at least one output for each example", got=f"shape {shape}", fix=fix)


class _RunningClasses:
    """Sums over draws of p, p^2 and the entropy. Mean probabilities down to exp(-745) stay above zero."""

    needs_draws = False

    def __init__(self, likelihood: Any) -> None:
        """The likelihood has `logits`, which puts classes last, and `check_outputs` for the first block."""
        self._likelihood, self._count, self._dtype = likelihood, 0, torch.float32
        self._sums = [NOTHING] * 3

    def add(self, block: Block) -> None:
        require_outputs(block)
        if not self._count:
            self._likelihood.check_outputs(block.middle if isinstance(block, LinearDraws) else block[0])
        for outputs, counts in distinct_draws(block):
            finer = outputs.to(at_least_single(outputs.dtype))
            log_probs = self._likelihood.logits(finer).double().log_softmax(-1)  # (u, n, ..., K)
            self._dtype, self._count = outputs.dtype, self._count + int(counts.sum())
            found = class_sums(log_probs, partial(torch.tensordot, counts, dims=1), squares=True)
            self._sums = [old + new for old, new in zip(self._sums, found, strict=True)]

    def _parts(self) -> list[Tensor]:
        """Return entropy, mutual information, variance and log of the mean of the probabilities."""
        mean, expected_entropy, squares = (each / self._count for each in self._sums)
        variance = (squares - mean.square()).clamp_min(0)
        entropy, information = class_uncertainty(mean, expected_entropy)
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
        self._moments = [NOTHING] * 3

    def add(self, block: Block) -> None:
        require_outputs(block)
        self._dtype = block.middle.dtype if isinstance(block, LinearDraws) else block.dtype
        if isinstance(block, LinearDraws) and self._noise_std:
            mean, variance = block.moments()
            noise = torch.zeros_like(mean) + self._noise_std(mean[None]) ** 2
            self._merge(len(block), [mean, variance, noise])
            return
        for outputs, counts in distinct_draws(block):
            components, shares = self._likelihood(outputs.double()), counts / counts.sum()
            each = components.mean  # (u, n, ...)
            mean = torch.tensordot(shares, each, 1)
            noise = torch.tensordot(shares, components.variance.expand_as(each), 1)
            self._merge(int(counts.sum()), [mean, torch.tensordot(shares, (each - mean).square_(), 1), noise])

    def _merge(self, count: int, new: list[Tensor]) -> None:
        """Add the moments of `count` more draws."""
        self._moments = merged_moments(self._moments, self._count, new, count) if self._count else new
        self._count += count

    def finish(self, draws: Kept | None) -> GaussianPredictive:
        origin: Any = {"num_samples": self._count, "likelihood": self._likelihood, "_draws": draws}
        return GaussianPredictive(*(each.to(at_least_single(self._dtype)) for each in self._moments), **origin)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return the type of results: that of the outputs, or float32 if this is finer. Few digits do not sum to one."""
    return torch.promote_types(dtype, torch.float32)


def to_array(values: Tensor) -> np.ndarray:
    """Return a numpy array. Numpy has no bfloat16, so that becomes float32.

    >>> to_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def to_frame(columns: Mapping[str, Tensor]) -> Any:
    """Return a pandas DataFrame with one row for each example.

    A tensor (N,) or (N, 1) is one column. A tensor (N, D) becomes D columns, name_0 to name_{D-1}.
    """
    try:
        import pandas as pd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BatchbayesError(
            expected="the package pandas, which to_pandas() needs", got="none", fix="pip install pandas, or to_numpy()"
        ) from error
    found = {}
    for name, values in columns.items():
        if values.ndim > 2:
            raise BatchbayesError(
                expected="a few numbers for each example, for a table",
                got=f"{name} of shape {tuple(values.shape)}",
                fix="use to_numpy(), which keeps the shape",
            )
        if values.ndim == 1 or values.shape[1] == 1:
            found[name] = to_array(values.reshape(len(values)))
        else:
            found.update({f"{name}_{k}": to_array(column) for k, column in enumerate(values.unbind(1))})
    return pd.DataFrame(found)
