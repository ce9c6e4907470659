"""Tables and figures of the VGG-like network beside the published values."""

from collections.abc import Sequence

from batchbayes.tools import Figure, house_style, line_look, new_figure
from batchbayes_papers.runner.experiment import Results
from batchbayes_papers.runner.figures import Line, lines_figure
from batchbayes_papers.runner.tables import CellValue, ResultTable, interleaved
from batchbayes_papers.weights.random_labels import PUBLISHED as RANDOM_LABELS

PUBLISHED = {0.25: (13.1, 13.5, 5.5), 0.5: (8.2, 8.5, 13.5), 1.0: (7.3, 7.3, 48.0), 1.5: (7.0, 7.0, 65.0)}
"""By width: the error of the dense network and of sparse VD in per cent, and the compression, read off a figure."""
ACCURACIES = {"dropout": (91.0, 93.1, 93.4), "variance": (91.3, 10.0, 93.4)}
"""Of one draw, of the means, and of the mean over draws, in per cent, at a width of 1."""


def widths_table(widths: Sequence[float], results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for width in sorted({*PUBLISHED, *widths}):
        dense, sparse = (results.get(f"width {width:g}, {part}", {}) for part in ("dense", "sparse VD"))
        ours = (dense.get("error"), sparse.get("error"), sparse.get("compression"))
        rows.append((f"{width:g}", *interleaved(ours, PUBLISHED.get(width, (None,) * 3))))
    columns = ("width", "dense, error %", "published", "sparse VD, error %", "published ", "compression", "published  ")
    return ResultTable("Error and compression by width", columns, tuple(rows), ("", *[".1f"] * 6))


def accuracies_table(width: float, results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for noise, published in ACCURACIES.items():
        found = results.get(f"width {width:g}, draws", {}).get(noise, {})
        ours = [found.get(name) for name in ("stochastic", "deterministic", "ensemble")]
        rows.append((noise, *interleaved(ours, published)))
    return ResultTable(
        f"Test accuracy at width {width:g}, per cent; published at width 1",
        ("noise", "one draw", "published", "means", "published ", "mean over draws", "published  "),
        tuple(rows),
        ("", *[".1f"] * 6),
    )


def random_labels_table(results: Results) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for method, published in RANDOM_LABELS.items():
        found = results.get(f"random labels, {method}", {})
        rows.append((method, *interleaved([found.get(name) for name in ("train", "test", "sparsity")], published)))
    columns = ("training accuracy %", "published", "test accuracy %", "published ", "zeros %", "published  ")
    return ResultTable("Random labels", ("method", *columns), tuple(rows), ("", *[".1f", ".0f"] * 3))


def widths_figure(widths: Sequence[float], results: Results) -> Figure:
    """Draw error and compression against the width: published lines, and our points."""
    sparse = [results[f"width {width:g}, sparse VD"] for width in widths]
    errors = [results[f"width {width:g}, dense"]["error"] for width in widths]
    own = [errors, *([each[name] for each in sparse] for name in ("error", "compression"))]
    with house_style():
        figure, axes = new_figure(1, 2, (8.8, 3.4), share=False)
        error, compression = axes.flat
        lines = (("dense, dropout", error), ("sparse VD", error), ("sparse VD", compression))
        for number, (label, panel) in enumerate(lines):
            look = line_look(min(number, 1))
            published = [each[number] for each in PUBLISHED.values()]
            panel.plot(list(PUBLISHED), published, marker=".", label=f"{label}, published", **look)
            panel.plot(widths, own[number], color=look["color"], ls="none", marker="x", ms=8, label=f"{label}, ours")
        for panel, label in ((error, "test error, %"), (compression, "compression")):
            panel.set(xlabel="width", ylabel=label, ylim=(0, None))
            panel.legend(frameon=False)
    return figure


def training_figure(widths: Sequence[float], results: Results) -> Figure:
    """Draw error and compression of sparse VD after each epoch."""
    panels = {}
    for what, label in (("error", "test error, %"), ("compression", "compression")):
        panels[label] = [
            Line(f"width {width:g}", [h["epoch"] for h in history], [h[what] for h in history])
            for width in widths
            for history in [results[f"width {width:g}, sparse VD"]["history"]]
        ]
    return lines_figure(panels, "epoch")
