"""Tables and figure of MCBN on CIFAR-10, beside table 2 of the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from batchbayes.tools import Figure
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import CellValue, ResultTable

PUBLISHED = {1: -0.36, 2: -0.32, 4: -0.30, 8: -0.29, 16: -0.29, 32: -0.28, 64: -0.28, 128: -0.28}
"""Table 2: the mean log-likelihood of a test image, by the number of passes."""
PUBLISHED_BASELINE = -0.32
"""The network with moving averages, from the text of the paper."""
PUBLIC, OWN = "public ResNet-32, M = 128", "trained here, M = 32"
FINE_TUNED = "public ResNet-32, fine-tuned at M = 32"
BATCH_SIZES = {PUBLIC: 128, FINE_TUNED: 32, OWN: 32}
MCBN, LINEAR, VIEWS, BOTH, TUNED = "MCBN", "MCBN, linear", "views", "MCBN with views", "MCBN, tuned M"
RUNNING, MOVING, POPULATION = "running statistics", "moving average, decay 0.9", "population statistics"
BASELINES = RUNNING, MOVING, POPULATION
MOVING_ENDS = 8
"""A moving average depends on the last batches. This is the number of them that are compared."""


@dataclass(frozen=True)
class PassesCurve:
    """The log-likelihood of one method after 1, 2, 4, ... passes."""

    network: str
    method: str
    passes: Sequence[int]
    """For a baseline there is one entry: it needs one pass."""
    pll: Sequence[float]
    """Means over test images and over groups of passes."""
    accuracy: float
    """With all passes."""
    examples: Sequence[float]
    """The log-likelihood of each test image with all passes."""
    spread: float | None = None
    """The standard deviation over the ends of a moving average."""
    batch_size: float | None = None
    """M of the noise, if it was tuned."""


def passes_table(counts: Sequence[int], name: str, curves: Mapping[str, PassesCurve]) -> ResultTable:
    """Return the log-likelihood of one network against the number of passes."""
    methods = (MCBN, LINEAR, VIEWS, BOTH, TUNED)

    def value(method: str, count: int) -> CellValue:
        curve = curves.get(method)
        return dict(zip(curve.passes, curve.pll, strict=True)).get(count) if curve else None

    rows = [(count, PUBLISHED.get(count), *(value(method, count) for method in methods)) for count in counts]
    return ResultTable(
        f"Table 2: log-likelihood of a test image, {name}",
        ("passes", "MCBN, published", *methods),
        tuple(rows),
        ("", ".2f", *[".3f"] * len(methods)),
    )


def methods_table(found: Mapping[str, Mapping[str, PassesCurve]]) -> ResultTable:
    """Return every method of every network with all its passes."""
    rows: list[tuple[CellValue, ...]] = []
    for name, curves in found.items():
        base = curves.get(MOVING)
        for method in (*BASELINES, MCBN, LINEAR, TUNED, VIEWS, BOTH):
            if curve := curves.get(method):
                rows.append((name, method, curve.passes[-1], curve.pll[-1], *_gain(curve, base), curve.accuracy))
    ends = [
        f"{name}: the log-likelihood with a moving average has a standard deviation of {curves[MOVING].spread:.3f} "
        f"over {MOVING_ENDS} different ends of training."
        for name, curves in found.items()
        if MOVING in curves
    ]
    sizes = [f"{name}: the tuned M is {c[TUNED].batch_size:.1f}." for name, c in found.items() if TUNED in c]
    return ResultTable(
        "Every method with all its passes",
        ("network", "method", "passes", "log-likelihood", "gain", "standard error", "accuracy"),
        tuple(rows),
        ("", "", "", ".3f", "+.3f", ".3f", ".3f"),
        (f"Gain: less the log-likelihood with a moving average (published: {PUBLISHED_BASELINE}, and MCBN "
         f"{PUBLISHED[128] - PUBLISHED_BASELINE:+.2f}). Its standard error is over test images, in pairs.",
         *ends, *sizes),
    )  # fmt: skip


def _gain(curve: PassesCurve, base: PassesCurve | None) -> tuple[CellValue, CellValue]:
    """Return the mean gain over the baseline, and its standard error over test images."""
    if base is None or curve.method == MOVING:
        return None, None
    gain = torch.tensor(curve.examples).double() - torch.tensor(base.examples).double()
    return float(gain.mean()), float(gain.std() / len(gain) ** 0.5)


def passes_figure(counts: Sequence[int], found: Mapping[str, Mapping[str, PassesCurve]]) -> Figure:
    """Draw the log-likelihood against passes, with the published values and the baselines."""
    panels: dict[str, Sequence[Line]] = {}
    for name, curves in found.items():
        lines = [Line("MCBN, published", list(PUBLISHED), list(PUBLISHED.values()), "points")]
        lines += [Line(m, curves[m].passes, curves[m].pll) for m in (MCBN, LINEAR, VIEWS, BOTH, TUNED) if m in curves]
        ends = [min(counts), max(counts)]
        lines += [Line(m, ends, list(curves[m].pll) * 2, "level") for m in BASELINES if m in curves]
        panels[f"log-likelihood, {name}"] = lines
    return lines_figure(panels, "passes", log_positions=True)
