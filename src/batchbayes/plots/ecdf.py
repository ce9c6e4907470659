"""The distribution of the entropy of images, beside values from a paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import Axes, Figure, house_style, line_look, new_figure


@dataclass(frozen=True, eq=False)
class EntropyPanel:
    """A title, entropies (N,) by method, and published shares by method at some entropies."""

    title: str
    curves: Mapping[str, ArrayLike]
    places: Sequence[float] = ()
    published: Mapping[str, Sequence[float]] | None = None


def entropy_figure(panels: Sequence[EntropyPanel], *, ax: Axes | None = None) -> Figure:
    """Draw the share of images with less entropy, against the entropy. Crosses are published values.

    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.2 * len(panels), 3.6), share=False, ax=ax)
        for cell, panel in zip(axes.flat, panels, strict=True):
            for number, (method, values) in enumerate(panel.curves.items()):
                ordered, look = np.sort(np.asarray(values)), line_look(number)
                cell.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=method, **look)
                if panel.published and method in panel.published:
                    cell.plot(panel.places, panel.published[method], "x", color=look["color"], ms=6)
            cell.set(title=panel.title, xlabel="entropy of an unknown image, nats", ylim=(0, 1.02))
            cell.set_xlim(left=0)
        axes.flat[0].set_ylabel("share of images with less")
        axes.flat[-1].plot([], [], "x", color="black", label="published")
        for cell in axes.flat:
            cell.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure.figure
