"""Accuracy and calibration against torchmetrics, scikit-learn and naive loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from batchbayes import metrics, scores


def forecasts(num_examples: int = 500, num_classes: int = 4):
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(num_examples, num_classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(num_classes, (num_examples,), generator=generator)


def confidences(probs, labels):
    return scores.max_probability(probs), ~scores.is_misclassified(probs, labels)


def naive_equal_width_error(probs, labels, num_bins):
    """Loop over the bins, and over the examples in each."""
    answers = [(max(row), row.index(max(row)) == label) for row, label in zip(probs, labels, strict=True)]
    gap = 0.0
    for b in range(num_bins):
        inside = [answer for answer in answers if b / num_bins < answer[0] <= (b + 1) / num_bins]
        gap += abs(sum(confidence - correct for confidence, correct in inside))
    return gap / len(labels)


def naive_equal_mass_error(confidence, correct, num_bins):
    """Sort and cut; only for confidences without ties."""
    order = np.argsort(confidence)
    bins = np.array_split(order, num_bins)
    gaps = [len(b) * abs(correct[b].mean() - confidence[b].mean()) for b in bins if len(b)]
    return sum(gaps) / len(order)


def test_accuracy_and_negative_log_likelihood():
    probs, labels = forecasts()
    assert metrics.accuracy(probs, labels) == pytest.approx(accuracy_score(labels, probs.argmax(-1)), abs=1e-12)
    ours = metrics.negative_log_likelihood(scores.categorical_log_likelihood(probs.log(), labels))
    assert ours == pytest.approx(log_loss(labels.numpy(), probs.numpy()), abs=1e-9)


def test_a_truth_of_probability_zero_makes_the_loss_infinite():
    assert metrics.negative_log_likelihood(torch.tensor([-1.0, -math.inf])) == math.inf
    assert str(metrics.negative_log_likelihood(torch.zeros(2))) == "0.0"


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_equal_width_error(num_bins):
    probs, labels = forecasts()
    ours = metrics.expected_calibration_error(probs, labels, num_bins)
    expected = multiclass_calibration_error(probs, labels, probs.shape[-1], n_bins=num_bins, norm="l1")
    assert ours == pytest.approx(float(expected), abs=1e-6)
    assert ours == pytest.approx(naive_equal_width_error(probs.tolist(), labels.tolist(), num_bins), abs=1e-12)
    bins = metrics.equal_width_reliability(*confidences(probs, labels), num_bins=num_bins)
    assert bins.expected_calibration_error() == ours


def test_ignored_labels_do_not_count_in_the_equal_width_error():
    probs, labels = forecasts()
    whole = metrics.expected_calibration_error(probs[:400], labels[:400])
    labels[400:] = 255
    pixels = probs.view(25, 20, 4), labels.view(25, 20)
    assert metrics.expected_calibration_error(*pixels, ignore_index=255) == pytest.approx(whole, abs=1e-12)
    arrays = probs[:400].numpy(), labels[:400].tolist()
    assert metrics.expected_calibration_error(*arrays) == pytest.approx(whole, abs=1e-12)


def test_equal_width_bins_hold_their_upper_edge_and_zero():
    confidence = torch.tensor([0.0, 0.25, 0.26, 0.5, 1.0], dtype=torch.float64)
    bins = metrics.equal_width_reliability(confidence, torch.ones(5, dtype=torch.bool), num_bins=4)
    assert bins.counts.tolist() == [2, 2, 0, 1]
    assert bins.confidence_sums.tolist() == pytest.approx([0.25, 0.76, 0, 1])
    assert bins.accuracy[:2].tolist() == [1, 1]
    assert bins.mean_confidence[1].item() == pytest.approx(0.38)
    assert math.isnan(bins.accuracy[2])


@pytest.mark.parametrize("num_bins", [1, 7, 15, 501])
def test_equal_mass_error(num_bins):
    probs, labels = forecasts()
    confidence, correct = confidences(probs, labels)
    ours = metrics.equal_mass_reliability(confidence, correct, num_bins)
    expected = naive_equal_mass_error(confidence.numpy(), correct.double().numpy(), num_bins)
    assert ours.expected_calibration_error() == pytest.approx(expected, abs=1e-9)
    assert ours.counts.tolist() == pytest.approx([len(part) for part in np.array_split(np.arange(500), num_bins)])


def test_classwise_error():
    probs, labels = forecasts()
    ours = metrics.classwise_calibration_error(probs, labels)
    columns = probs.T.contiguous()
    each = [binary_calibration_error(column, (labels == k).long(), n_bins=15) for k, column in enumerate(columns)]
    assert ours == pytest.approx(float(sum(each) / 4), abs=1e-6)


tied_examples = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=80, deadline=None)
@given(tied_examples, st.integers(1, 6), st.randoms(use_true_random=False))
def test_equal_mass_with_ties_does_not_depend_on_the_order(examples, num_bins, random):
    def bins(rows):
        confidence = torch.tensor([row[0] for row in rows], dtype=torch.float64)
        return metrics.equal_mass_reliability(confidence, torch.tensor([row[1] for row in rows]), num_bins)

    first = bins(examples)
    shuffled = bins(random.sample(examples, len(examples)))
    torch.testing.assert_close(first.correct_sums, shuffled.correct_sums)
    ordered = sorted(confidence for confidence, _ in examples)
    assert first.counts.tolist() == pytest.approx([len(part) for part in np.array_split(ordered, num_bins)])
    assert first.confidence_sums.tolist() == pytest.approx([part.sum() for part in np.array_split(ordered, num_bins)])
    assert float(first.correct_sums.sum()) == pytest.approx(sum(correct for _, correct in examples))
    assert 0 <= first.expected_calibration_error() <= 1 + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 9))
def test_with_equal_confidences_both_errors_are_the_plain_gap(confidence, correct, num_bins):
    values = torch.full((len(correct),), confidence, dtype=torch.float64)
    gap = abs(confidence - sum(correct) / len(correct))
    for reliability in (metrics.equal_width_reliability, metrics.equal_mass_reliability):
        bins = reliability(values, torch.tensor(correct), num_bins)
        assert bins.expected_calibration_error() == pytest.approx(gap, abs=1e-9)


@pytest.mark.parametrize("reliability", [metrics.equal_width_reliability, metrics.equal_mass_reliability])
@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "message"),
    [
        ([1.5], [True], 3, "between 0 and 1"),
        ([math.nan], [True], 3, "1 NaN"),
        ([0.5], [1], 3, "torch.bool.*correct == 1"),
        ([0.5], [True, False], 3, "never broadcast"),
        ([0.5], [True], 0, "num_bins as a whole number of at least 1"),
        ([0.5], [True], 2.5, "num_bins as a whole number of at least 1"),
    ],
)
def test_bad_reliability_input_is_refused(reliability, confidence, correct, num_bins, message):
    with pytest.raises(ValueError, match=message):
        reliability(torch.tensor(confidence), torch.tensor(correct), num_bins)


def test_no_examples_are_refused():
    nothing, truth = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    for call in (
        metrics.equal_width_reliability(nothing, truth).expected_calibration_error,
        lambda: metrics.expected_calibration_error(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        lambda: metrics.equal_mass_reliability(nothing, truth),
        lambda: metrics.accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        lambda: metrics.mean_score(nothing),
    ):
        with pytest.raises(ValueError, match="at least one example"):
            call()


PROBS, LABELS = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([0, 1])


@pytest.mark.parametrize("metric", [metrics.expected_calibration_error, metrics.accuracy])
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (
            LABELS,
            PROBS,
            r"floating-point probabilities of shape \(N, ..., K\); got torch.int64.*pass labels after them",
        ),
        (PROBS[:, 1], LABELS, r"got torch.float32 of shape \(2,\).*stack 1 - p and p"),
        (4 * PROBS - 2, LABELS, "not logits"),
        (PROBS * 0.5, LABELS, "sum to one"),
        (PROBS * math.nan, LABELS, "4 NaN"),
        (PROBS, LABELS + 1, "labels from 0 to 1; got 1 to 2"),
        (PROBS, LABELS - 1, "labels from 0 to 1; got -1 to 0"),
        (PROBS, LABELS[:1], r"labels of shape \(2,\); got shape \(1,\)"),
        (PROBS, PROBS.round().long(), r"labels of shape \(2,\); got shape \(2, 2\)"),
        (PROBS, LABELS.double(), "integer labels; got torch.float64"),
    ],
)
def test_bad_probabilities_and_labels_are_refused(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


def test_a_number_of_bins_is_a_whole_number():
    with pytest.raises(ValueError, match="num_bins as a whole number"):
        metrics.expected_calibration_error(PROBS, LABELS, num_bins=0)


def test_probabilities_may_have_a_gradient():
    probs = PROBS.clone().requires_grad_()
    assert metrics.expected_calibration_error(probs, LABELS) == metrics.expected_calibration_error(PROBS, LABELS)
    assert metrics.classwise_calibration_error(probs, LABELS) == metrics.classwise_calibration_error(PROBS, LABELS)
