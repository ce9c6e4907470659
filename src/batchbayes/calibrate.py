"""Calibration on held-out data: observation noise, temperature, scores, conformal intervals and sets.

Each function takes the predictive of held-out examples and their targets. It does not run the network. The functions
that tune need a predictive that kept its draws. The exception is `tune_batch_size`, which takes a batch-norm posterior
and data; its home is `methods/batchnorm/tune_batch_size.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from batchbayes._common.checks import (
    Values,
    as_tensor,
    check_finite,
    check_no_nan,
    check_not_empty,
    finite_number,
    fitting_labels,
    fitting_yes_or_no,
    log_inverse_error,
    require_choice,
    require_type,
    shaped_like,
    without_ignored,
)
from batchbayes._common.signatures import Count, checked
from batchbayes._common.tune import tune
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from batchbayes.methods.batchnorm.tune_batch_size import tune_batch_size as tune_batch_size
from batchbayes.metrics import mean_score
from batchbayes.metrics.regression import crps_of_mixture, log_density_of_mixture
from batchbayes.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive

Objective = Literal["log_likelihood", "crps"]
SetMethod = Literal["lac", "aps", "raps"]
RANK_PENALTY, FREE_RANKS = 0.01, 5
"""What "raps" adds to the score of each class beyond these ranks."""
ROUNDING = 1e-5
"""How far above its threshold an uncertainty must be for a flag: in nats, or as a share of a standard deviation."""


@overload
def tune_precision(predictive: GaussianPredictive, targets: Values, objective: Objective = ...) -> float: ...


@overload
def tune_precision(
    predictive: GaussianPredictive, targets: Values, objective: Objective = ..., *, per_output: Literal[True]
) -> tuple[float, ...]: ...


def tune_precision(
    predictive: GaussianPredictive,
    targets: Values,
    objective: Objective = "log_likelihood",
    *,
    per_output: bool = False,
) -> float | tuple[float, ...]:
    r"""Return the precision $\tau$ of the observation noise that gives held-out targets the best mean score.

    The score is that of the mixture of all draws with noise of variance $1/\tau$, so the spread of the draws is not
    counted twice. The search goes from $0.1 / e^2$ to $10^4 / e^2$, where $e^2$ is the mean squared error of the mean.
    If the draws explain all of the error, there is no best precision, and the result is the upper end.
    With `per_output`, outputs (N, D, ...) get D precisions, in the form that `gaussian` takes.

    >>> from batchbayes.likelihoods import gaussian
    >>> summary = gaussian(1.0).summary()
    >>> summary.add(torch.zeros(1, 4, 1))
    >>> held_out = summary.finish(draws=torch.zeros(1, 4, 1))
    >>> round(tune_precision(held_out, torch.tensor([2.0, -2.0, 2.0, -2.0])), 3)
    0.25
    """
    require_choice("an objective", objective, ("log_likelihood", "crps"))
    _require(predictive, GaussianPredictive, "gaussian(1.0)")
    if isinstance(predictive.likelihood, HeteroscedasticGaussian):
        fix = "use the variances that the network predicts, or conformal_intervals"
        raise BatchbayesError("a predictive of bb.gaussian(...), with one noise", f"{predictive.likelihood!r}", fix)
    draws, targets = predictive.draws.double(), shaped_like(targets, predictive.mean.shape).double()
    check_not_empty("targets", targets)
    check_finite("targets", targets)
    check_no_nan("the draws", draws)
    if not per_output:
        return _best_precision(draws, predictive.mean, targets, objective)
    if targets.ndim < 2:
        raise BatchbayesError(expected="outputs (N, D, ...)", got=f"{tuple(targets.shape)}", fix="drop per_output=")
    columns = zip(draws.unbind(2), predictive.mean.unbind(1), targets.unbind(1), strict=True)
    return tuple(_best_precision(*column, objective) for column in columns)


def _best_precision(draws: Tensor, mean: Tensor, targets: Tensor, objective: Objective) -> float:
    def cost(precision: float) -> float:
        tau = torch.tensor(precision, dtype=torch.float64)
        if objective == "crps":
            return float(crps_of_mixture(draws, tau, targets).mean())
        return -float(log_density_of_mixture(draws, tau, targets).mean())

    return search_precision(cost, float((mean - targets).square().mean()))


def search_precision(cost: Callable[[float], float], error: float) -> float:
    """Return the precision of lowest cost from 0.1 / `error` to 10,000 / `error`, a mean squared error."""
    middle = log_inverse_error(error)
    return tune(lambda u: cost(math.exp(u)), middle - math.log(10), middle + math.log(1e4)).value


def tune_temperature(predictive: CategoricalPredictive | BernoulliPredictive, labels: Values) -> float:
    r"""Return the temperature T with the best mean log probability of held-out labels.

    The score is the mean over examples of $\log \frac1S \sum_s \mathrm{softmax}(z_s / T)_y$ with logits $z_s$. With one
    draw this is temperature scaling (Guo et al., ICML 2017). With several, each draw is scaled before the average. Use
    the result as `categorical(temperature=T)` or `bernoulli(temperature=T)`. Labels of the likelihood's `ignore_index`
    do not count. The search goes from 1/20 to 20. An end of this range means that the network says nothing about these
    labels, or is never wrong.

    >>> summary = Categorical().summary()
    >>> logits = torch.tensor([[[0.0, 4.0]]]).expand(1, 4, 2)
    >>> summary.add(logits)
    >>> round(tune_temperature(summary.finish(draws=logits), torch.tensor([1, 1, 1, 0])), 3)  # 4 / ln 3
    3.641
    """
    _require(predictive, (CategoricalPredictive, BernoulliPredictive), "categorical()")
    given: Categorical | Bernoulli = predictive.likelihood
    draws = predictive.draws.double()
    targets = given.fitting(draws, labels)
    kept = given.counts(targets) if isinstance(given, Categorical) else torch.ones_like(targets, dtype=torch.bool)

    def cost(log_temperature: float) -> float:
        scores = replace(given, temperature=math.exp(log_temperature))(draws).log_prob(targets).logsumexp(0)
        return -mean_score(scores[kept]) + math.log(len(draws))

    return tune(cost, -math.log(20), math.log(20)).value


@checked
def agreement_temperature(predictive: CategoricalPredictive, *, average: Count = 1) -> float:
    r"""Return a temperature without labels: with it, the mean confidence is the share of pairs of draws that agree.

    The confidence is the largest of the mean probabilities $\frac1S \sum_s \mathrm{softmax}(z_s / T)$. Two draws agree
    on an example if they choose the same class. For networks from independent trainings the rate of agreement is about
    the accuracy (Jiang et al., ICLR 2022). For views of one network this is a rule of thumb that held on two public
    CIFAR-10 networks (docs/results/views.md). It does not hold for inputs unlike those of training.

    Args:
        predictive: of examples that need no labels, with two draws or more that were kept.
        average: that of `with_views(..., average=)`, if the temperature is for it. The predictive must come from the
            same views without averages.

    >>> logits = torch.tensor([0.0, math.log(25)]).expand(2, 4, 2).clone()
    >>> logits[0, 0] = logits[0, 0].flip(0)  # two draws that agree on three of four examples
    >>> summary = Categorical().summary()
    >>> summary.add(logits)
    >>> round(agreement_temperature(summary.finish(draws=logits)), 3)  # (5 / 6 + 5 / 6 + 5 / 6 + 1 / 2) / 4 = 3 / 4
    2.0
    """
    _require(predictive, CategoricalPredictive, "categorical()")
    untempered = replace(predictive.likelihood, temperature=1.0)
    logits = untempered.logits(predictive.draws.double())  # (S, N, ..., K)
    count = len(logits)
    if count < 2 or count % average:
        raise BatchbayesError(
            expected=f"two draws or more, and a multiple of average={average}",
            got=f"{count}",
            fix="predict with another num_samples",
        )
    votes = one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).double()  # (N, ..., K)
    agreement = float((votes * (votes - 1)).sum(-1).mean()) / (count * (count - 1))
    means = logits.unflatten(0, (-1, average)).mean(1)

    def gap(log_temperature: float) -> float:
        probs = (means / math.exp(log_temperature)).softmax(-1).mean(0)
        return abs(float(probs.amax(-1).mean()) - agreement)

    return tune(gap, -math.log(20), math.log(20)).value


@dataclass(frozen=True)
class ScoreCalibration:
    """A map from scores to probabilities that never falls: straight lines between points."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __call__(self, scores: Values) -> Tensor:
        """Return the probability of each score, in its shape."""
        given = as_tensor(scores, "scores")
        found = np.interp(given.double().numpy(), self.scores, self.probabilities)
        return torch.as_tensor(found).to(given.dtype if given.is_floating_point() else torch.float64)


