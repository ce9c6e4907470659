"""What the interactive chart of the report shows: the answers that a threshold keeps, and their errors."""

import torch
from torch import Tensor

from batchbayes.metrics import ScoreCounts

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


def image_explorer(counts: ScoreCounts) -> dict[str, object]:
    """Show the mean entropy of images against their share of wrong pixels, and the error rate of pixels that are kept.

    The slider starts where about 90 % of the pixels are kept.
    """
    curve = counts.risk_coverage()
    wanted = torch.linspace(0.02, 1, STEPS, dtype=torch.float64)
    positions = torch.searchsorted(curve.coverage, wanted).clamp(max=len(curve.coverage) - 1).unique()
    return {
        "x": "entropy",
        "y": "error_rate",
        "x_label": "uncertainty (entropy)",
        "y_label": "share of wrong pixels",
        "x_scale": "root",
        "y_scale": "root",
        "risk_label": "error rate",
        "note": "The slider sets single pixels aside. The dots show the mean entropy of whole images.",
        "kept_label": "of the pixels answered",
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
