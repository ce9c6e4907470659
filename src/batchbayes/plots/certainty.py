"""Images with the most and the least certain predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots.style import GREY, VERMILION, Axes, Figure, house_style, new_figure


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


def format_nats(value: float) -> str:
    """Format an uncertainty with three decimals.

    >>> format_nats(0.1234), format_nats(0.0001)
    ('0.123', '< 0.001')
    """
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"
