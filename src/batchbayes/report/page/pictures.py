"""Small pictures of inputs, or their most unusual numbers: of the most uncertain ones, and of some others."""

import torch
from torch import Tensor

from batchbayes.report.compare.rows import Rows
from batchbayes.report.read.case import Case
from batchbayes.report.result import Thumbnails

SIDE = 48
"""Longest side of a thumbnail, in pixels."""
MOST_UNCERTAIN, OTHERS, MOST_NOVEL = 100, 300, 6
FEATURES = 6
"""How many inputs of a table row are shown, those first that are farthest from the mean."""


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


def pick_thumbnails(case: Case, rows: Rows, uncertainty: str | None) -> Thumbnails | None:
    """Return thumbnails of some rows of each source: those of `shown_rows`."""
    keys: list[str] = []
    pieces: list[Tensor] = []
    start = 0
    for source, data in (("test", case.test), ("ood", case.ood)):
        count = rows["source"].count(source)
        if not count or data is None:
            continue
        chosen = shown_rows(rows, uncertainty, start, count)
        if chosen:
            pieces.append(data.raw().take(chosen, small))
        keys += [f"{source}-{rows['row'][start + i]}" for i in chosen]
        start += count
    if len({piece.shape[1:] for piece in pieces}) != 1:
        return None
    images = displayable(torch.cat(pieces))
    return None if images is None else Thumbnails(keys, images)


def pick_details(case: Case, rows: Rows, uncertainty: str | None) -> dict[str, list[str]]:
    """Return the most unusual inputs of the same rows in words, if they are rows of a table."""
    data = case.test.raw()
    if next(iter(data))[0].ndim != 2:
        return {}
    chosen = shown_rows(rows, uncertainty, 0, rows["source"].count("test"))
    everything = torch.cat([inputs for inputs, _ in data]).double()
    names = case.test.feature_names or [f"x{i}" for i in range(everything.shape[1])]
    away = (everything - everything.mean(0)) / everything.std(0, correction=0).clamp_min(1e-12)
    found = {}
    for i in chosen:
        order = away[i].abs().argsort(descending=True, stable=True)[:FEATURES].tolist()
        found[f"test-{rows['row'][i]}"] = [
            input_line(names[k], *map(float, (everything[i, k], away[i, k]))) for k in order
        ]
    return found


def input_line(name: str, value: float, away: float) -> str:
    """Say what an input is, and whether it is unusual: `away` standard deviations above the mean of the test data.

    >>> input_line("age (day)", 365.0, 5.0), input_line("water", 180.0, -0.1)
    ('age (day) = 365, unusually high', 'water = 180')
    """
    unusual = f", unusually {'high' if away > 0 else 'low'}" if abs(away) > 2 else ""
    return f"{name} = {value:.4g}{unusual}"


def shown_rows(rows: Rows, uncertainty: str | None, start: int, count: int) -> list[int]:
    """Return which of `count` rows from `start` on are shown: the most uncertain, some others, and the most novel.

    Args:
        rows: the rows of predictions.csv.
        uncertainty: the column of the uncertainty; None if all rows are equally uncertain.
        start: the first row of a source.
        count: the number of its rows.
    """
    novelty = rows["novelty"][start : start + count]
    novel = [] if "" in novelty else sorted(range(count), key=novelty.__getitem__)[:MOST_NOVEL]
    uncertain = [] if uncertainty is None else chosen_rows(torch.tensor(rows[uncertainty][start : start + count]))
    return list(dict.fromkeys(uncertain + novel))


def chosen_rows(uncertainty: Tensor) -> list[int]:
    """Return the positions of the most uncertain rows, and then of others at even distances in order of uncertainty."""
    order = uncertainty.argsort(descending=True, stable=True).tolist()
    rest = order[MOST_UNCERTAIN:]
    return order[:MOST_UNCERTAIN] + rest[:: max(1, -(-len(rest) // OTHERS))]
