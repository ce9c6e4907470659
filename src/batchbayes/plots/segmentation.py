"""Images beside maps of their pixels: predicted classes, uncertainty, errors and scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, eq=False)
class MapColumn:
    """A column of a figure of maps: what it shows, and an array for each row.

    An "image" is (H, W, 3), "classes" are whole numbers (H, W), a "mask" is 0 or 1, and "heat" is a score. All scores
    of a column share one scale, which ends at the 99.5 % quantile of its values.
    """

    title: str
    kind: Literal["image", "classes", "mask", "heat"]
    maps: Sequence[ArrayLike]


def maps_figure(columns: Sequence[MapColumn], *, class_names: Sequence[str]) -> Figure:
    """Draw a row for each image and a column for each kind of map."""
    from matplotlib import colormaps

    count, shape = len(columns[0].maps), np.asarray(columns[0].maps[0]).shape
    palette = colormaps["tab20"]
    with house_style():
        size = (2.0 * len(columns), 2.0 * shape[0] / shape[1] * count + 0.9)
        figure, panels = new_figure(count, len(columns), size, share=False)
        for number, column in enumerate(columns):
            drawn: Any = None
            options = _options(column, palette)
            for cell, values in zip(panels[:, number], column.maps, strict=True):
                drawn = cell.imshow(np.asarray(values), interpolation="nearest", **options)
                cell.set_axis_off()
            panels[0, number].set_title(column.title)
            if column.kind == "heat":
                figure.colorbar(drawn, ax=panels[:, number].tolist(), location="bottom", shrink=0.9, pad=0.01)
        class_legend(figure, class_names, palette)
    return figure


def _options(column: MapColumn, palette: Any) -> dict[str, Any]:
    """Return colours and limits of a column."""
    if column.kind == "heat":
        every = np.concatenate([np.asarray(values).ravel() for values in column.maps])
        low, high = np.quantile(every, [0.005, 0.995])
        return {"cmap": "cividis", "vmin": low, "vmax": max(high, low + 1e-9)}
    fixed: dict[str, dict[str, Any]] = {
        "image": {},
        "classes": {"cmap": palette, "vmin": 0, "vmax": 19},
        "mask": {"cmap": "gray_r", "vmin": 0, "vmax": 1},
    }
    return fixed[column.kind]
