"""How well a score ranks: positives above negatives, errors among the uncertain, one quantity with another.

All of it depends on the examples only through the counts of positives and negatives at each distinct score,
so those are counted once. Equal scores are treated exactly, as the mean over all orders of the tied examples
or as one step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes._common.checks import check_bool, check_no_nan, check_not_empty, check_same_shape, refuse


@dataclass(frozen=True, eq=False)
class ScoreCounts:
    """Positives and negatives at each of G distinct scores, the highest score first. All of shape (G,)."""

    scores: Tensor
    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Risk and coverage when scores up to a threshold are kept. All of shape (G,), lowest threshold first."""

    thresholds: Tensor
    coverage: Tensor
    risk: Tensor


def count_by_score(score: Tensor, positive: Tensor) -> ScoreCounts:
    """Count positives and negatives at each distinct score, for the summaries below.

    Positive is what a high score should find: with an uncertainty as score, the examples out of distribution,
    or the wrong answers. Infinite scores are allowed. Shapes: score (N, ...), positive bool (N, ...) -> (G,).

    >>> counts = count_by_score(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False]))
    >>> counts.positives.tolist(), counts.negatives.tolist()
    ([1, 0], [1, 1])
    """
    check_same_shape("positive", positive, "score", score)
    check_bool("positive", positive)
    check_not_empty("score", score)
    check_no_nan("score", score)
    values, inverse, sizes = _groups(score)
    positives = torch.bincount(inverse[positive.flatten()], minlength=len(values))
    return ScoreCounts(values.flip(0), positives.flip(0), (sizes - positives).flip(0))


def area_under_roc(counts: ScoreCounts) -> float:
    r"""Probability that a positive scores above a negative, :math:`P(s_+ > s_-) + \tfrac12 P(s_+ = s_-)`.

    Shapes: counts (G,) -> number. Reference: Hanley & McNeil, Radiology 143 (1982).

    >>> area_under_roc(count_by_score(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False])))
    0.75
    """
    positives, negatives = both_classes(counts)
    negatives_below = negatives.sum() - negatives.cumsum(0)
    won = (positives * (negatives_below + 0.5 * negatives)).sum()
    return float(won / (positives.sum() * negatives.sum()))


def average_precision(counts: ScoreCounts) -> float:
    r"""Area under the precision-recall curve (AUPR) as a sum of steps, :math:`\sum_g (R_g - R_{g-1}) P_g`.

    Steps are not joined by straight lines, which would be too optimistic. A score without information gets
    the share of positives, not 1/2. Shapes: counts (G,) -> number. Reference: Davis & Goadrich, ICML 2006.

    >>> average_precision(count_by_score(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, False, False])))
    0.5
    """
    positives, negatives = both_classes(counts)
    true_positives = positives.cumsum(0)
    precision = true_positives / (true_positives + negatives.cumsum(0))
    return float((positives * precision).sum() / positives.sum())


def false_positive_rate_at_recall(counts: ScoreCounts, recall: float = 0.95) -> float:
    r"""Share of negatives above the highest threshold that finds a given share of the positives (FPR95).

    Shapes: counts (G,) -> number. Reference: Liang, Li & Srikant, ICLR 2018.

    >>> counts = count_by_score(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([False, True, False]))
    >>> false_positive_rate_at_recall(counts)
    0.5
    """
    if not 0 < recall <= 1:
        refuse("recall above 0 and up to 1", f"{recall}", "0.95 is the usual choice.")
    positives, negatives = both_classes(counts)
    reached = positives.cumsum(0) / positives.sum() >= recall
    first = int(reached.int().argmax())
    return float(negatives.cumsum(0)[first] / negatives.sum())


