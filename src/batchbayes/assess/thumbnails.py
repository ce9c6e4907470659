"""Small pictures of inputs: those that are hardest, and some of the others to hover over."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from batchbayes.assess.job import Loaded, Thumbnails

SIDE = 48
"""Longest side of a thumbnail, in pixels."""
MOST_UNCERTAIN, OTHERS = 100, 300
FEATURES = 16
"""Inputs of a table row that are shown."""


def displayable(inputs: Tensor) -> Tensor | None:
    """Images (n, 3, h, w) with colours from 0 to 1, whatever scale the inputs are on; None if they are no images.

    Each channel is stretched between its extremes over all of the images: networks get inputs on many scales.
    """
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3) or not len(inputs):
        return None
    images = inputs.double()
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp_min(1e-12)).expand(-1, 3, -1, -1)


def small(images: Tensor) -> Tensor:
    """Shrink to thumbnails."""
    height, width = images.shape[2:]
    if max(height, width) <= SIDE:
        return images
    size = max(1, SIDE * height // max(height, width)), max(1, SIDE * width // max(height, width))
    return torch.nn.functional.interpolate(images, size=size, mode="area")


def pick_thumbnails(loaded: Loaded, table: Mapping[str, Sequence[object]], uncertainty: str) -> Thumbnails | None:
    """Thumbnails of the most uncertain rows of each source, and of others evenly over the rest."""
    keys: list[str] = []
    pieces: list[Tensor] = []
    start = 0
    for source, data in (("test", loaded.test), ("ood", loaded.ood)):
        count = sum(name == source for name in table["source"])
        if not count or data is None:
            continue
        chosen = chosen_rows(torch.tensor(list(table[uncertainty][start : start + count])))
        pieces.append(data.take(chosen))
        keys += [f"{source}-{table['row'][start + i]}" for i in chosen]
        start += count
    if len({piece.shape[1:] for piece in pieces}) != 1:
        return None
    images = displayable(torch.cat(pieces))
    return None if images is None else Thumbnails(keys, small(images))


def pick_details(loaded: Loaded, table: Mapping[str, Sequence[object]], uncertainty: str) -> dict[str, list[str]]:
    """The inputs of the same rows, where they are rows of a table."""
    first, _ = next(iter(loaded.test))
    if first.ndim != 2:
        return {}
    count = sum(name == "test" for name in table["source"])
    chosen = chosen_rows(torch.tensor(list(table[uncertainty][:count])))
    names = loaded.test.feature_names or [f"x{i}" for i in range(first.shape[1])]
    details = {}
    for i, row in zip(chosen, loaded.test.take(chosen), strict=True):
        cells = zip(names[:FEATURES], row[:FEATURES].tolist(), strict=True)
        details[f"test-{table['row'][i]}"] = [f"{name} = {value:.4g}" for name, value in cells]
    return details


def chosen_rows(uncertainty: Tensor) -> list[int]:
    """Positions of the most uncertain rows, then of others at even distances in the order of uncertainty."""
    order = uncertainty.argsort(descending=True, stable=True).tolist()
    rest = order[MOST_UNCERTAIN:]
    return order[:MOST_UNCERTAIN] + rest[:: max(1, -(-len(rest) // OTHERS))]
