"""Object detection: which boxes are right, average precision, and whether scores are the share of right boxes.

Boxes are corners (x1, y1, x2, y2). What was found is a list with an entry for each image: (boxes (M, 4), scores (M,),
classes (M,)), or anything with these attributes, such as `bb.Detections`. Truths are (boxes (G, 4), classes (G,)).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.checks import as_tensor
from batchbayes.errors import BatchbayesError
from batchbayes.metrics.classification import equal_width_reliability
from batchbayes.metrics.ranking import area_under_roc

RECALLS = torch.linspace(0, 1, 101, dtype=torch.float64)
"""Where COCO reads the precision."""


def box_overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of all pairs of boxes, (n, 4) and (m, 4) -> (n, m).

    >>> box_overlaps(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 3.0, 2.0], [5.0, 5.0, 6.0, 6.0]]))
    tensor([[0.3333, 0.0000]])
    """
    corners = torch.maximum(first[:, None, :2], second[None, :, :2]), torch.minimum(first[:, None, 2:], second[:, 2:])
    shared = (corners[1] - corners[0]).clamp_min(0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(-1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1] - shared
    return torch.where(union > 0, shared / union.clamp_min(torch.finfo(union.dtype).tiny), 0.0)


def matched_overlaps(found: Sequence[Any], truths: Sequence[Any], overlap: float = 0.5) -> list[Tensor]:
    """Return the overlap of each box with its object, (M,) for each image; zero for false boxes.

    As in COCO: from the highest score down, a box takes the object of its class that it overlaps most, if that is free
    and the overlap is at least `overlap`.
    """
    if len(found) != len(truths):
        got = f"{len(found)} and {len(truths)}"
        raise BatchbayesError(expected="a truth for each image", got=got, fix="pass lists of the same length")
    return [_matched(_parts(each), truth, overlap) for each, truth in zip(found, truths, strict=True)]


def _parts(found: Any) -> tuple[Tensor, Tensor, Tensor]:
    boxes, scores, classes = found if isinstance(found, tuple | list) else (found.boxes, found.scores, found.classes)
    return as_tensor(boxes, "boxes").double().reshape(-1, 4), as_tensor(scores).double(), as_tensor(classes)


def _matched(found: tuple[Tensor, Tensor, Tensor], truth: Any, overlap: float) -> Tensor:
    boxes, scores, classes = found
    objects, kinds = as_tensor(truth[0], "boxes").to(boxes).reshape(-1, 4), as_tensor(truth[1])
    overlaps = torch.where(classes[:, None] == kinds, box_overlaps(boxes, objects), -1.0)
    matched = torch.zeros(len(boxes), dtype=torch.float64)
    if objects.numel():
        for row in scores.argsort(descending=True, stable=True).tolist():
            best, place = overlaps[row].max(0)
            if best >= overlap:
                matched[row] = best
                overlaps[:, place] = -1.0
    return matched


def is_true_detection(found: Sequence[Any], truths: Sequence[Any], overlap: float = 0.5) -> list[Tensor]:
    """Return whether each box is that of an object of its class, bool (M,) for each image (see `matched_overlaps`)."""
    return [each > 0 for each in matched_overlaps(found, truths, overlap)]


def box_average_precision(found: Sequence[Any], truths: Sequence[Any], overlap: float = 0.5) -> float:
    """Return the mean over classes of the area under precision and recall, as COCO has it (101 points), at one overlap.

    >>> truths = [(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([1]))]
    >>> box_average_precision([(truths[0][0], torch.tensor([0.9]), torch.tensor([1]))], truths)
    1.0
    """
    matched = matched_overlaps(found, truths, overlap)
    if not found:
        raise BatchbayesError("at least one image", "none", "pass what was found in each image")
    _, scores, classes = (torch.cat(each) for each in zip(*map(_parts, found), strict=True))
    kinds = torch.cat([as_tensor(truth[1]) for truth in truths])
    return class_average_precision(scores, classes, torch.cat(matched) > 0, kinds)


def class_average_precision(scores: Tensor, classes: Tensor, right: Tensor, kinds: Tensor) -> float:
    """Return the same from all boxes, (B,) each, and the classes of all objects, (G,)."""
    each = []
    for kind in kinds.unique():
        own = classes == kind
        hits = right[own][scores[own].argsort(descending=True, stable=True)].double().cumsum(0)
        precision = hits / torch.arange(1, len(hits) + 1)
        highest = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
        places = torch.searchsorted(hits / (kinds == kind).sum(), RECALLS)
        each.append(torch.cat([highest, highest.new_zeros(1)])[places.clamp_max(len(hits))].mean())
    return float(torch.stack(each).mean()) if each else float("nan")


def detection_metrics(
    found: Sequence[Any], truths: Sequence[Any], overlap: float = 0.5, num_bins: int = 20
) -> dict[str, float]:
    r"""Return what people report of a detector with scores.

    `average_precision`: see `box_average_precision`. `d_ece`: the mean gap between the score and the share of right
    boxes in bins of the score (Kueppers et al., CVPR-W 2020). `la_ece`: the mean over classes of the gap between the
    score and the share of right boxes times their mean overlap (Oksuz et al., CVPR 2023). `false_box_auroc`: how well
    low scores tell false boxes, the area under the ROC.
    """
    matched = torch.cat(matched_overlaps(found, truths, overlap))
    _, scores, classes = (torch.cat(each) for each in zip(*map(_parts, found), strict=True))
    bins = (scores * num_bins).ceil().long().clamp(1, num_bins)
    by_class = []
    for kind in torch.cat([classes, *(as_tensor(truth[1]) for truth in truths)]).unique():
        own = classes == kind
        gaps = torch.bincount(bins[own], (scores - matched)[own], minlength=num_bins + 1).abs()
        by_class.append(gaps.sum() / own.sum().clamp_min(1))
    right = matched > 0
    both = bool(right.any()) and not bool(right.all())
    return {
        "average_precision": box_average_precision(found, truths, overlap),
        "d_ece": equal_width_reliability(scores, right, num_bins).expected_calibration_error(),
        "la_ece": float(torch.stack(by_class).mean()),
        "false_box_auroc": area_under_roc(-scores, ~right) if both else float("nan"),
    }
