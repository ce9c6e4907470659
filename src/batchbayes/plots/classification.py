"""Reliability (of the answers with confidence p, is a share p right?) and risk against coverage."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.metrics import Reliability
from batchbayes.plots.style import BLUE, GREY, VERMILION, Axes, Figure, house_style, line_look, new_figure, one_panel

FEW = 10
"""With fewer answers in a bin its accuracy is mostly chance."""


def reliability_figure(bins: Mapping[str, Reliability], *, ax: Axes | None = None) -> Figure:
    """Draw accuracy against confidence for each method, and below it the share of answers with that confidence.

    Dots on the diagonal are calibrated. Dots below it are over-confident. A hollow dot has fewer than ten answers. With
    `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, panels = new_figure(2, len(bins), (2.5 * len(bins) + 0.4, 3.4), share=False, ax=ax)
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
    panel.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal", xticklabels=[])
    panel.set_title(name, parse_math=False)


def _count_panel(panel: Axes, bins: Reliability) -> None:
    count = len(bins.counts)
    share = (bins.counts / bins.counts.sum()).numpy()
    panel.bar((np.arange(count) + 0.5) / count, share, 0.85 / count, color=BLUE)
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
