"""Images beside maps of their pixels: predicted classes, uncertainty, errors and scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import Axes, Figure, house_style, new_figure


@dataclass(frozen=True, eq=False)
class Triptych:
    """An image (H, W, 3) with colours from 0 to 1, its predicted classes (H, W) and uncertainties (H, W)."""

    image: ArrayLike
    predicted: ArrayLike
    uncertainty: ArrayLike
    wrong: ArrayLike
    """Whether the prediction is wrong, (H, W) bool; false for ignored pixels."""


def segmentation_figure(
    rows: Sequence[Triptych],
    *,
    num_classes: int,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a row for each image: the image, the prediction, the uncertainty and the errors.

    With `ax`, the panels take the place of these axes.
    """
    from matplotlib import colormaps

    shape = np.asarray(rows[0].image).shape
    with house_style():
        size = (9.6, 2.4 * shape[0] / shape[1] * len(rows) + 0.9)
        figure, panels = new_figure(len(rows), 4, size, share=False, ax=ax)
        highest = max(float(np.max(np.asarray(row.uncertainty))) for row in rows) or 1.0
        palette = colormaps["tab20"]
        shown = None
        for cells, row in zip(panels, rows, strict=True):
            cells[0].imshow(np.asarray(row.image).clip(0, 1))
            cells[1].imshow(np.asarray(row.predicted), cmap=palette, vmin=0, vmax=19, interpolation="nearest")
            shown = cells[2].imshow(np.asarray(row.uncertainty), cmap="cividis", vmin=0, vmax=highest)
            cells[3].imshow(np.asarray(row.wrong), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        for cell, title in zip(panels[0], ("image", "prediction", "entropy (nats)", "wrong"), strict=True):
            cell.set_title(title)
        for cell in panels.flat:
            cell.set_axis_off()
        assert shown is not None, "there is a row"
        figure.colorbar(shown, ax=panels[:, 2].tolist(), location="bottom", shrink=0.9, pad=0.02)
        if names:
            class_legend(figure, names[:num_classes], palette)
    return figure.figure


def class_legend(figure: Figure, names: Sequence[str], palette) -> None:
    """Put the names and colours of classes below a figure."""
    from matplotlib.patches import Patch

    patches = [Patch(color=palette(k % 20), label=name.replace("$", r"\$")) for k, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=7.5)
