"""Object detection: what many draws found in an image, matched by overlap, with the uncertainty of each object.

The network may return anything. The user's own function makes boxes, scores and classes of it, suppression included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.checks import SUM_TOLERANCE, as_tensor
from batchbayes._common.signatures import Count, Seed, Share, checked
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.metrics.detection import box_overlaps
from batchbayes.network.inputs import Picker
from batchbayes.network.replicas import one_call
from batchbayes.network.source import Batches, Source, cut
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predict import CHUNK, require_posterior
from batchbayes.predictive import to_frame

MOST_CLASSES = 10_000
"""Class numbers are below it: an object has a probability for each class."""
Decode = Callable[[Any], Sequence[tuple[Tensor, Tensor, Tensor]]]
"""From what the network returns for a batch to (boxes (M, 4), scores (M,), classes (M,) or (M, K)) of each image."""


@dataclass(frozen=True, eq=False, repr=False)
class Detections:
    """The O objects that draws found in one image, from the highest score down."""

    boxes: Tensor
    """Mean corners x1, y1, x2, y2 over the draws that found the object, (O, 4)."""
    box_std: Tensor
    """Standard deviation of each corner over these draws, (O, 4)."""
    scores: Tensor
    """Mean score over all draws, (O,). It is zero in a draw that did not find the object."""
    probs: Tensor
    """Probability of each class if there is an object, (O, K): the mean over draws, weighted by their scores."""
    share_found: Tensor
    """Share of the draws that found the object, (O,)."""
    entropy: Tensor
    """Entropy of class or none, (O,), in nats. A draw gives none the probability 1 - score, or 1 if it found none."""
    mutual_information: Tensor
    """The part of the entropy on which draws disagree, (O,), in nats."""
    num_samples: int

    @property
    def classes(self) -> Tensor:
        """The most probable class of each object, (O,)."""
        return self.probs.argmax(-1)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: Any) -> "Detections":
        """Return some of the objects: a slice, numbers in a tensor, or a mask (O,)."""
        names = [field.name for field in fields(self) if field.name != "num_samples"]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({count(len(self), 'object')}, {count(self.num_samples, 'draw')})"

    def calibrated(self, change: Callable[[Tensor], Tensor]) -> "Detections":
        """Return the same objects with other scores, as by `calibrate.tune_scores`."""
        return replace(self, scores=change(self.scores).to(self.scores))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with one row for each object."""
        names = ("scores", "share_found", "entropy", "mutual_information", "boxes", "box_std", "probs")
        return to_frame({"class": self.classes, **{name: getattr(self, name) for name in names}})


@checked
def detections(
    posterior: Posterior,
    data: Batches,
    decode: Decode,
    *,
    num_samples: Count | None = None,
    seed: Seed = 0,
    overlap: Share = 0.5,
    inputs: Picker = None,
    chunk_size: Count | None = None,
) -> list[Detections]:
    """Detect objects by every draw of a posterior, and say of each object how sure the draws are.

    The draws are those of `predict`, made exactly. What they found is matched by `merge_detections`.

    Args:
        posterior: for example `mcbn(model, batches, output=...)`, where any output will do.
        data: images, as in `predict`.
        decode: your own function from what the network returns for a batch to boxes (M, 4) as corners x1, y1, x2, y2,
            scores (M,) from 0 to 1, and classes (M,) or class probabilities (M, K), for each image in a list. It
            suppresses boxes that say the same, as it does in production.
        num_samples: the number of draws, as in `predict`.
        seed: the seed of the draws.
        overlap: boxes of two draws that overlap by this share or more may be one object.
        inputs: where the inputs are in a batch, as in `predict`.
        chunk_size: images that go through the network at once.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Conv2d(1, 5, 8, 8), torch.nn.BatchNorm2d(5)).eval()
    >>> posterior = bb.mcbn(network, torch.randn(64, 1, 8, 8), batch_size=8, center="batches")
    >>> def decode(raw):  # one box for each image
    ...     return [(v[:4].abs().cumsum(0).T, v[4].sigmoid(), torch.zeros(1).long()) for v in raw.flatten(2)]
    >>> bb.detections(posterior, torch.randn(2, 1, 8, 8), decode, num_samples=4)[0].boxes.shape[1]
    4
    """
    require_posterior(posterior)
    if not callable(decode):
        raise BatchbayesError("a function decode=", f"a {type(decode).__name__}", "pass a function of raw outputs")
    draws = num_draws(posterior, num_samples)
    seen, usual = _Decoded(decode), getattr(getattr(posterior, "network", None), "inputs", None)
    source = Source(data, inputs, usual=usual, for_prediction=True)
    every: list[list[Any]] = []
    with torch.no_grad(), one_call():
        drawing = posterior.with_output(seen)
        for images in source.inputs():
            for chunk in cut(images, chunk_size, CHUNK):
                of_draws, chunk, seen.count = [], chunk.to(posterior.device), len(chunk)
                for index in range(draws):
                    drawing.draw(seed, index)(chunk)
                    of_draws.append(seen.found)
                every += map(list, zip(*of_draws, strict=True))
    numbers = [found[2] for image in every for found in image if found[2].ndim == 1 and len(found[2])]
    classes = 1 + max((int(each.max()) for each in numbers), default=0)
    return [merge_detections(image, overlap=overlap, num_classes=classes) for image in every]


