"""What is counted in each frame of a segmentation, and the measures that follow, with standard errors over frames.

For each frame there are only counts, so memory depends neither on the number of draws nor on the number of frames that
were seen before. A measure is a function of the sum of counts over frames. Its standard error is that of the
jackknife: the measure is computed again without each frame.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import batchbayes as bb

BINS = 512
"""Values of a score that are told apart."""
EDGE = 3
"""A pixel is at a boundary if a pixel of another label is at most so far away, in rows and columns."""
PATCH = 4
"""The rows and columns of the patches that PAvPU judges."""
ACCURATE = 0.5
"""A patch is accurate if more than this share of its pixels is right."""
MOST_UNCERTAIN = 0.05

Sums = dict[str, Tensor]
"""Counts by name."""


def frame_sums(seen: bb.CategoricalPredictive, labels: Tensor, ignored: int) -> Sums:
    """Count one frame: what was predicted for it (1, H, W, K), and its labels (H, W)."""
    log_probs = seen.log_probs[0]
    classes, keep = log_probs.shape[-1], labels != ignored
    limit = math.log(classes) + 1e-3
    confidence, answer = log_probs.exp().max(-1)
    wrong, edge = answer != labels, near_boundary(labels)
    bins = bb.metrics.equal_width_reliability(confidence[keep].clamp_max(1), ~wrong[keep])
    scores = {
        "entropy": seen.entropy[0],
        "information": seen.mutual_information[0],
        "variance": seen.epistemic_variance[0].mean(-1),
    }
    truth = log_probs[keep].gather(-1, labels[keep][:, None])[:, 0]
    sums = {
        "confusion": torch.bincount(labels[keep] * classes + answer[keep], minlength=classes**2),
        "reliability": torch.stack([bins.counts, bins.confidence_sums, bins.correct_sums]),
        "loss": torch.stack([-truth.double().sum(), keep.sum().double()]),
        "patches": patch_counts(scores["entropy"], wrong, keep, limit),
        "edge_entropy": torch.stack([scores["entropy"][keep & side].double().sum() for side in (edge, ~edge)]),
    }
    cell = 2 * (~edge).long() + (~wrong).long()  # at a boundary or inside, wrong or right
    for name, score in scores.items():
        sums[name] = counted(score[keep], cell[keep], 4, limit).view(2, 2, BINS)
    return sums


def counted(score: Tensor, cell: Tensor, cells: int, limit: float) -> Tensor:
    """Count scores from 0 to `limit` in bins, for each of several cells, (cells, BINS). Small scores: finer bins."""
    place = ((score.double() / limit).clamp(0, 1).pow(0.25) * (BINS - 1)).round().long()
    return torch.bincount(cell * BINS + place, minlength=cells * BINS).view(cells, BINS)


def near_boundary(labels: Tensor) -> Tensor:
    """Return which pixels (H, W) have another label within EDGE rows and columns.

    >>> near_boundary(torch.tensor([[0] * 6 + [1] * 6]))[0].long().tolist()
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    """
    values, size = labels.double()[None, None], 2 * EDGE + 1
    highest = F.max_pool2d(values, size, 1, EDGE)
    lowest = -F.max_pool2d(-values, size, 1, EDGE)
    return (highest != lowest)[0, 0]


def patch_counts(entropy: Tensor, wrong: Tensor, keep: Tensor, limit: float) -> Tensor:
    """Count patches by their mean entropy, (2, BINS): first those that are not accurate, then the accurate ones.

    Pixels that do not count are left out of a patch, and patches without others are left out.
    """

    def pooled(values: Tensor) -> Tensor:
        return F.avg_pool2d((values * keep).double()[None, None], PATCH).flatten()

    share = pooled(torch.ones_like(entropy))
    some = share > 0
    accurate = pooled((~wrong).to(entropy))[some] / share[some] > ACCURATE
    return counted(pooled(entropy)[some] / share[some], accurate.long(), 2, limit)


def measures(total: Mapping[str, Tensor], ignored: int) -> dict[str, float]:
    """Return all measures of the sum of counts over frames."""
    counts = total["confusion"].view(int(len(total["confusion"]) ** 0.5), -1).double()
    hits = counts.diagonal()
    overlap = hits / (counts.sum(0) + counts.sum(1) - hits)
    own = [number for number in range(len(overlap)) if number != ignored]
    entropy = total["entropy"].double()  # (boundary or inside, wrong or right, BINS)
    sizes, mistakes = entropy.sum((1, 2)), entropy[:, 0].sum(1)
    found = {
        "iou": float(overlap[own].nanmean()),
        "accuracy": float(hits.sum() / counts.sum()),
        "nll": float(total["loss"][0] / total["loss"][1]),
        "ece": bb.metrics.Reliability(*total["reliability"]).expected_calibration_error(),
        "pavpu": patch_accuracy_against_uncertainty(total["patches"]),
        "auroc": ranked(entropy.sum(0)),
        "auroc_inside": ranked(entropy[1]),
        "auroc_information": ranked(total["information"].sum(0)),
        "auroc_variance": ranked(total["variance"].sum(0)),
    }
    found["precision"], found["recall"] = most_uncertain(entropy.sum(0))
    for number, place in enumerate(("edge", "inside")):
        found[f"error_{place}"] = float(mistakes[number] / sizes[number])
        found[f"entropy_{place}"] = float(total["edge_entropy"][number] / sizes[number])
    return found


def ranked(counts: Tensor) -> float:
    """Return the AUROC of a score for wrong pixels, from counts of wrong and right ones (2, BINS)."""
    wrong, right = counts.flip(1).long()
    if not (wrong.any() and right.any()) or int((counts.sum(0) > 0).sum()) < 2:
        return float("nan")
    return bb.metrics.ScoreCounts(torch.arange(BINS).flip(0), wrong, right).area_under_roc()


def most_uncertain(counts: Tensor) -> tuple[float, float]:
    """Return the share of wrong pixels among the most uncertain ones, and the share of all wrong pixels that they hold.

    A bin that is only partly among the most uncertain counts in part.
    """
    wrong, right = counts.flip(1).double()
    sizes = wrong + right
    before = sizes.cumsum(0) - sizes
    total = MOST_UNCERTAIN * sizes.sum()
    taken = ((total - before) / sizes.clamp_min(1)).clamp(0, 1)
    found = float((taken * wrong).sum())
    return found / float(total), found / max(1.0, float(wrong.sum()))


def patch_accuracy_against_uncertainty(patches: Tensor) -> float:
    """Return PAvPU: the share of patches that are accurate and certain, or not accurate and uncertain.

    A patch is uncertain if its entropy is above the mean of all patches. Reference: Mukhoti and Gal, "Evaluating
    Bayesian Deep Learning Methods for Semantic Segmentation", 2018.
    """
    values = torch.linspace(0, 1, BINS, dtype=torch.float64).pow(4)  # of the bins of `counted`, as shares of the limit
    sizes = patches.double().sum(0)
    uncertain = values > (values * sizes).sum() / sizes.sum()
    agree = patches[0][uncertain].sum() + patches[1][~uncertain].sum()
    return float(agree / sizes.sum())


def with_standard_errors(
    frames: Mapping[str, Tensor], measure: Callable[[Mapping[str, Tensor]], dict[str, float]]
) -> dict[str, tuple[float, float]]:
    """Return each measure of counts (frames, ...), and its standard error by the jackknife over frames."""
    total = {name: counts.sum(0) for name, counts in frames.items()}
    count = len(next(iter(frames.values())))
    without = [measure({name: total[name] - counts[i] for name, counts in frames.items()}) for i in range(count)]
    found = {}
    for name, value in measure(total).items():
        each = torch.tensor([own[name] for own in without], dtype=torch.float64)
        found[name] = (value, float(((each - each.mean()).square().sum() * (count - 1) / count).sqrt()))
    return found
