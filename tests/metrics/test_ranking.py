"""Ranking summaries against scikit-learn, torchmetrics, scipy and naive loops, with and without ties."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from batchbayes import metrics

SUMMARIES = (
    metrics.area_under_roc,
    metrics.average_precision,
    metrics.false_positive_rate_at_recall,
    metrics.area_under_risk_coverage,
    metrics.risk_coverage,
)


def data(ties: bool, num_examples: int = 400):
    generator = torch.Generator().manual_seed(7)
    positive = torch.rand(num_examples, generator=generator) < 0.3
    score = torch.randn(num_examples, generator=generator, dtype=torch.float64) + 0.8 * positive
    return (score.mul(2).round() / 2 if ties else score), positive


def naive_false_positive_rate(score, positive, recall):
    false, true, _ = roc_curve(positive, score, drop_intermediate=False)
    return false[true >= recall].min()


def naive_area_under_risk_coverage(score, wrong):
    """In the order of the scores, which must differ."""
    order = np.argsort(score)
    risks = [np.mean([wrong[i] for i in order[:kept]]) for kept in range(1, len(order) + 1)]
    return float(np.mean(risks))


@pytest.mark.parametrize("ties", [False, True])
def test_ranking_against_scikit_learn_and_torchmetrics(ties):
    score, positive = data(ties)
    assert len(metrics.count_by_score(score, positive).scores) < 20 or not ties
    auroc, precision = metrics.area_under_roc(score, positive), metrics.average_precision(score, positive)
    assert auroc == pytest.approx(roc_auc_score(positive, score), abs=1e-9)
    assert precision == pytest.approx(average_precision_score(positive, score), abs=1e-9)
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, which may merge some, and computes in float32.
    squashed, label = score.sigmoid(), positive.long()
    assert auroc == pytest.approx(float(binary_auroc(squashed, label)), abs=1e-6)
    assert precision == pytest.approx(float(binary_average_precision(squashed, label)), abs=1e-6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("recall", [0.5, 0.95, 1.0])
def test_false_positive_rate_at_recall(ties, recall):
    score, positive = data(ties)
    ours = metrics.false_positive_rate_at_recall(score, positive, recall)
    assert ours == pytest.approx(naive_false_positive_rate(score, positive, recall), abs=1e-12)


def test_a_recall_of_95_percent_is_reached_by_19_of_20():
    score = torch.cat([torch.arange(20.0), torch.tensor([0.5, 3.5])])
    positive = torch.arange(22) < 20
    assert metrics.false_positive_rate_at_recall(score, positive) == 0.5


def test_area_under_risk_coverage_without_ties():
    score, wrong = data(ties=False)
    ours = metrics.area_under_risk_coverage(score, wrong)
    assert ours == pytest.approx(naive_area_under_risk_coverage(score.numpy(), wrong.numpy()), abs=1e-9)


def test_risk_coverage_curve():
    score, wrong = data(ties=True)
    curve = metrics.risk_coverage(score, wrong)
    for threshold, coverage, risk in zip(curve.thresholds, curve.coverage, curve.risk, strict=True):
        kept = score <= threshold
        assert float(coverage) == pytest.approx(float(kept.double().mean()), abs=1e-12)
        assert float(risk) == pytest.approx(float(wrong[kept].double().mean()), abs=1e-12)
    assert curve.coverage[-1] == 1


few_examples = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(few_examples)
def test_area_under_risk_coverage_is_the_mean_over_all_orders_of_tied_examples(examples):
    areas = []
    for order in itertools.permutations(examples):
        ordered = sorted(order, key=lambda example: example[0])
        wrong = np.cumsum([example[1] for example in ordered])
        areas.append(np.mean(wrong / np.arange(1, len(ordered) + 1)))
    score, wrong = (torch.tensor(column) for column in zip(*examples, strict=True))
    ours = metrics.area_under_risk_coverage(score.double(), wrong)
    assert ours == pytest.approx(float(np.mean(areas)), abs=1e-12)


many_examples = st.lists(
    st.tuples(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1e-300, 1.0, math.inf]), st.booleans()),
    min_size=1,
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(many_examples)
def test_ties_and_odd_scores_are_the_double_loop(examples):
    score = torch.tensor([example[0] for example in examples], dtype=torch.float64)
    positive = torch.tensor([example[1] for example in examples])
    counts = metrics.count_by_score(score, positive)
    if all(positive) or not any(positive):
        for summary in SUMMARIES[:3]:
            with pytest.raises(ValueError, match="one class only"):
                summary(score, positive)
        assert metrics.area_under_risk_coverage(score, positive) == pytest.approx(float(positive[0]), abs=1e-12)
        return
    pairs = [(a > b) + 0.5 * (a == b) for a, good in examples if good for b, also_good in examples if not also_good]
    assert metrics.area_under_roc(score, positive) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    good = [a for a, is_good in examples if is_good]
    precision = [sum(b >= a for b in good) / sum(b >= a for b, _ in examples) for a in good]
    assert metrics.average_precision(score, positive) == pytest.approx(sum(precision) / len(good), abs=1e-12)
    assert int(counts.positives.sum() + counts.negatives.sum()) == len(examples)
    assert len(counts.scores) == len({value for value, _ in examples})


def test_all_equal_scores_carry_no_information():
    positive = torch.tensor([True, False, False, False])
    score = torch.full((4,), 0.3)
    assert metrics.area_under_roc(score, positive) == 0.5
    assert metrics.average_precision(score, positive) == 0.25
    assert metrics.false_positive_rate_at_recall(score, positive) == 1
    assert metrics.area_under_risk_coverage(score, positive) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(
    ("score", "positive", "message"),
    [
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool), "at least one example"),
        (torch.tensor([math.nan]), torch.tensor([True]), "NaN"),
        (torch.zeros(2), torch.tensor([[True, False]]), "never broadcast"),
        (torch.zeros(1), torch.tensor([1]), "torch.bool; got torch.int64.* == 1"),
        (torch.tensor([1]), torch.zeros(1), "torch.bool; got torch.float32.*pass scores first"),
    ],
)
@pytest.mark.parametrize("summary", SUMMARIES)
def test_bad_scores_are_refused(summary, score, positive, message):
    with pytest.raises(ValueError, match=message):
        summary(score, positive)


def test_values_of_scikit_learn():
    """By `roc_auc_score`, `average_precision_score` and `roc_curve` of scikit-learn 1.9, for scores with ties."""
    score, positive = [0.1, 0.4, 0.35, 0.8, 0.4, 0.9, 0.2], [False, False, True, True, True, False, False]
    assert metrics.area_under_roc(score, positive) == pytest.approx(0.625, abs=1e-15)
    assert metrics.average_precision(score, positive) == pytest.approx(8 / 15, abs=1e-15)
    assert metrics.false_positive_rate_at_recall(score, positive) == 0.5
    assert metrics.false_positive_rate_at_recall(score, positive, recall=np.float32(0.3)) == 0.25


def test_a_recall_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="recall above 0"):
        metrics.false_positive_rate_at_recall(*data(ties=True), recall=95)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation(ties):
    score, positive = data(ties)
    other = score.square() + positive
    ours = metrics.rank_correlation(score, other)
    assert ours == pytest.approx(scipy.stats.spearmanr(score, other).statistic, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
def test_rank_correlation_with_many_ties(pairs):
    first, second = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
    assume(len(set(first.tolist())) > 1 and len(set(second.tolist())) > 1)
    expected = scipy.stats.spearmanr(first, second).statistic
    assert metrics.rank_correlation(first, second) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0]])
def test_a_constant_has_no_rank_correlation(values):
    constant = torch.tensor(values)
    with pytest.raises(ValueError, match="no ranking"):
        metrics.rank_correlation(torch.arange(float(len(values))), constant)
