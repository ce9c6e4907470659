"""Reliability (of the answers with confidence p, is a share p right?) and risk against coverage.

Images with the most and the least certain predictions.

Data of another kind than that of training: is the network less certain about it, and does it call it unusual?
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.metrics import Reliability
from batchbayes.plots.style import BLUE, GREY, VERMILION, Axes, Figure, house_style, line_look, new_figure, one_panel

FEW = 10
"""With fewer answers in a bin its accuracy is mostly chance."""
NARROWEST = 0.004
"""The width of a bar that can be seen."""


def reliability_figure(bins: Mapping[str, Reliability], *, ax: Axes | None = None) -> Figure:
    """Draw accuracy against confidence for each method, and below it the share of answers with that confidence.

    Dots on the diagonal are calibrated. Dots below it are over-confident. A hollow dot has fewer than ten answers. With
    `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, panels = new_figure(2, len(bins), (2.5 * len(bins) + 0.5, 3.8), share=False, ax=ax)
        for column, (name, reliability) in enumerate(bins.items()):
            _reliability_panel(panels[0, column], name, reliability)
            _count_panel(panels[1, column], reliability)
        panels[0, 0].set_ylabel("accuracy")
        panels[1, 0].set_ylabel("share of\nanswers")
        for panel in panels[:, 1:].flat:
            panel.set_yticklabels([])
        panels[0, 0].get_gridspec().set_height_ratios([3, 1])
    return figure.figure


def _reliability_panel(panel: Axes, name: str, bins: Reliability) -> None:
    seen = bins.counts > 0
    confidence, accuracy = bins.mean_confidence[seen].numpy(), bins.accuracy[seen].numpy()
    panel.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
    panel.vlines(confidence, accuracy, confidence, color=VERMILION, lw=1.5, alpha=0.7)
    few = bins.counts[seen].numpy() < FEW
    panel.plot(confidence[~few], accuracy[~few], "o", color=BLUE, ms=4)
    panel.plot(confidence[few], accuracy[few], "o", color=BLUE, ms=4, mfc="white")
    panel.set(xlim=(0, 1.02), ylim=(0, 1.02), xticklabels=[])
    panel.set_title(name, parse_math=False)


def _count_panel(panel: Axes, bins: Reliability) -> None:
    share = (bins.counts / bins.counts.sum()).numpy()
    edges = np.linspace(0, 1, len(share) + 1) if bins.edges is None else bins.edges.numpy()
    width = np.maximum(0.85 * np.diff(edges), NARROWEST)  # bins of equal mass may begin and end at one confidence
    panel.bar((edges[:-1] + edges[1:]) / 2, share, width, color=BLUE)
    panel.set(xlim=(0, 1.02), ylim=(0, 1), xlabel="confidence", yticks=[0, 1])


def risk_coverage_figure(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    risk: str = "error of the answers kept",
    ax: Axes | None = None,
) -> Figure:
    """Draw the risk of the answers that are kept against their share, if the least certain answers are left out.

    Args:
        curves: coverage and risk for each method, both (G,).
        risk: the label of the vertical axis.
        ax: axes to draw into instead of a new figure.
    """
    with one_panel(ax, (4.8, 3.4)) as panel:
        for number, (name, (coverage, risks)) in enumerate(curves.items()):
            panel.plot(coverage, risks, label=name.replace("$", r"\$"), **line_look(number))
        panel.set(xlabel="share of answers kept, the most certain first", ylabel=risk, xlim=(0, 1))
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False)
    return panel.figure


def certainty_figure(
    images: ArrayLike,
    labels: ArrayLike,
    predicted: ArrayLike,
    *,
    entropy: ArrayLike,
    mutual_information: ArrayLike,
    count: int = 8,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the images with the lowest mutual information above those with the highest. Wrong answers are marked.

    Shapes: images (N, 1, H, W), or (N, 3, H, W) with colours from 0 to 1; all others (N,). Both uncertainties are in
    nats. Without `names`, classes are shown as numbers. With `ax`, the images take the place of these axes.
    """
    images, labels, predicted = np.asarray(images), np.asarray(labels), np.asarray(predicted)
    entropy, mutual_information = np.asarray(entropy), np.asarray(mutual_information)
    order = np.argsort(mutual_information, kind="stable")
    count = min(count, len(order))
    with house_style():
        figure, cells = new_figure(2, count, (1.12 * count, 3.6), ax=ax)
        for cells_of_row, chosen in zip(cells, (order[:count], order[::-1][:count]), strict=True):
            for cell, i in zip(cells_of_row, chosen, strict=True):
                _image_cell(cell, images[i], int(predicted[i]), int(labels[i]), names)
                uncertainty = f"MI {format_nats(float(mutual_information[i]))}\nH {format_nats(float(entropy[i]))}"
                cell.set_xlabel(uncertainty, fontsize=8, color=GREY)
        cells[0, 0].set_ylabel("most certain")
        cells[1, 0].set_ylabel("least certain")
        figure.supxlabel("MI: mutual information, by which they are ordered; H: entropy; both in nats", fontsize=8)
    return figure.figure


def _image_cell(cell: Axes, image: np.ndarray, predicted: int, label: int, names: Sequence[str] | None = None) -> None:
    look: dict[str, Any] = {"color": VERMILION, "fontweight": "bold"} if predicted != label else {}
    cell.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray_r", interpolation="nearest")
    cell.set(xticks=[], yticks=[])
    text = f"says {predicted}, is {label}" if names is None else f"says {names[predicted]}\nis {names[label]}"
    cell.set_title(text, fontsize=8.5 if names is None else 7.5, parse_math=False, **look)
    cell.spines[:].set(visible=True, color=VERMILION if look else "0.7", lw=2 if look else 0.8)


def boxes_figure(
    image: ArrayLike,
    found: Any,
    *,
    names: Sequence[str] | None = None,
    truth: ArrayLike | None = None,
    least_score: float = 0.0,
    ax: Axes | None = None,
) -> Figure:
    """Draw an image (H, W) or (H, W, 3) with the boxes of `bb.detections`, each with class and score.

    A shaded frame reaches two standard deviations to both sides of each edge. The line is thinner, the fewer draws
    found the object. Boxes of `truth` (M, 4) are dotted.
    """
    from matplotlib.patches import Rectangle

    with one_panel(ax, (4.2, 4.2)) as panel:
        panel.imshow(np.asarray(image), cmap="gray_r")
        for x1, y1, x2, y2 in np.asarray(() if truth is None else truth).reshape(-1, 4):
            panel.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ls=":", lw=1.2, color=GREY))
        parts = (found.boxes, found.box_std, found.scores, found.classes, found.share_found)
        for box, spread, score, kind, share in zip(*(part.numpy() for part in parts), strict=True):
            if score < least_score:
                continue
            colour = line_look(int(kind))["color"]
            (x1, y1, x2, y2), (left, top, right, bottom) = box, 2 * spread
            edges = ((x1, left), (x2, right)), ((y1, top), (y2, bottom))
            for middle, reach in edges[0]:
                panel.add_patch(Rectangle((middle - reach, y1), 2 * reach, y2 - y1, color=colour, alpha=0.35, lw=0))
            for middle, reach in edges[1]:
                panel.add_patch(Rectangle((x1, middle - reach), x2 - x1, 2 * reach, color=colour, alpha=0.35, lw=0))
            panel.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, lw=0.4 + 1.4 * share, color=colour))
            name = str(kind) if names is None else names[int(kind)].replace("$", r"\$")
            plate = {"facecolor": "white", "alpha": 0.75, "pad": 0.6, "lw": 0}
            panel.text(x1, y1 - 0.8, f"{name} {score:.2f}", color=colour, fontsize=7.5, va="bottom", bbox=plate)
        panel.set_axis_off()
        return panel.figure


def format_nats(value: float) -> str:
    """Format an uncertainty with three decimals.

    >>> format_nats(0.1234), format_nats(0.0001)
    ('0.123', '< 0.001')
    """
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


BINS = 30


def shift_figure(scores: Mapping[str, tuple[ArrayLike, ArrayLike]], *, ax: Axes | None = None) -> Figure:
    """Draw histograms and cumulative shares of scores in and out of distribution, a column for each score.

    Args:
        scores: the values in distribution (N,) and out of distribution (N',) of each score, such as entropies in nats.
        ax: axes of a grid, whose place the panels take.
    """
    with house_style():
        figure, panels = new_figure(2, len(scores), (3.7 * len(scores), 4.6), share=False, ax=ax)
        for column, (name, (inside, outside)) in enumerate(scores.items()):
            both = {"test data": np.asarray(inside), "out of distribution": np.asarray(outside)}
            _histogram(panels[0, column], both)
            _cumulative(panels[1, column], both)
            panels[1, column].set_xlabel(name)
        panels[0, 0].set_ylabel("share of examples")
        panels[1, 0].set_ylabel("share at or below")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure.figure


def _histogram(panel: Axes, both: Mapping[str, np.ndarray]) -> None:
    highest = max(float(values.max()) for values in both.values()) or 1.0
    for (name, values), color, style in zip(both.items(), (BLUE, VERMILION), ("-", "--"), strict=True):
        weights = np.full(len(values), 1 / len(values))
        options = {"bins": BINS, "range": (0, highest), "weights": weights, "color": color}
        panel.hist(values, alpha=0.25, **options)
        panel.hist(values, histtype="step", lw=1.4, ls=style, label=name, **options)
    panel.set_xlim(0, highest)


def _cumulative(panel: Axes, both: Mapping[str, np.ndarray]) -> None:
    for values, color, style in zip(both.values(), (BLUE, VERMILION), ("-", "--"), strict=True):
        panel.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", color=color, ls=style)
    panel.set(ylim=(0, 1), xlim=(0, max(float(values.max()) for values in both.values()) or 1.0))


P_VALUE_BINS = 20


def novelty_figure(p_values: Mapping[str, ArrayLike], *, level: float, ax: Axes | None = None) -> Figure:
    """Draw a histogram of the p-values of novelty of each kind of data, (N,) each.

    Inputs that are like those of training are spread evenly (the dotted line). Unusual ones are on the left. The
    legend says which share is at or below `level`.
    """
    with one_panel(ax, (4.8, 3.4)) as panel:
        panel.axhline(1 / P_VALUE_BINS, color=GREY, lw=1, ls=(0, (1, 2)), label="if they are like training data")
        for number, (name, values) in enumerate(p_values.items()):
            values = np.asarray(values, dtype=float)
            look = line_look(number)
            shares = {"bins": P_VALUE_BINS, "range": (0, 1), "weights": np.full(len(values), 1 / max(1, len(values)))}
            flagged = f"{name.replace('$', chr(92) + '$')}: {100 * np.mean(values <= level):.1f} % with p ≤ {level:.2g}"
            panel.hist(values, alpha=0.2, color=look["color"], **shares)
            panel.hist(values, histtype="step", label=flagged, **look, **shares)
        panel.set(xlabel="p-value: share of ordinary inputs that are as unusual", ylabel="share of inputs", xlim=(0, 1))
        panel.legend(frameon=False, fontsize=8)
    return panel.figure