def risk_coverage(counts: ScoreCounts) -> RiskCoverage:
    r"""Error rate among the kept examples against the share kept, as a threshold on the uncertainty rises.

    Here the score is an uncertainty and positive means wrong. Equal scores are kept together, so the curve
    has one point a distinct score. Shapes: counts (G,) -> curve (G,). Reference: El-Yaniv & Wiener, JMLR 11
    (2010).

    >>> curve = risk_coverage(count_by_score(torch.tensor([0.2, 0.9]), torch.tensor([False, True])))
    >>> curve.coverage.tolist(), curve.risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    sizes, errors = _kept_first(counts)
    kept = sizes.cumsum(0)
    return RiskCoverage(counts.scores.flip(0), kept / kept[-1], errors.cumsum(0) / kept)


def area_under_risk_coverage(counts: ScoreCounts) -> float:
    r"""Mean error rate over all numbers of kept examples (AURC), :math:`\tfrac1N \sum_{k=1}^N risk(k)`.

    Lower is better. Among equal scores it is the mean over all orders: in a group of n examples with e
    errors, after B examples with E errors, the expected risk at B + j is :math:`(E + j e/n) / (B + j)`, and
    these sum to :math:`e + (E - B e/n) (H_{B+n} - H_B)` with harmonic numbers H. Shapes: counts (G,) ->
    number. Reference: Geifman, Uziel & El-Yaniv, ICLR 2019.

    >>> area_under_risk_coverage(count_by_score(torch.tensor([0.2, 0.9]), torch.tensor([False, True])))
    0.25
    """
    sizes, errors = _kept_first(counts)
    before, errors_before = sizes.cumsum(0) - sizes, errors.cumsum(0) - errors
    harmonic = torch.digamma(before + sizes + 1) - torch.digamma(before + 1)
    summed = errors + (errors_before - before * errors / sizes) * harmonic
    return float(summed.sum() / sizes.sum())


def rank_correlation(first: Tensor, second: Tensor) -> float:
    r"""Spearman's :math:`\rho`: the correlation of the ranks, where equal values share their mean rank.

    For uncertainty: first = predicted std, second = absolute error. Shapes: (N, ...), (N, ...) -> number.
    Reference: Spearman, American Journal of Psychology 15 (1904).

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 2.0, 9.0]), torch.tensor([0.0, 0.5, 0.7, 0.6])), 6)
    0.632456
    """
    check_same_shape("second", second, "first", first)
    for name, tensor in (("first", first), ("second", second)):
        check_no_nan(name, tensor)
        if tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
            refuse(
                f"two different values or more in {name}",
                "one value",
                "A constant has no ranking: report none.",
            )
    first_rank, second_rank = _centred_ranks(first), _centred_ranks(second)
    scale = (first_rank.square().sum() * second_rank.square().sum()).sqrt()
    return float(((first_rank * second_rank).sum() / scale).clamp(-1, 1))


def _groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct values from low to high, which of them each example has, and how many have it."""
    return torch.unique(values.double().flatten(), return_inverse=True, return_counts=True)


def _centred_ranks(values: Tensor) -> Tensor:
    _, inverse, sizes = _groups(values)
    mean_rank = sizes.cumsum(0) - 0.5 * (sizes.double() - 1)
    return (mean_rank - 0.5 * (len(inverse) + 1))[inverse]


def both_classes(counts: ScoreCounts) -> tuple[Tensor, Tensor]:
    """Positives and negatives as float64, or a refusal if one of the two is missing."""
    positives, negatives = counts.positives.double(), counts.negatives.double()
    if not (positives.sum() > 0 and negatives.sum() > 0):
        refuse(
            "positives and negatives",
            f"{int(positives.sum())} positives and {int(negatives.sum())} negatives",
            "With one class only there is nothing to rank: report none.",
        )
    return positives, negatives


def _kept_first(counts: ScoreCounts) -> tuple[Tensor, Tensor]:
    """Sizes and errors of the groups of equal uncertainty, the most certain first."""
    if counts.scores.numel() == 0:
        refuse("at least one example", "none", "Add examples before asking for the risk.")
    errors = counts.positives.double().flip(0)
    return errors + counts.negatives.double().flip(0), errors
