"""Figures of the experiments: lines over one quantity, means over seeds, cumulative entropies, and maps of pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from batchbayes.plots import uncertainty_error_figure
from batchbayes.tools import (
    BLUE,
    GREEN,
    GREY,
    LINE_STYLES,
    MARKERS,
    ORANGE,
    PURPLE,
    VERMILION,
    Axes,
    Figure,
    class_legend,
    house_style,
    line_look,
    new_figure,
    one_panel,
)

MOST_INSIDE = 4
"""Legends of more lines stand above the panel, because they would hide the lines."""
LONG_LABEL = 20
"""Letters of a label with which three columns of a legend would be wider than the panel."""


@dataclass(frozen=True, eq=False)
class Line:
    """A line: its label, and the positions and values of its points, (N,) each.

    "points" are drawn as black crosses, for example values from a paper. A "level" is a thin grey line, for example a
    baseline.
    """

    label: str
    positions: ArrayLike
    values: ArrayLike
    kind: Literal["line", "points", "level"] = "line"


def lines_figure(
    panels: Mapping[str, Sequence[Line]],
    quantity: str | Sequence[str],
    *,
    log_positions: bool = False,
) -> Figure:
    """Draw panels side by side. The keys are what each panel measures, `quantity` is what the lines run over.

    If panels run over different quantities, there is one for each.
    """
    quantities = [quantity] * len(panels) if isinstance(quantity, str) else quantity
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.4 * len(panels), 3.2), share=False)
        for panel, (measure, lines), over in zip(axes.flat, panels.items(), quantities, strict=True):
            for line, look in zip(lines, _looks(lines), strict=True):
                panel.plot(line.positions, line.values, label=line.label, **look)
            panel.set(xlabel=over, ylabel=measure, xscale="log" if log_positions else "linear")
            if len(lines) > MOST_INSIDE:
                columns = 2 if max(len(line.label) for line in lines) > LONG_LABEL else 3
                panel.legend(frameon=False, fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))
            elif lines:
                panel.legend(frameon=False)
    return figure


def _looks(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return colour, dashes and marks of each line. Lines of the same kind differ."""
    found, seen = [], {"line": 0, "level": 0}
    for line in lines:
        if line.kind == "points":
            found.append({"color": "black", "ls": "none", "marker": "x", "ms": 5})
            continue
        number = seen[line.kind]
        seen[line.kind] += 1
        level = {"color": GREY, "ls": LINE_STYLES[number % len(LINE_STYLES)], "lw": 0.9}
        found.append(line_look(number) if line.kind == "line" else level)
    return found


MOST_MARKERS = 30
"""Longer lines have no markers."""


