"""Object detection: draws matched by overlap, the uncertainty of objects, calibrated scores and metrics."""

import math

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.calibrate import tune_scores
from batchbayes.detections import match_boxes
from batchbayes.metrics import box_average_precision, box_overlaps, detection_metrics, is_true_detection

STREAM = torch.Generator().manual_seed(0)


def random_boxes(count, span=30.0):
    corner, size = torch.rand(count, 2, generator=STREAM) * span, 3 + 6 * torch.rand(count, 2, generator=STREAM)
    return torch.cat([corner, corner + size], 1).double()


def naive_overlap(a, b):
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, wide) * max(0.0, high)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def test_overlaps_equal_a_loop():
    first, second = random_boxes(20), random_boxes(15)
    expected = [[naive_overlap(a, b) for b in second.tolist()] for a in first.tolist()]
    torch.testing.assert_close(box_overlaps(first, second), torch.tensor(expected, dtype=torch.float64))
    assert box_overlaps(torch.zeros(1, 4), torch.zeros(1, 4)).tolist() == [[0.0]]  # boxes without an area


def naive_match(boxes, scores, draws, overlap):
    """Objects as lists of rows, the first of which is the best."""
    objects = []
    for row in sorted(range(len(boxes)), key=lambda row: (-scores[row], row)):
        near = [
            (naive_overlap(boxes[row], boxes[own[0]]), -number)
            for number, own in enumerate(objects)
            if draws[row] not in [draws[other] for other in own]
        ]
        if near and max(near)[0] >= overlap:
            objects[-max(near)[1]].append(row)
        else:
            objects.append([row])
    return objects


@pytest.mark.parametrize("seed", range(5))
def test_matching_and_summaries_equal_a_loop(seed):
    random = torch.Generator().manual_seed(seed)
    objects, draws = random_boxes(6), []
    for _ in range(8):
        kept = torch.rand(6, generator=random) < 0.7
        boxes = objects[kept] + torch.randn(int(kept.sum()), 4, generator=random).double() * 0.5
        boxes = torch.cat([boxes, random_boxes(1)])
        draws.append((boxes, torch.rand(len(boxes), generator=random).double(),
                      torch.rand(len(boxes), 3, generator=random).double().softmax(1)))  # fmt: skip
    found = bb.merge_detections(draws, overlap=0.4)
    boxes, scores, probs = (torch.cat(each) for each in zip(*draws, strict=True))
    which = [number for number, draw in enumerate(draws) for _ in draw[1]]
    expected = naive_match(boxes.tolist(), scores.tolist(), which, 0.4)
    assert match_boxes(boxes, scores, torch.tensor(which), 0.4) == [
        next(k for k, own in enumerate(expected) if row in own) for row in range(len(boxes))
    ]
    expected.sort(key=lambda own: -float(scores[own].sum()))
    assert len(found) == len(expected)
    assert found.num_samples == 8
    for number, own in enumerate(expected):
        torch.testing.assert_close(found.boxes[number], boxes[own].mean(0))
        torch.testing.assert_close(found.box_std[number], boxes[own].std(0, correction=0))
        assert float(found.share_found[number]) == len(own) / 8
        torch.testing.assert_close(found.scores[number], scores[own].sum() / 8)
        mean, each = [0.0] * 4, 0.0
        for row in own:  # classes and none
            p = [*(scores[row] * probs[row]).tolist(), 1 - float(scores[row])]
            mean = [m + v / 8 for m, v in zip(mean, p, strict=True)]
            each -= sum(v * math.log(v) for v in p) / 8
        mean[3] += (8 - len(own)) / 8
        total = -sum(v * math.log(v) for v in mean)
        assert math.isclose(float(found.entropy[number]), total)
        assert math.isclose(float(found.mutual_information[number]), total - each, abs_tol=1e-12)
        torch.testing.assert_close(found.probs[number], torch.tensor(mean[:3]).double() / sum(mean[:3]))


