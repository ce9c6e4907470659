"""What all figures share: colours for the colour-blind, sizes that are readable in print, panels, and saving."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from batchbayes._common.checks import as_path
from batchbayes._common.files import atomic_path
from batchbayes.errors import BatchbayesError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
else:
    Axes = Figure = Any  # matplotlib is imported when a figure is drawn

# Colours of the palette by Okabe and Ito, in the order in which the lines of a panel use them.
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, "#595959", "#56B4E9", "#882255", "#999933")
MARKERS = "osD^vPX*<>"
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)), "-")
"""Dashes of the lines of a panel, so that lines differ without colour too."""
MIDDLE_BLUE, LIGHT_BLUE, GREY = "#7AB8DC", "#C3DEEF", "#595959"
STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
DOTS_PER_INCH = 130


def house_style() -> "AbstractContextManager[None]":
    """Use our settings of matplotlib inside a `with` block."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def new_figure(
    rows: int, columns: int, size: tuple[float, float], *, share: bool = True, ax: "Axes | None" = None
) -> "tuple[Any, np.ndarray[Any, Any]]":
    """Make a figure and its panels (rows, columns), without pyplot: no window and no global state.

    With `ax`, the panels take the place of these axes in their figure, and `size` is not used.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained") if ax is None else _in_place_of(ax)
    return figure, figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)


def _in_place_of(ax: "Axes") -> "SubFigure":
    """Remove axes, and return a part of their figure with the same place."""
    place = ax.get_subplotspec()
    if place is None:
        raise BatchbayesError(
            expected="axes of a grid, for several panels in their place",
            got="axes with a place of their own",
            fix="make the axes with figure.subplots or figure.add_subplot",
        )
    figure = ax.figure
    ax.remove()
    return figure.add_subfigure(place)


@contextmanager
def one_panel(ax: "Axes | None", size: tuple[float, float]) -> "Iterator[Any]":
    """Give the axes to draw into, in our style: `ax`, or the axes of a new figure of that size."""
    with house_style():
        yield new_figure(1, 1, size)[1][0, 0] if ax is None else ax


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a PNG file. It is complete or absent, even if the program stops."""
    with atomic_path(as_path(path)) as partial:
        figure.savefig(partial, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})


def line_look(number: int) -> dict[str, Any]:
    """Return colour, dashes and width of line `number` of a panel."""
    dashes = number + number // len(PALETTE)  # a colour that comes again has other dashes
    return {"color": PALETTE[number % len(PALETTE)], "ls": LINE_STYLES[dashes % len(LINE_STYLES)], "lw": 1.5}
