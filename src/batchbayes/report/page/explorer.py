"""What the interactive chart of the report shows: the answers that a threshold keeps, and their errors."""

import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchbayes.metrics import ScoreCounts

STEPS = 200
"""Number of positions of the slider, at most."""


def _shown(task: str, threshold: float, **words: str) -> dict[str, Any]:
    """Return the axes and labels of a task, which `explorer.toml` has, and where the slider starts."""
    known = tomllib.loads((Path(__file__).parent / "explorer.toml").read_text(encoding="utf-8"))[task]
    filled = {key: value.format(**words) if isinstance(value, str) else value for key, value in known.items()}
    return filled | {"threshold": threshold}


def class_explorer(uncertainty: Tensor, wrong: Tensor, threshold: float, *, has_novelty: bool) -> dict[str, Any]:
    """Show entropy against novelty, or against 1 - confidence if novelty is not known, and the error rate."""
    shown = _shown("classes" if has_novelty else "classes_without_novelty", threshold)
    return shown | threshold_curve(uncertainty, wrong.double(), root=False)


def value_explorer(uncertainty: Tensor, error: Tensor, threshold: float, unit: str) -> dict[str, Any]:
    """Show the spread of the draws against the absolute error, and the RMSE of what is kept."""
    return _shown("values", threshold, unit=unit) | threshold_curve(uncertainty, error.double().square(), root=True)


def image_explorer(counts: ScoreCounts, nouns: tuple[str, str]) -> dict[str, Any]:
    """Show the mean entropy of images against their share of wrong pixels, and the error rate of pixels that are kept.

    The slider starts where about 90 % of the pixels are kept. `nouns` are what images and pixels are called.
    """
    curve = counts.risk_coverage()
    wanted = torch.linspace(0.02, 1, STEPS, dtype=torch.float64)
    positions = torch.searchsorted(curve.coverage, wanted).clamp(max=len(curve.coverage) - 1).unique()
    start = float(curve.thresholds[int(torch.searchsorted(curve.coverage, 0.9))])
    return _shown("pixels", start, whole=nouns[0], part=nouns[1]) | {
        key: getattr(curve, key)[positions].tolist() for key in ("thresholds", "coverage", "risk")
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
