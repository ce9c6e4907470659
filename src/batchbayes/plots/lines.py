"""Lines over one quantity, in one panel for each of several measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from batchbayes.plots.style import Figure, house_style, line_look, new_figure


@dataclass(frozen=True, eq=False)
class Line:
    """A line: its label, and the positions and values of its points, (N,) each."""

    label: str
    positions: ArrayLike
    values: ArrayLike


def lines_figure(
    panels: Mapping[str, Sequence[Line]], quantity: str, *, log_values: bool = False, log_positions: bool = False
) -> Figure:
    """Draw panels side by side. The keys are what each panel measures, `quantity` is what all lines run over."""
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.4 * len(panels), 3.2), share=False)
        for panel, (measure, lines) in zip(axes.flat, panels.items(), strict=True):
            for number, line in enumerate(lines):
                panel.plot(line.positions, line.values, label=line.label, **line_look(number))
            panel.set(xlabel=quantity, ylabel=measure, yscale="log" if log_values else "linear")
            panel.set_xscale("log" if log_positions else "linear")
            if lines:
                panel.legend(frameon=False)
    return figure
