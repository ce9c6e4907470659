"""What all figures share: colours that the colour-blind can tell apart, type that can be read in print, whole files."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from batchbayes._common.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of the palette by Okabe and Ito; its order is that in which lines of one panel take them.
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, "#595959")
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)), "-")
"""Beside the colour, so that lines can be told apart without it."""
MIDDLE_BLUE, LIGHT_BLUE, GREY = "#7AB8DC", "#C3DEEF", "#595959"
STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
DOTS_PER_INCH = 130


def house_style() -> "AbstractContextManager[None]":
    """The settings of matplotlib inside a `with` block."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def new_figure(
    rows: int, columns: int, size: tuple[float, float], *, share: bool = True
) -> "tuple[Figure, np.ndarray[Any, Any]]":
    """A figure outside pyplot: no window, no global state; and its panels (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def line_look(number: int) -> dict[str, Any]:
    """Colour and dashes of line `number` of a panel."""
    return {"color": PALETTE[number % len(PALETTE)], "ls": LINE_STYLES[number % len(LINE_STYLES)], "lw": 1.5}
