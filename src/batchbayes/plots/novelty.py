"""How unusual inputs are, by their p-values: of ordinary inputs, each p-value is as frequent as any other."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import GREY, Axes, Figure, line_look, one_panel

BINS = 20


def novelty_figure(p_values: Mapping[str, ArrayLike], *, level: float, ax: Axes | None = None) -> Figure:
    """Draw a histogram of the p-values of novelty of each kind of data, (N,) each.

    Inputs that are like those of training are spread evenly (the dotted line). Unusual ones are on the left. The
    legend says which share is at or below `level`.
    """
    with one_panel(ax, (4.8, 3.4)) as panel:
        panel.axhline(1 / BINS, color=GREY, lw=1, ls=(0, (1, 2)), label="if they are like training data")
        for number, (name, values) in enumerate(p_values.items()):
            values = np.asarray(values, dtype=float)
            look = line_look(number)
            shares = {"bins": BINS, "range": (0, 1), "weights": np.full(len(values), 1 / max(1, len(values)))}
            flagged = f"{name.replace('$', chr(92) + '$')}: {100 * np.mean(values <= level):.1f} % with p ≤ {level:.2g}"
            panel.hist(values, alpha=0.2, color=look["color"], **shares)
            panel.hist(values, histtype="step", label=flagged, **look, **shares)
        panel.set(xlabel="p-value: share of ordinary inputs that are as unusual", ylabel="share of inputs", xlim=(0, 1))
        panel.legend(frameon=False, fontsize=8)
    return panel.figure
