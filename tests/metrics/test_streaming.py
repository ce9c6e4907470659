"""Accumulators: pieces give what the whole gives, on and off the grid, in memory that does not grow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score, roc_auc_score
from torchmetrics.functional.classification import multiclass_calibration_error

from batchbayes import metrics

IGNORED = 255
SUMMARIES = ("area_under_roc", "average_precision", "false_positive_rate_at_recall", "area_under_risk_coverage")


def images(num_images: int = 6):
    """Predicted classes and labels (N, H, W), a fifth of the labels ignored, classes of unequal frequency."""
    generator = torch.Generator().manual_seed(8)
    labels = torch.rand(num_images, 9, 7, generator=generator).square().mul(4).long()
    guess = torch.randint(4, labels.shape, generator=generator)
    predicted = torch.where(torch.rand(labels.shape, generator=generator) < 0.6, labels, guess)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED
    return predicted, labels.to(torch.uint8)


def scored(num_images: int = 6, num_values: int | None = None):
    generator = torch.Generator().manual_seed(9)
    positive = torch.rand(num_images, 9, 7, generator=generator) < 0.3
    score = torch.rand(positive.shape, generator=generator, dtype=torch.float64).pow(torch.where(positive, 0.5, 1.5))
    if num_values is not None:
        score = (score * (num_values - 1)).round() / (num_values - 1)
    return score, positive


def test_confusion_matrix_of_pieces():
    predicted, labels = images()
    matrix = metrics.ConfusionMatrix(4, ignore_index=IGNORED)
    for piece in zip(predicted, labels, strict=True):
        matrix.add(*piece)
    keep = labels != IGNORED
    truth, guess = labels[keep].numpy(), predicted[keep].numpy()
    assert matrix.counts.tolist() == confusion_matrix(truth, guess).tolist()
    assert matrix.pixel_accuracy() == pytest.approx(accuracy_score(truth, guess), abs=1e-12)
    each = jaccard_score(truth, guess, average=None)
    assert matrix.intersection_over_union().tolist() == pytest.approx(each.tolist(), abs=1e-12)
    assert matrix.mean_intersection_over_union() == pytest.approx(each.mean(), abs=1e-12)


def test_a_class_that_was_never_seen_does_not_count():
    matrix = metrics.ConfusionMatrix(3)
    matrix.add(torch.tensor([0, 0]), torch.tensor([0, 2]))
    overlap = matrix.intersection_over_union().tolist()
    assert overlap[0] == 0.5
    assert math.isnan(overlap[1])
    assert overlap[2] == 0
    assert matrix.mean_intersection_over_union() == 0.25


@pytest.mark.parametrize(
    ("predicted", "labels", "message"),
    [
        ([0, 3], [0, 1], "predicted classes from 0 to 2; got 0 to 3"),
        ([0, 1], [0, -1], "labels from 0 to 2"),
        ([0, 1], [0, IGNORED], "ignore_index"),
        ([0.0, 1.0], [0, 1], "integer predicted classes"),
        ([0], [0, 1], "never broadcast"),
    ],
)
def test_bad_classes_are_refused(predicted, labels, message):
    matrix = metrics.ConfusionMatrix(3)
    with pytest.raises(ValueError, match=message):
        matrix.add(torch.tensor(predicted), torch.tensor(labels))
    assert int(matrix.counts.sum()) == 0


def test_reliability_of_pieces_is_exact():
    generator = torch.Generator().manual_seed(10)
    probs = torch.randn(6, 40, 5, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.randint(5, (6, 40), generator=generator)
    confidence, correct = probs.amax(-1), probs.argmax(-1) == labels
    histogram = metrics.ReliabilityHistogram(10)
    for piece in zip(confidence, correct, strict=True):
        histogram.add(*piece)
    ours = histogram.reliability().expected_calibration_error()
    whole = metrics.equal_width_reliability(confidence, correct, 10)
    assert ours == pytest.approx(metrics.expected_calibration_error(probs, labels, 10), abs=1e-12)
    torch.testing.assert_close(histogram.reliability().correct_sums, whole.correct_sums)
    expected = multiclass_calibration_error(probs.flatten(0, 1), labels.flatten(), 5, n_bins=10, norm="l1")
    assert ours == pytest.approx(float(expected), abs=1e-6)


def test_a_result_does_not_change_when_more_is_added():
    histogram = metrics.ReliabilityHistogram()
    histogram.add(torch.tensor([0.9]), torch.tensor([True]))
    before = histogram.reliability()
    histogram.add(torch.tensor([0.9]), torch.tensor([False]))
    assert float(before.counts.sum()) == 1


def test_scores_on_the_grid_give_exactly_what_the_whole_gives():
    score, positive = scored(num_values=101)
    histogram = metrics.ScoreHistogram(0.0, 1.0, num_values=101)
    for piece in zip(score, positive, strict=True):
        histogram.add(*piece)
    whole = metrics.count_by_score(score, positive)
    torch.testing.assert_close(histogram.counts().scores, whole.scores)
    for summary in SUMMARIES:
        assert getattr(histogram.counts(), summary)() == getattr(metrics, summary)(score, positive), summary
    ours, expected = histogram.counts().risk_coverage(), metrics.risk_coverage(score, positive)
    torch.testing.assert_close(ours.risk, expected.risk, rtol=0, atol=0)
    assert whole.area_under_roc() == pytest.approx(roc_auc_score(positive.flatten(), score.flatten()))


grid_examples = st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(grid_examples, st.integers(0, 30), st.sampled_from([(0.0, 1.0), (-3.0, 7.0), (0.0, math.log(11))]))
def test_any_split_of_scores_on_any_grid_is_exact(examples, cut, limits):
    low, high = limits
    score = torch.tensor([low + (high - low) * step / 8 for step, _ in examples], dtype=torch.float64)
    positive = torch.tensor([is_positive for _, is_positive in examples])
    histogram = metrics.ScoreHistogram(low, high, num_values=9)
    histogram.add(score[:cut], positive[:cut])
    histogram.add(score[cut:], positive[cut:])
    ours, whole = histogram.counts(), metrics.count_by_score(score, positive)
    torch.testing.assert_close(ours.scores, whole.scores)
    assert ours.positives.tolist() == whole.positives.tolist()
    assert ours.negatives.tolist() == whole.negatives.tolist()


@pytest.mark.parametrize("num_values", [2, 5, 50, 1001])
def test_scores_off_the_grid_stay_within_the_resolution(num_values):
    score, positive = scored()
    histogram = metrics.ScoreHistogram(0.0, 1.0, num_values)
    histogram.add(score, positive)
    difference = abs(histogram.counts().area_under_roc() - metrics.area_under_roc(score, positive))
    assert 0 < difference <= histogram.roc_resolution()
    assert histogram.roc_resolution() < 2 / num_values


def test_the_default_grid_is_fine_enough_for_three_digits():
    score, positive = scored(num_images=200)
    histogram = metrics.ScoreHistogram(0.0, 1.0)
    histogram.add(score.float(), positive)
    for summary in SUMMARIES:
        whole = getattr(metrics, summary)(score, positive)
        assert getattr(histogram.counts(), summary)() == pytest.approx(whole, abs=1e-4), summary


def test_a_score_just_beyond_the_end_is_rounded_and_one_far_beyond_is_refused():
    histogram = metrics.ScoreHistogram(0.0, math.log(11))
    histogram.add(torch.tensor([math.log(11) + 1e-7, -1e-7]), torch.tensor([True, False]))
    assert histogram.counts().area_under_roc() == 1
    for score, message in (
        (2.5, "wider range"),
        (-0.1, "wider range"),
        (math.nan, "finite"),
        (math.inf, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            histogram.add(torch.tensor([score]), torch.tensor([True]))


def test_an_image_without_labels_adds_nothing_and_nothing_has_no_summary():
    nothing, truth = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    reliability, scores_seen = metrics.ReliabilityHistogram(), metrics.ScoreHistogram(0.0, 1.0)
    matrix = metrics.ConfusionMatrix(3, ignore_index=IGNORED)
    reliability.add(nothing, truth)
    scores_seen.add(nothing, truth)
    matrix.add(torch.tensor([1, 2]), torch.tensor([IGNORED, IGNORED]))
    for call in (
        reliability.reliability().expected_calibration_error,
        scores_seen.counts().risk_coverage,
        scores_seen.counts().area_under_risk_coverage,
        matrix.pixel_accuracy,
        matrix.mean_intersection_over_union,
    ):
        with pytest.raises(ValueError, match="at least one example"):
            call()
    with pytest.raises(ValueError, match="one class only"):
        scores_seen.roc_resolution()


@pytest.mark.parametrize("arguments", [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0, 1), (math.nan, 1.0)])
def test_a_grid_without_extent_is_refused(arguments):
    with pytest.raises(ValueError, match="lowest below highest"):
        metrics.ScoreHistogram(*arguments)


def held_bytes(accumulator) -> int:
    return sum(value.nbytes for value in vars(accumulator).values() if isinstance(value, torch.Tensor))


def test_memory_does_not_grow_with_the_number_of_examples():
    score, positive = scored()
    predicted, labels = images()
    pieces = {
        metrics.ConfusionMatrix(4, IGNORED): (predicted, labels),
        metrics.ReliabilityHistogram(): (score, positive),
        metrics.ScoreHistogram(0.0, 1.0): (score, positive),
    }
    for accumulator, piece in pieces.items():
        before, kinds = held_bytes(accumulator), {k: type(v) for k, v in vars(accumulator).items()}
        for _ in range(50):
            accumulator.add(*piece)
        assert held_bytes(accumulator) == before > 0
        assert {k: type(v) for k, v in vars(accumulator).items()} == kinds
        assert not any(isinstance(value, list | dict | set) for value in vars(accumulator).values())


def test_pieces_may_be_arrays():
    matrix, scores = metrics.ConfusionMatrix(2), metrics.ScoreHistogram(0.0, 1.0)
    matrix.add(torch.tensor([0, 1]).numpy(), torch.tensor([1, 1]).numpy())
    scores.add(torch.tensor([0.5]).numpy(), torch.tensor([True]).numpy())
    assert matrix.counts.tolist() == [[0, 0], [1, 1]]
    assert scores.counts().positives.tolist() == [1]