class _Decoded:
    """An output of the network that keeps what the user's function makes of all its outputs."""

    def __init__(self, decode: Decode) -> None:
        self._decode, self.count, self.found = decode, 0, list[Any]()

    def __call__(self, outputs: Any) -> Tensor:
        try:
            found = self._decode(outputs)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"[:300]
            raise BatchbayesError("boxes, scores and classes from decode", got, "call it on raw outputs") from error
        self.found = [_checked(each) for each in found]
        if len(self.found) != self.count:
            raise BatchbayesError(
                expected=f"a list from decode, with an entry for each of {count(self.count, 'image')}",
                got=f"{len(self.found)}",
                fix="return [(boxes, scores, classes), ...], with empty tensors for an image without objects",
            )
        return torch.zeros(self.count, 1)


def _checked(found: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes, scores and classes on the CPU, or raise an error that says what is wrong with them."""
    boxes, scores, classes = (as_tensor(each, "what decode returns").detach().cpu() for each in found)
    boxes, scores = boxes.double() if boxes.numel() else boxes.double().reshape(0, 4), scores.double()
    are_numbers = (classes >= 0) & (classes < MOST_CLASSES) & (classes == classes.floor())
    are_probabilities = (classes >= 0) & (classes.sum(-1, keepdim=True) <= 1 + SUM_TOLERANCE)
    wrong = ""
    if boxes.shape[1:] != (4,) or scores.shape != boxes.shape[:1] or classes.shape[:1] != scores.shape:
        wrong = f"shapes {', '.join(str(tuple(each.shape)) for each in (boxes, scores, classes))}"
    elif not bool(((scores >= 0) & (scores <= 1)).all()):
        wrong = "scores below 0 or above 1"
    elif not bool(boxes.isfinite().all()) or bool((boxes[:, 2:] < boxes[:, :2]).any()):
        wrong = "boxes that are not finite, or whose second corner lies before the first"
    elif classes.ndim == 1 and not bool(are_numbers.all()):
        wrong = f"classes that are no whole numbers from 0 to {MOST_CLASSES - 1}"
    elif classes.ndim == 2 and not (classes.is_floating_point() and bool(are_probabilities.all())):
        wrong = "probabilities of classes below 0, or with a sum above 1"
    elif classes.ndim not in (1, 2):
        wrong = f"classes of shape {tuple(classes.shape)}"
    if wrong:
        raise BatchbayesError(
            expected="boxes (M, 4) as x1, y1, x2, y2, scores (M,) from 0 to 1, and classes (M,) or (M, K)",
            got=wrong,
            fix="let decode return these three for each image; turn centres and sizes into corners, logits into scores",
        )
    return boxes, scores, classes


@checked
def merge_detections(
    draws: Sequence[tuple[Any, Any, Any]], *, overlap: Share = 0.5, num_classes: Count | None = None
) -> Detections:
    """Match what S draws found in one image, and summarise each object. `detections` does this for every image.

    From the highest score down, a box joins the object whose best box it overlaps most, by at least `overlap`, if its
    draw has given that object no box yet. Else it is an object of its own. Draws that come from a file are merged in
    this way too: pass (boxes, scores, classes) of each draw.

    >>> box = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    >>> draws = [(box, [0.8], [1]), (box + 0.5, [0.6], [1]), (box[:0], [], [])]
    >>> found = merge_detections(draws)
    >>> found.boxes.tolist(), found.share_found.item(), round(found.scores.item(), 3)
    ([[0.25, 0.25, 4.25, 4.25]], 0.6666666666666666, 0.467)
    """
    found_of_draws = [_checked((boxes, scores, torch.as_tensor(classes))) for boxes, scores, classes in draws]
    if not found_of_draws:
        raise BatchbayesError("at least one draw", "none", "pass (boxes, scores, classes) of each draw")
    which = torch.arange(len(found_of_draws)).repeat_interleave(
        torch.tensor([len(scores) for _, scores, _ in found_of_draws])
    )
    boxes, scores = (torch.cat(each) for each in list(zip(*found_of_draws, strict=True))[:2])
    probs = _probabilities([classes for _, _, classes in found_of_draws], num_classes)
    place = torch.tensor(match_boxes(boxes, scores, which, overlap), dtype=torch.long)
    objects, samples = int(place.max()) + 1 if len(place) else 0, len(found_of_draws)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(objects, *values.shape[1:]).index_add(0, place, values)

    found, parts = total(torch.ones_like(scores)), scores[:, None] * probs
    mean = total(boxes) / found[:, None]
    spread = (total((boxes - mean[place]).square()) / found[:, None]).sqrt()
    each = total(parts) / samples  # (O, K)
    entropy = _entropy(each)
    information = (entropy - total(_entropy(parts)) / samples).clamp_min(0)
    likely = torch.where(each.sum(-1, keepdim=True) > 0, each, total(probs))
    summed = total(scores) / samples
    order = summed.argsort(descending=True, stable=True)
    fields = (mean, spread, summed, likely / likely.sum(-1, keepdim=True), found / samples, entropy, information)
    return Detections(*(field[order] for field in fields), num_samples=samples)


def match_boxes(boxes: Tensor, scores: Tensor, draws: Tensor, overlap: float) -> list[int]:
    """Return the object that each box belongs to. `draws` tells which draw it comes from (see `merge_detections`)."""
    place, best = [0] * len(boxes), boxes[:0]
    taken: list[set[int]] = []
    for row in scores.argsort(descending=True, stable=True).tolist():
        draw = int(draws[row])
        near = box_overlaps(boxes[row : row + 1], best)[0]
        for used in (number for number, own in enumerate(taken) if draw in own):
            near[used] = -1.0
        chosen = int(near.argmax()) if len(near) and near.max() >= overlap else len(taken)
        if chosen == len(taken):
            taken.append(set())
            best = torch.cat([best, boxes[row : row + 1]])
        taken[chosen].add(draw)
        place[row] = chosen
    return place


def _probabilities(classes: Sequence[Tensor], num_classes: int | None) -> Tensor:
    """Return probabilities (D, K) of the classes of all draws, which are numbers (M,) or probabilities (M, K)."""
    several = [each for each in classes if each.ndim == 2]
    if several:
        return torch.cat(
            [each.double() if each.ndim == 2 else each.new_zeros(0, several[0].shape[1]) for each in classes]
        )
    numbers = torch.cat([each.long() for each in classes])
    largest = int(numbers.max()) if len(numbers) else 0
    if num_classes is not None and largest >= num_classes:
        raise BatchbayesError(
            f"classes from 0 to {num_classes - 1}", f"{largest}", "raise num_classes, or leave it out"
        )
    return torch.nn.functional.one_hot(numbers, num_classes or largest + 1).double()


def _entropy(parts: Tensor) -> Tensor:
    """Return the entropy of class or none, (n,), from the probabilities of the classes (n, K), which may lack some."""
    both = torch.cat([parts, (1 - parts.sum(-1, keepdim=True)).clamp_min(0)], -1)
    return -torch.special.xlogy(both, both).sum(-1).clamp_max(0)