def seeds_figure(
    lines: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    xlabel: str,
    ylabel: str,
    xscale: Literal["linear", "log"] = "linear",
    published: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a line for each name: positions (X,) and values (seeds, X), as the mean with a band of two standard errors.

    Args:
        lines: what to draw, by label.
        xlabel: what the positions are.
        ylabel: what the values are.
        xscale: "log" for positions that double.
        published: values (X,) from a paper at positions (X,), drawn as crosses in the colour of the line of that name.
        ax: axes to draw into.
    """
    with one_panel(ax, (7.2, 4.2)) as panel:
        for number, (name, (positions, values)) in enumerate(lines.items()):
            each, look = np.atleast_2d(np.asarray(values)), line_look(number)
            mean = each.mean(0)
            marker = MARKERS[number % len(MARKERS)] if len(mean) <= MOST_MARKERS else ""
            panel.plot(positions, mean, label=name, marker=marker, ms=4, **look)
            if len(each) > 1:
                error = 2 * each.std(0, ddof=1) / len(each) ** 0.5
                panel.fill_between(positions, mean - error, mean + error, color=look["color"], alpha=0.15, lw=0)
            if published and name in published:
                panel.plot(*published[name], "x", color=look["color"], ms=5, label=f"{name}, published")
        panel.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale)
        panel.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return panel.figure


@dataclass(frozen=True, eq=False)
class BatchSizeSweep:
    """Results of a method at each of B training batch sizes: the title of its panel, and arrays (seeds, B)."""

    title: str
    information_in: ArrayLike
    information_out: ArrayLike
    auroc: ArrayLike


def collapse_figure(
    batch_sizes: Sequence[int],
    sweeps: Sequence[BatchSizeSweep],
    *,
    novelty: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw mutual information in and out of distribution by training batch size, for each method; then the AUROC.

    `novelty` is the AUROC (seeds, B) of a detector without noise. Lines are means over seeds. Dots are single seeds.
    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        count = len(sweeps) + 1
        figure, (panels,) = new_figure(1, count, (3.3 * count, 3.2), share=False, ax=ax)
        for panel, sweep in zip(panels, sweeps, strict=False):
            panel.sharey(panels[0])
            _seeds_line(panel, batch_sizes, sweep.information_out, "out of distribution", VERMILION, "o")
            _seeds_line(panel, batch_sizes, sweep.information_in, "in distribution", BLUE, "s")
            panel.set(title=sweep.title, yscale="log")
        panels[0].set_ylabel("mean mutual information, nats")
        panels[0].legend(frameon=False)
        for sweep, colour, marker in zip(sweeps, (GREY, GREEN, PURPLE), "^Dv", strict=False):
            _seeds_line(panels[-1], batch_sizes, sweep.auroc, sweep.title, colour, marker)
        if novelty is not None:
            _seeds_line(panels[-1], batch_sizes, novelty, "novelty", ORANGE, "P")
        panels[-1].set(title="detection of out-of-distribution data", ylabel="AUROC")
        panels[-1].legend(frameon=False)
        for panel in panels:
            panel.set(xlabel="training batch size M", xscale="log")
            panel.set_xticks(batch_sizes, map(str, batch_sizes))
            panel.minorticks_off()
    return figure.figure


def _seeds_line(
    panel: Axes, batch_sizes: Sequence[int], values: ArrayLike, label: str, colour: str, marker: str
) -> None:
    each = np.asarray(values)  # (seeds, B)
    panel.plot(batch_sizes, each.mean(0), color=colour, lw=1.6, label=label, marker=marker, ms=5)
    if len(each) > 1:
        panel.plot(batch_sizes, each.T, marker, color=colour, ms=3, mew=0, alpha=0.5)


@dataclass(frozen=True, eq=False)
class EntropyPanel:
    """A title, entropies (N,) by method, and published shares by method at some entropies."""

    title: str
    curves: Mapping[str, ArrayLike]
    places: Sequence[float] = ()
    published: Mapping[str, Sequence[float]] | None = None


def entropy_figure(panels: Sequence[EntropyPanel]) -> Figure:
    """Draw the share of images with less entropy, against the entropy. Crosses are published values."""
    with house_style():
        figure, axes = new_figure(1, len(panels), (4.2 * len(panels), 3.6), share=False)
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
    return figure


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


def uncertainty_error_grid(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike, float]], columns: int = 4, *, ax: Axes | None = None
) -> Figure:
    """Draw `uncertainty_error_figure` for several data sets: (std, error, constant_std) by title.

    With `ax`, the panels take the place of these axes.
    """
    with house_style():
        rows, across = -(-len(panels) // columns), min(columns, len(panels))
        beside = 5 if across > 3 else across  # entries in each row of the legend, which are narrower than a panel
        height = 2.2 * rows + 0.6 + 0.17 * (-(-5 // beside) - 1)
        figure, axes = new_figure(rows, across, (2.7 * across, height), share=False, ax=ax)
        for panel in axes.flat[len(panels) :]:
            panel.set_visible(False)
        for panel, (title, (std, error, constant_std)) in zip(axes.flat, panels.items(), strict=False):
            uncertainty_error_figure(std, error, constant_std=constant_std, ax=panel)
            panel.get_legend().remove()
            panel.set(title=title.replace("$", r"\$"), xlabel="", ylabel="")
        figure.supxlabel("points, the most certain first", fontsize=9)
        figure.supylabel("absolute error", fontsize=9)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=beside, frameon=False, fontsize=8)
    return figure.figure