@checked
def tune_scores(scores: Values, correct: Values, method: Literal["isotonic", "platt"] = "isotonic") -> ScoreCalibration:
    r"""Return the map from scores (n,) between 0 and 1 to the probability that they are right, by held-out examples.

    "isotonic" is the best map that never falls (neighbours are pooled while they would), with lines between the middles
    of its steps. "platt" is $\sigma(a \log\frac{s}{1 - s} + b)$, for few examples. Scores of boxes are the usual case:
    `metrics.is_true_detection` says which of them are right.
    References: Zadrozny & Elkan, KDD 2002; Platt, 1999.

    >>> tuned = tune_scores([0.1, 0.2, 0.8, 0.9], [False, True, False, True])
    >>> [round(value, 3) for value in tuned([0.1, 0.5, 0.9]).tolist()]
    [0.0, 0.5, 1.0]
    """
    given, right = scores.flatten().double(), correct.flatten().double()
    check_not_empty("scores", given)
    if given.shape != right.shape or not bool(((given >= 0) & (given <= 1)).all()):
        got = f"{len(given)} and {len(right)}, from {float(given.min()):.3g} to {float(given.max()):.3g}"
        raise BatchbayesError("as many scores from 0 to 1 as answers right or wrong", got, "check both")
    if method == "platt":
        return _platt(given, right)
    values, which, sizes = given.unique(return_inverse=True, return_counts=True)
    hits = torch.bincount(which, right, minlength=len(values))
    steps: list[list[float]] = []  # sum of scores, number of right ones, number of all
    for step in torch.stack([values * sizes, hits, sizes], 1).tolist():
        steps.append(step)
        while len(steps) > 1 and steps[-2][1] * steps[-1][2] >= steps[-1][1] * steps[-2][2]:
            last = steps.pop()
            steps[-1] = [a + b for a, b in zip(steps[-1], last, strict=True)]
    return ScoreCalibration(tuple(s / n for s, _, n in steps), tuple(h / n for _, h, n in steps))


