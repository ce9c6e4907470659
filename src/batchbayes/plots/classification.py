"""Is a confidence of p right in a share p of the cases, and are the errors among the uncertain answers?"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.metrics import Reliability
from batchbayes.plots.style import BLUE, GREY, VERMILION, house_style, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 10
"""Answers in a bin below which its accuracy is mostly chance."""


def reliability_figure(bins: Mapping[str, Reliability]) -> "Figure":
    """Accuracy against confidence, a panel for each method; below, how many answers have that confidence.

    Dots on the diagonal are honest, dots below it are over-confident; a hollow dot stands for fewer than ten answers.
    """
    with house_style():
        figure, panels = new_figure(2, len(bins), (2.5 * len(bins) + 0.4, 3.4), share=False)
        figure.set_layout_engine("constrained", h_pad=0.03)
        for column, (name, reliability) in enumerate(bins.items()):
            _reliability_panel(panels[0, column], name, reliability)
            _count_panel(panels[1, column], reliability)
        panels[0, 0].set_ylabel("accuracy")
        panels[1, 0].set_ylabel("share of\nanswers")
        for panel in panels[:, 1:].flat:
            panel.set_yticklabels([])
        panels[0, 0].get_gridspec().set_height_ratios([3, 1])
    return figure


def _reliability_panel(panel: "Axes", name: str, bins: Reliability) -> None:
    seen = bins.counts > 0
    confidence, accuracy = bins.mean_confidence[seen].numpy(), bins.accuracy[seen].numpy()
    panel.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls="--")
    panel.vlines(confidence, accuracy, confidence, color=VERMILION, lw=1.5, alpha=0.7)
    few = bins.counts[seen].numpy() < FEW
    panel.plot(confidence[~few], accuracy[~few], "o", color=BLUE, ms=4)
    panel.plot(confidence[few], accuracy[few], "o", color=BLUE, ms=4, mfc="white")
    panel.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal", xticklabels=[])
    panel.set_title(name, parse_math=False)


def _count_panel(panel: "Axes", bins: Reliability) -> None:
    count = len(bins.counts)
    share = (bins.counts / bins.counts.sum()).numpy()
    panel.bar((np.arange(count) + 0.5) / count, share, 0.85 / count, color=BLUE)
    panel.set(xlim=(0, 1.02), ylim=(0, 1), xlabel="confidence", yticks=[0, 1])


def risk_coverage_figure(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]], *, risk: str = "error of the answers kept"
) -> "Figure":
    """What is still wrong, against the share of answers that are kept when the least certain are set aside.

    Args:
        curves: coverage and risk for each method, both (G,).
        risk: what the vertical axis shows.
    """
    with house_style():
        figure, panels = new_figure(1, 1, (4.8, 3.4))
        for number, (name, (coverage, risks)) in enumerate(curves.items()):
            panels[0, 0].plot(coverage, risks, label=name.replace("$", r"\$"), **line_look(number))
        panels[0, 0].set(xlabel="share of answers kept, the most certain first", ylabel=risk, xlim=(0, 1))
        panels[0, 0].set_ylim(bottom=0)
        panels[0, 0].legend(frameon=False)
    return figure
