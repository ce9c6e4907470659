"""How well a score ranks examples: positives above negatives, wrong answers above right ones.

Positive examples are those that should have a high score. For an uncertainty they are the examples out of
distribution, or the wrong answers. Equal scores are treated exactly: as the mean over all orders of the tied examples,
or as one step. Infinite scores are allowed.

The summaries need only the numbers of positives and negatives at each distinct score. `ScoreCounts` holds these, for
several summaries of the same examples, and for data that comes in pieces.
"""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from batchbayes._common.checks import Values, check_bool, check_no_nan, check_not_empty, check_same_shape
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Risk and coverage if scores up to a threshold are kept, the lowest threshold first. All are (G,)."""

    thresholds: Tensor
    coverage: Tensor
    risk: Tensor


@dataclass(frozen=True, eq=False)
class ScoreCounts:
    """Numbers of positives and negatives at each of G distinct scores, the highest score first. All are (G,).

    Its methods return what the functions of the same names return for the examples that were counted.
    """

    scores: Tensor
    positives: Tensor
    negatives: Tensor

    def area_under_roc(self) -> float:
        """Return the area under the ROC curve (AUROC)."""
        positives, negatives = both_classes(self)
        negatives_below = negatives.sum() - negatives.cumsum(0)
        won = (positives * (negatives_below + 0.5 * negatives)).sum()
        return float(won / (positives.sum() * negatives.sum()))

    def average_precision(self) -> float:
        """Return the area under the precision-recall curve (AUPR)."""
        positives, negatives = both_classes(self)
        true_positives = positives.cumsum(0)
        precision = true_positives / (true_positives + negatives.cumsum(0))
        return float((positives * precision).sum() / positives.sum())

    def false_positive_rate_at_recall(self, recall: float = 0.95) -> float:
        """Return the share of negatives that are found together with a given share of the positives (FPR95)."""
        if not isinstance(recall, Real) or not 0 < recall <= 1:
            raise BatchbayesError(
                expected="recall above 0 and at most 1", got=f"{recall}", fix="use 0.95, the usual choice"
            )
        positives, negatives = both_classes(self)
        reached = positives.cumsum(0) / positives.sum() >= float(recall)
        first = int(reached.int().argmax())
        return float(negatives.cumsum(0)[first] / negatives.sum())

    def risk_coverage(self) -> RiskCoverage:
        """Return the curve of risk and coverage, where positive means wrong."""
        sizes, errors = _kept_first(self)
        kept = sizes.cumsum(0)
        return RiskCoverage(self.scores.flip(0), kept / kept[-1], errors.cumsum(0) / kept)

    def area_under_risk_coverage(self) -> float:
        """Return the area under the curve of risk and coverage (AURC), where positive means wrong."""
        sizes, errors = _kept_first(self)
        before, errors_before = sizes.cumsum(0) - sizes, errors.cumsum(0) - errors
        harmonic = torch.digamma(before + sizes + 1) - torch.digamma(before + 1)
        summed = errors + (errors_before - before * errors / sizes) * harmonic
        return float(summed.sum() / sizes.sum())


@checked
def count_by_score(scores: Values, positive: Values) -> ScoreCounts:
    """Count positives and negatives at each distinct score, for several summaries of the same examples.

    Shapes: scores (N, ...), positive bool (N, ...) -> (G,).

    >>> counts = count_by_score(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    >>> counts.positives.tolist(), counts.negatives.tolist()
    ([1, 0], [1, 1])
    """
    check_bool("positive", positive, "scores", scores)
    check_not_empty("scores", scores)
    check_no_nan("scores", scores)
    values, inverse, sizes = _groups(scores)
    positives = torch.bincount(inverse[positive.flatten()], minlength=len(values))
    return ScoreCounts(values.flip(0), positives.flip(0), (sizes - positives).flip(0))


@checked
def area_under_roc(scores: Values, positive: Values) -> float:
    r"""Return the probability that a positive scores above a negative, $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$ (AUROC).

    Shapes: scores (N, ...), positive bool (N, ...) -> number. Reference: Hanley & McNeil, Radiology 143 (1982).

    >>> area_under_roc(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    0.75
    """
    return count_by_score(scores, positive).area_under_roc()


@checked
def ood_auroc(familiar: Values, strange: Values) -> float:
    """Return how often a strange input scores higher than a familiar one: 0.5 is guessing, 1 is perfect.

    Shapes: (N, ...), (M, ...) -> number.

    >>> ood_auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.3]))
    0.75
    """
    both = torch.cat([familiar.flatten(), strange.flatten()])
    return area_under_roc(both, torch.arange(len(both), device=both.device) >= familiar.numel())


@checked
def average_precision(scores: Values, positive: Values) -> float:
    r"""Return the area under the precision-recall curve (AUPR) as a sum of steps, $\sum_g (R_g - R_{g-1}) P_g$.

    Straight lines between the points would be too optimistic. A score without information gets the share of positives,
    not 1/2. Shapes: scores (N, ...), positive bool (N, ...) -> number. Reference: Davis & Goadrich, ICML 2006.

    >>> average_precision(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    0.5
    """
    return count_by_score(scores, positive).average_precision()


@checked
def false_positive_rate_at_recall(scores: Values, positive: Values, recall: float = 0.95) -> float:
    r"""Return the share of negatives that are found together with a given share of the positives (FPR95).

    It is $P(s_- \geq t)$ for the highest threshold t with $P(s_+ \geq t) \geq recall$.
    Shapes: scores (N, ...), positive bool (N, ...) -> number. Reference: Liang, Li & Srikant, ICLR 2018.

    >>> false_positive_rate_at_recall(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([False, True, False]))
    0.5
    """
    return count_by_score(scores, positive).false_positive_rate_at_recall(recall)


@checked
def risk_coverage(scores: Values, wrong: Values) -> RiskCoverage:
    r"""Return the error rate among the kept examples and the share of kept examples, for each threshold.

    An example is kept if its score, an uncertainty, is at most the threshold. At threshold t the coverage is
    $P(s \leq t)$ and the risk is $P(wrong \mid s \leq t)$. The curve has one point for each distinct score.
    Shapes: scores (N, ...), wrong bool (N, ...) -> curve (G,). Reference: El-Yaniv & Wiener, JMLR 11 (2010).

    >>> curve = risk_coverage(torch.tensor([0.2, 0.9]), torch.tensor([False, True]))
    >>> curve.coverage.tolist(), curve.risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    check_bool("wrong", wrong, "scores", scores)
    return count_by_score(scores, wrong).risk_coverage()


@checked
def area_under_risk_coverage(scores: Values, wrong: Values) -> float:
    r"""Return the mean error rate over all numbers of kept examples (AURC), $\frac1N \sum_{k=1}^N risk(k)$.

    Lower is better. For equal scores it is the mean over all orders. Consider a group of n examples with e errors that
    comes after B examples with E errors. The expected risk at B + j is $(E + j e/n) / (B + j)$. The sum of these is
    $e + (E - B e/n) (H_{B+n} - H_B)$ with harmonic numbers H. Shapes: scores (N, ...), wrong bool (N, ...) -> number.
    Reference: Geifman, Uziel & El-Yaniv, ICLR 2019.

    >>> area_under_risk_coverage(torch.tensor([0.2, 0.9]), torch.tensor([False, True]))
    0.25
    """
    check_bool("wrong", wrong, "scores", scores)
    return count_by_score(scores, wrong).area_under_risk_coverage()


@checked
def rank_correlation(first: Values, second: Values) -> float:
    r"""Return Spearman's $\rho$, the correlation of the ranks. Equal values share their mean rank.

    Use it for predicted standard deviations and absolute errors, for example. Shapes: (N, ...), (N, ...) -> number.
    Reference: Spearman, American Journal of Psychology 15 (1904).

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 2.0, 9.0]), torch.tensor([0.0, 0.5, 0.7, 0.6])), 6)
    0.632456
    """
    check_same_shape("second", second, "first", first)
    for name, tensor in (("first", first), ("second", second)):
        check_no_nan(name, tensor)
        if tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
            raise BatchbayesError(
                expected=f"at least two different values in {name}",
                got="one value",
                fix="report no correlation, because a constant has no ranking",
            )
    first_rank, second_rank = _centred_ranks(first), _centred_ranks(second)
    scale = (first_rank.square().sum() * second_rank.square().sum()).sqrt()
    return float(((first_rank * second_rank).sum() / scale).clamp(-1, 1))


def _groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct values in rising order, the index of the value of each example, and the group sizes."""
    return torch.unique(values.double().flatten(), return_inverse=True, return_counts=True)


def _centred_ranks(values: Tensor) -> Tensor:
    _, inverse, sizes = _groups(values)
    mean_rank = sizes.cumsum(0) - 0.5 * (sizes.double() - 1)
    return (mean_rank - 0.5 * (len(inverse) + 1))[inverse]


def both_classes(counts: ScoreCounts) -> tuple[Tensor, Tensor]:
    """Return positives and negatives in float64. Raise an error if one of the two is missing."""
    positives, negatives = counts.positives.double(), counts.negatives.double()
    if not (positives.sum() > 0 and negatives.sum() > 0):
        raise BatchbayesError(
            expected="positives and negatives",
            got=f"{int(positives.sum())} positives and {int(negatives.sum())} negatives",
            fix="report no number, because with one class only there is nothing to rank",
        )
    return positives, negatives


def _kept_first(counts: ScoreCounts) -> tuple[Tensor, Tensor]:
    """Return sizes and numbers of errors of the groups of equal uncertainty, the most certain first."""
    if counts.scores.numel() == 0:
        raise BatchbayesError(expected="at least one example in the counts", got="none", fix="add examples first")
    errors = counts.positives.double().flip(0)
    return errors + counts.negatives.double().flip(0), errors