def _platt(scores: Tensor, right: Tensor) -> ScoreCalibration:
    """Fit slope and offset by Newton's method, with Platt's soft targets, which keep both finite."""
    hits = right.sum()
    wanted = torch.where(right > 0, (hits + 1) / (hits + 2), 1 / (len(right) - hits + 2))
    columns = torch.stack([torch.logit(scores, 1e-6), torch.ones_like(scores)], 1)
    weights = torch.zeros(2, dtype=torch.float64)
    for _ in range(100):
        probs = (columns @ weights).sigmoid()
        curvature = (columns.T * (probs * (1 - probs))) @ columns + 1e-9 * torch.eye(2, dtype=torch.float64)
        weights = weights + torch.linalg.solve(curvature, columns.T @ (wanted - probs)).clamp(-1, 1)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    probs = (torch.logit(grid, 1e-6) * weights[0].clamp_min(0) + weights[1]).sigmoid()
    return ScoreCalibration(tuple(grid.tolist()), tuple(probs.tolist()))


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals mean ± width * std that contain a new target with probability `level`, even if the model is wrong."""

    level: float
    width: float

    def __call__(self, predictive: GaussianPredictive) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends, in the shape of the predictive's mean."""
        return self.ends(predictive.mean, predictive.std)

    def ends(self, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends, from the means and the predicted standard deviations."""
        return interval_ends(middle, self.width * spread)


def interval_ends(middle: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals, rounded outwards by a few units of the last digit.

    Counts and other rounded targets are often exactly as far away as a held-out one. They are inside.
    """
    half = half + 4 * torch.finfo(middle.dtype).eps * (middle.abs() + half)
    return (middle - half).to(middle.dtype), (middle + half).to(middle.dtype)


def flag_limits(threshold: float | Sequence[float], *, in_nats: bool) -> Tensor:
    """Return the uncertainties above which an input is flagged: the threshold of each output and a little more.

    An assessment sets the threshold to the uncertainty of a row, and a file rounds otherwise than Python.
    """
    each = torch.as_tensor(threshold, dtype=torch.float64).reshape(-1)
    return each + ROUNDING * (torch.ones_like(each) if in_nats else each.abs())


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that hold the truth with probability `level`."""

    level: float
    threshold: float
    """By "lac" the least probability of a class in a set, else the largest score."""
    method: SetMethod = "lac"

    def __call__(self, predictive: CategoricalPredictive | BernoulliPredictive) -> Tensor:
        """Return whether each class is in the set, bool (N, ..., K), where K is 2 for no and yes.

        By "lac" a set is empty if no class is probable enough. Others hold the most probable class.
        """
        probs = _class_probs(predictive)
        if self.method == "lac":
            return probs >= self.threshold
        return (set_scores(probs, self.method) <= self.threshold) | (probs == probs.amax(-1, keepdim=True))


def set_scores(probs: Tensor, method: SetMethod) -> Tensor:
    """Return a score of each class, in the shape of probabilities (N, ..., K). Classes of low scores come first.

    >>> set_scores(torch.tensor([[0.25, 0.75]]), "lac"), set_scores(torch.tensor([[0.25, 0.75]]), "aps")
    (tensor([[-0.2500, -0.7500]]), tensor([[0.8750, 0.3750]]))
    """
    if method == "lac":
        return -probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    each = ordered.cumsum(-1) - ordered / 2
    if method == "raps":
        each = each + RANK_PENALTY * (torch.arange(probs.shape[-1]) + 1 - FREE_RANKS).clamp_min(0)
    return torch.empty_like(probs).scatter_(-1, order, each)


def _class_probs(predictive: CategoricalPredictive | BernoulliPredictive) -> Tensor:
    is_binary = isinstance(predictive, BernoulliPredictive)
    return (predictive.class_log_probs if is_binary else predictive.log_probs).exp()


def conformal_intervals(predictive: GaussianPredictive, targets: Values, level: float = 0.9) -> ConformalIntervals:
    """Return split-conformal intervals: a quantile of |error| / std on held-out examples scales the predicted std.

    The level holds on average over held-out and new examples that are exchangeable. It does not hold for each input.
    Several outputs share one width, so it holds on average over them. The width is infinite if there are too few
    examples for the level.
    Reference: Lei et al., JASA 113 (2018).
    """
    _require(predictive, GaussianPredictive, "gaussian(1.0)")
    errors = shaped_like(targets, predictive.mean.shape).double() - predictive.mean.double()
    scores = errors.abs() / predictive.std.double()
    return ConformalIntervals(level, conformal_quantile(scores, level))


@checked
def conformal_sets(
    predictive: CategoricalPredictive | BernoulliPredictive,
    labels: Values,
    level: float = 0.9,
    *,
    method: SetMethod = "lac",
) -> ConformalSets:
    """Return split-conformal sets: a quantile of the score of the true class on held-out examples limits them.

    The level holds on average over held-out and new examples that are exchangeable, and over the pixels or labels of an
    example if it has several. It does not hold for each class.

    Args:
        predictive: of held-out examples.
        labels: their classes.
        level: the share of sets that hold the truth.
        method: "lac" takes all classes above a probability. These sets are the smallest on average, and some may be
            empty. "aps" adds classes from the most probable one on, up to a share of the probability, so that no set is
            empty and hard examples get larger sets. "raps" does so with a price on each class beyond the fifth.

    References: Sadinle, Lei & Wasserman, JASA 114 (2019); Romano, Sesia & Candès, NeurIPS 2020, where we differ: the
    middle of the share of a class replaces a random one; Angelopoulos, Bates, Malik & Jordan, ICLR 2021.
    """
    _require(predictive, (CategoricalPredictive, BernoulliPredictive), "categorical()")
    scores = set_scores(_class_probs(predictive), method)
    if isinstance(predictive, BernoulliPredictive):
        classes = fitting_yes_or_no(labels, scores.shape[:-1]).long()
    else:
        scores, labels = without_ignored(scores, labels, getattr(predictive.likelihood, "ignore_index", None))
        classes = fitting_labels(labels, scores.shape[:-1], scores.shape[-1])
    limit = conformal_quantile(scores.gather(-1, classes[..., None]), level)
    return ConformalSets(level, max(0.0, -limit) if method == "lac" else limit, method)


def conformal_quantile(scores: Tensor, level: float) -> float:
    r"""Return the $\lceil (n+1) \, level \rceil$-th smallest of n scores, infinity if n is too small for the level.

    >>> conformal_quantile(torch.arange(1.0, 10.0), 0.9), conformal_quantile(torch.ones(3), 0.9)
    (9.0, inf)
    """
    if type(level) not in (int, float) or level != 1:
        finite_number("a level", level, above=0, below=1, fix="pass 0.9 for 90 %")
    check_not_empty("the held-out examples", scores)
    check_finite("the scores of the held-out examples", scores)
    ordered = scores.flatten().double().sort().values
    rank = max(1, math.ceil((len(ordered) + 1) * level - 1e-9))
    return float(ordered[rank - 1]) if rank <= len(ordered) else float("inf")


def _require(predictive: object, kind: type | tuple[type, ...], likelihood: str) -> None:
    require_type(
        predictive,
        kind,
        expected=f"what predict(posterior, data, bb.{likelihood}) returns",
        fix="pass that predictive, not the outputs of the network",
    )
