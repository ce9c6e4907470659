"""Small pictures of inputs: of the most uncertain ones, and of some others.

What the interactive chart of the report shows: the answers that a threshold keeps, and their errors.
"""

import torch
from torch import Tensor

from batchbayes.metrics import ScoreCounts
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
    first, _ = next(iter(data))
    if first.ndim != 2:
        return {}
    chosen = shown_rows(rows, uncertainty, 0, rows["source"].count("test"))
    everything = torch.cat([inputs for inputs, _ in data]).double()
    names = case.test.feature_names or [f"x{i}" for i in range(first.shape[1])]
    away = (everything - everything.mean(0)) / everything.std(0, correction=0).clamp_min(1e-12)
    return {
        f"test-{rows['row'][i]}": [input_line(names[k], float(everything[i, k]), float(away[i, k])) for k in order]
        for i, order in zip(
            chosen, away[chosen].abs().argsort(descending=True, stable=True)[:, :FEATURES].tolist(), strict=True
        )
    }


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


STEPS = 200
"""Number of positions of the slider, at most."""


def class_explorer(uncertainty: Tensor, wrong: Tensor, threshold: float, *, has_novelty: bool) -> dict[str, object]:
    """Show entropy against novelty, or against 1 - confidence if novelty is not known, and the error rate."""
    return {
        "x": "entropy",
        "y": "novelty" if has_novelty else "doubt",
        "x_label": "uncertainty of the answer (entropy)",
        "y_label": "novelty of the input (p-value; novel at the top)" if has_novelty else "1 − confidence",
        "x_scale": "root",
        "y_scale": "log" if has_novelty else "root",
        "y_down": has_novelty,
        "risk_label": "error rate",
        "kept_label": "of the inputs answered",
        "percent": True,
        "threshold": threshold,
        **threshold_curve(uncertainty, wrong.double(), root=False),
    }


def value_explorer(uncertainty: Tensor, error: Tensor, threshold: float, unit: str) -> dict[str, object]:
    """Show the spread of the draws against the absolute error, and the RMSE of what is kept."""
    return {
        "x": "epistemic_std",
        "y": "error",
        "x_label": f"spread of the draws ({unit})",
        "y_label": f"absolute error ({unit})",
        "x_scale": "plain",
        "y_scale": "plain",
        "risk_label": "RMSE",
        "kept_label": "of the inputs answered",
        "percent": False,
        "threshold": threshold,
        **threshold_curve(uncertainty, error.double().square(), root=True),
    }


def image_explorer(counts: ScoreCounts, nouns: tuple[str, str]) -> dict[str, object]:
    """Show the mean entropy of images against their share of wrong pixels, and the error rate of pixels that are kept.

    The slider starts where about 90 % of the pixels are kept. `nouns` are what images and pixels are called.
    """
    whole, part = nouns
    curve = counts.risk_coverage()
    wanted = torch.linspace(0.02, 1, STEPS, dtype=torch.float64)
    positions = torch.searchsorted(curve.coverage, wanted).clamp(max=len(curve.coverage) - 1).unique()
    return {
        "x": "entropy",
        "y": "error_rate",
        "x_label": "uncertainty (entropy)",
        "y_label": f"share of wrong {part}s",
        "x_scale": "root",
        "y_scale": "root",
        "risk_label": "error rate",
        "note": f"The slider sets single {part}s aside. The dots show the mean entropy of whole {whole}s.",
        "kept_label": f"of the {part}s answered",
        "percent": True,
        "threshold": float(curve.thresholds[int(torch.searchsorted(curve.coverage, 0.9))]),
        "thresholds": curve.thresholds[positions].tolist(),
        "coverage": curve.coverage[positions].tolist(),
        "risk": curve.risk[positions].tolist(),
    }


def threshold_curve(uncertainty: Tensor, loss: Tensor, *, root: bool) -> dict[str, list[float]]:
    """Return thresholds, the share that each keeps, and the mean loss of what is kept, for shares from few to all.

    >>> threshold_curve(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]), root=False)["risk"][-1]
    0.5
    """
    ordered, order = uncertainty.double().sort(stable=True)
    mean = loss[order].cumsum(0) / torch.arange(1, len(order) + 1)
    positions = torch.linspace(0, len(order) - 1, min(STEPS, len(order))).round().long().unique()
    last = torch.searchsorted(ordered, ordered[positions], right=True) - 1  # equal uncertainties are kept together
    return {
        "thresholds": ordered[last].tolist(),
        "coverage": ((last + 1) / len(order)).tolist(),
        "risk": (mean[last].sqrt() if root else mean[last]).tolist(),
    }