class TinyDetector(nn.Module):
    """One box for each of 4 x 4 cells, as a dict of maps: not a single tensor."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 4, 4), nn.BatchNorm2d(8, momentum=1.0), nn.ReLU())
        self.head = nn.Conv2d(8, 7, 1)
        self.double()(IMAGES)
        self.eval()

    def forward(self, images):
        raw = self.head(self.body(images))
        return {"boxes": raw[:, :4], "scores": raw[:, 4], "classes": raw[:, 5:]}


IMAGES = torch.randn(40, 1, 16, 16, dtype=torch.float64, generator=STREAM)


def decode(raw):
    cells = torch.arange(4, dtype=torch.float64).add(0.5) * 4
    y, x = torch.meshgrid(cells, cells, indexing="ij")
    found = []
    for sides, scores, logits in zip(raw["boxes"].exp(), raw["scores"].sigmoid(), raw["classes"], strict=True):
        boxes = torch.stack([x - sides[0], y - sides[1], x + sides[2], y + sides[3]], -1).reshape(-1, 4)
        keep = scores.flatten() > 0.5
        found.append((boxes[keep], scores.flatten()[keep], logits.flatten(1).argmax(0)[keep]))
    return found


def test_detections_are_those_of_the_draws():
    posterior = bb.mcbn(TinyDetector(), IMAGES, batch_size=8, num_samples=6, output="scores")
    found = bb.detections(posterior, IMAGES[:5], decode, num_samples=6, seed=2, chunk_size=2)
    captured = []
    raw = posterior.with_output(lambda outputs: captured.append(decode(outputs)) or outputs["scores"])
    for index in range(6):
        raw.draw(2, index)(IMAGES[:5])
    assert len(found) == 5
    for image, own in enumerate(found):
        expected = bb.merge_detections([draw[image] for draw in captured], num_classes=2)
        torch.testing.assert_close(own.boxes, expected.boxes)
        torch.testing.assert_close(own.mutual_information, expected.mutual_information)
    assert float(torch.cat([each.box_std for each in found]).max()) > 0
    plain = bb.detections(bb.deterministic(TinyDetector(), output="scores"), IMAGES[:2], decode)
    assert float(plain[0].box_std.max()) == 0
    assert float(plain[0].mutual_information.max()) < 1e-12


def test_wrong_answers_of_decode_are_named():
    posterior = bb.deterministic(TinyDetector(), output="scores")
    box = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    for wrong, message in [
        (lambda raw: decode(raw)[:1], "an entry for each of 2 images"),
        (lambda raw: [(box, torch.tensor([1.5]), torch.tensor([0]))] * 2, "scores below 0 or above 1"),
        (lambda raw: [(box, torch.tensor([0.5, 0.5]), torch.tensor([0]))] * 2, r"shapes \(1, 4\), \(2,\)"),
        (lambda raw: [(box.reshape(4, 1), torch.tensor([0.5] * 4), torch.tensor([0] * 4))] * 2, r"shapes \(4, 1\)"),
        (lambda raw: [(box, torch.tensor([0.5]), torch.tensor([1.7]))] * 2, "no whole numbers from 0 to 9999"),
        (lambda raw: [(box, torch.tensor([0.5]), torch.tensor([10**9]))] * 2, "no whole numbers from 0 to 9999"),
        (lambda raw: [(box, torch.tensor([0.5]), torch.tensor([[-1.0, 2.0]]))] * 2, "probabilities of classes below 0"),
        (lambda raw: [(box, torch.tensor([0.5]), torch.tensor([[1.0, 1.0]]))] * 2, "with a sum above 1"),
        (lambda raw: raw["nothing"], "boxes, scores and classes from decode; got .*Error"),
        (lambda raw: [(box.flip(1), torch.tensor([0.5]), torch.tensor([0]))] * 2, "second corner lies before"),
    ]:
        with pytest.raises(bb.BatchbayesError, match=message):
            bb.detections(posterior, IMAGES[:2], wrong)


def test_fewer_classes_than_there_are_is_refused():
    with pytest.raises(bb.BatchbayesError, match="classes from 0 to 1; got 2"):
        bb.merge_detections([(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), [0.5], [2])], num_classes=2)


def test_nothing_found():
    nothing = torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long)
    found = bb.merge_detections([nothing, nothing])
    assert len(found) == 0
    assert found.boxes.shape == (0, 4)
    assert box_average_precision([found], [(torch.zeros(1, 4), torch.tensor([0]))]) == 0.0


def naive_average_precision(found, truths, overlap):
    """By the definition, class by class and image by image."""
    every = []
    for kind in sorted({int(k) for _, kinds in truths for k in kinds}):
        rows, total = [], sum(int((kinds == kind).sum()) for _, kinds in truths)
        for (boxes, scores, classes), (objects, kinds) in zip(found, truths, strict=True):
            free = [row for row in range(len(kinds)) if kinds[row] == kind]
            own = [row for row in range(len(classes)) if classes[row] == kind]
            for row in sorted(own, key=lambda row: -float(scores[row])):
                near = [(naive_overlap(boxes[row].tolist(), objects[k].tolist()), k) for k in free]
                hit = bool(near) and max(near)[0] >= overlap
                if hit:
                    free.remove(max(near)[1])
                rows.append((float(scores[row]), hit))
        rows.sort(key=lambda pair: -pair[0])
        points = [(sum(hit for _, hit in rows[: k + 1]) / total, sum(hit for _, hit in rows[: k + 1]) / (k + 1))
                  for k in range(len(rows))]  # fmt: skip
        every.append(sum(max([p for r, p in points if r >= level / 100], default=0.0) for level in range(101)) / 101)
    return sum(every) / len(every)


def random_results(images=12):
    found, truths = [], []
    for _ in range(images):
        objects = random_boxes(5)
        truths.append((objects, torch.randint(0, 3, (5,), generator=STREAM)))
        boxes = torch.cat([objects + torch.randn(5, 4, generator=STREAM).double(), random_boxes(3)])
        classes = torch.cat([truths[-1][1], torch.randint(0, 3, (3,), generator=STREAM)])
        found.append((boxes, torch.rand(8, generator=STREAM).double(), classes))
    return found, truths


@pytest.mark.parametrize("overlap", [0.3, 0.5, 0.75])
def test_average_precision_equals_a_loop(overlap):
    found, truths = random_results()
    expected = naive_average_precision(found, truths, overlap)
    assert 0 < expected < 1
    assert math.isclose(box_average_precision(found, truths, overlap), expected)


def test_calibration_errors_equal_loops():
    found, truths = random_results()
    metrics = detection_metrics(found, truths, num_bins=5)
    hits = [bool(hit) for each in is_true_detection(found, truths) for hit in each]
    scores = [float(score) for _, each, _ in found for score in each]
    gaps = 0.0
    for number in range(5):
        own = [k for k, score in enumerate(scores) if number / 5 < score <= (number + 1) / 5]
        gaps += abs(sum(scores[k] for k in own) - sum(hits[k] for k in own)) / len(scores)
    assert math.isclose(metrics["d_ece"], gaps)
    pairs = [(scores[a] < scores[b]) for a in range(len(hits)) for b in range(len(hits)) if not hits[a] and hits[b]]
    assert math.isclose(metrics["false_box_auroc"], sum(pairs) / len(pairs))
    perfect = [(boxes, torch.ones(len(boxes)), classes) for boxes, classes in truths]
    best = detection_metrics(perfect, truths)
    assert best["average_precision"] == 1
    assert best["d_ece"] == 0
    assert abs(best["la_ece"]) < 1e-12


def test_la_ece_equals_a_loop():
    found, truths = random_results()
    from batchbayes.metrics import matched_overlaps

    overlaps = torch.cat(matched_overlaps(found, truths))
    scores, classes = (torch.cat([each[k] for each in found]) for k in (1, 2))
    expected = []
    for kind in range(3):
        total, own = 0.0, [k for k in range(len(scores)) if classes[k] == kind]
        for number in range(4):
            part = [k for k in own if number / 4 < scores[k] <= (number + 1) / 4]
            right = [float(overlaps[k]) for k in part if overlaps[k] > 0]
            if part:
                precision, mean = len(right) / len(part), sum(right) / max(1, len(right))
                score = sum(float(scores[k]) for k in part) / len(part)
                total += len(part) / len(own) * abs(score - precision * mean)
        expected.append(total)
    assert math.isclose(detection_metrics(found, truths, num_bins=4)["la_ece"], sum(expected) / 3)


@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_scores_become_probabilities(method):
    scores = torch.rand(4000, generator=STREAM).double()
    truth = torch.sigmoid(2 * torch.logit(scores) - 1)  # overconfident, and biased
    tuned = tune_scores(scores, torch.rand(4000, generator=STREAM) < truth, method)
    assert float((tuned(scores) - truth).abs().mean()) < 0.03
    ordered = tuned(torch.linspace(0, 1, 200))
    assert bool((ordered.diff() >= 0).all())


def test_isotonic_equals_scikit_learn():
    isotonic = pytest.importorskip("sklearn.isotonic")
    scores, right = (
        torch.rand(300, generator=STREAM).double().round(decimals=2),
        torch.rand(300, generator=STREAM) < 0.5,
    )
    tuned = tune_scores(scores, right)
    expected = isotonic.IsotonicRegression().fit(scores.numpy(), right.double().numpy())
    torch.testing.assert_close(tuned(tuned.scores), torch.as_tensor(expected.predict(tuned.scores)))


def test_platt_equals_a_search():
    scores = torch.rand(500, generator=STREAM).double()
    right = torch.rand(500, generator=STREAM) < scores**2
    tuned, hits = tune_scores(scores, right, "platt"), float(right.sum())
    wanted = torch.where(right, (hits + 1) / (hits + 2), 1 / (500 - hits + 2)).double()

    def loss(a, b):
        return float(nn.functional.binary_cross_entropy_with_logits(a * torch.logit(scores) + b, wanted))

    low, high = (torch.logit(tuned([0.3, 0.7])[k]) for k in (0, 1))
    slope = float((high - low) / (2 * math.log(7 / 3)))
    offset = float((high + low) / 2)
    here = loss(slope, offset)
    assert all(loss(slope + da, offset + db) >= here - 1e-9 for da in (-0.02, 0, 0.02) for db in (-0.02, 0, 0.02))


def test_fused_batch_norm_is_named():
    fused = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1))
    with pytest.raises(bb.BatchbayesError, match=r"(?i)exporters.*fuse"):
        bb.mcbn(fused, torch.randn(32, 1, 8, 8), batch_size=8)
