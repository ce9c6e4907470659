"""Small pictures of inputs: of the most uncertain ones, and of some others."""

import torch
from torch import Tensor

from batchbayes.assessment.load import Case
from batchbayes.assessment.result import Thumbnails
from batchbayes.assessment.rows import Rows

SIDE = 48
"""Longest side of a thumbnail, in pixels."""
MOST_UNCERTAIN, OTHERS = 100, 300
FEATURES = 16
"""How many inputs of a table row are shown."""


def displayable(inputs: Tensor) -> Tensor | None:
    """Return inputs as images (n, 3, h, w) with colours from 0 to 1; None if they are not images.

    Networks take inputs on many scales, so each channel is stretched between its extremes over all of the images.
    """
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or not len(inputs):
        return None
    images = inputs.double()
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp_min(1e-12)).expand(-1, 3, -1, -1)


def small(image: Tensor) -> Tensor:
    """Shrink an image (c, h, w) to the size of a thumbnail. Other inputs are returned as they are."""
    if image.ndim != 3 or max(image.shape[1:]) <= SIDE:
        return image
    height, width = image.shape[1:]
    size = max(1, SIDE * height // max(height, width)), max(1, SIDE * width // max(height, width))
    return torch.nn.functional.interpolate(image[None], size=size, mode="area")[0]


def pick_thumbnails(case: Case, rows: Rows, uncertainty: str) -> Thumbnails | None:
    """Return thumbnails of the most uncertain rows of each source, and of others spread evenly over the rest."""
    keys: list[str] = []
    pieces: list[Tensor] = []
    start = 0
    for source, data in (("test", case.test), ("ood", case.ood)):
        count = rows["source"].count(source)
        if not count or data is None:
            continue
        chosen = chosen_rows(torch.tensor(rows[uncertainty][start : start + count]))
        pieces.append(data.raw().take(chosen, small))
        keys += [f"{source}-{rows['row'][start + i]}" for i in chosen]
        start += count
    if len({piece.shape[1:] for piece in pieces}) != 1:
        return None
    images = displayable(torch.cat(pieces))
    return None if images is None else Thumbnails(keys, images)


def pick_details(case: Case, rows: Rows, uncertainty: str) -> dict[str, list[str]]:
    """Return the inputs of the same rows in words, if they are rows of a table."""
    first, _ = next(iter(case.test))
    if first.ndim != 2:
        return {}
    chosen = chosen_rows(torch.tensor(rows[uncertainty][: rows["source"].count("test")]))
    names = case.test.feature_names or [f"x{i}" for i in range(first.shape[1])]
    details = {}
    for i, inputs in zip(chosen, case.test.raw().take(chosen), strict=True):
        cells = zip(names[:FEATURES], inputs[:FEATURES].tolist(), strict=True)
        details[f"test-{rows['row'][i]}"] = [f"{name} = {value:.4g}" for name, value in cells]
    return details


def chosen_rows(uncertainty: Tensor) -> list[int]:
    """Return the positions of the most uncertain rows, and then of others at even distances in order of uncertainty."""
    order = uncertainty.argsort(descending=True, stable=True).tolist()
    rest = order[MOST_UNCERTAIN:]
    return order[:MOST_UNCERTAIN] + rest[:: max(1, -(-len(rest) // OTHERS))]
