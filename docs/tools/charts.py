"""The first figures of pages of results that have tables only: drawn from these tables when the site is built."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from batchbayes.plots import save_figure
from batchbayes.tools import BLUE, GREEN, GREY, ORANGE, VERMILION, house_style, new_figure

Table = list[list[str]]
"""The header and the rows of a table, as text."""


def draw_charts(results: Path, folder: Path) -> None:
    """Write the chart of each page to a folder, as `results-NAME.png`."""
    for name, chart in CHARTS.items():
        with house_style():
            figure = chart(tables(results / f"{name}.md"))
        save_figure(figure, folder / f"results-{name}.png")


def tables(page: Path) -> list[Table]:
    """Return the tables of a page in Markdown that begin a line."""
    blocks = re.findall(r"(?:^\|.*\|\n?)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for i, line in enumerate(block.splitlines()) if i != 1]
        for block in blocks
    ]


def number(cell: str) -> float:
    """Return the first number in a cell, or NaN.

    >>> number("**-20.3 %**"), number("0.0951 (chosen)"), number("4.3e6"), number("")
    (-20.3, 0.0951, 4300000.0, nan)
    """
    found = re.search(r"[-+]?[\d.]+(?:e[-+]?\d+)?", cell)
    return float(found[0]) if found else float("nan")


def column(table: Table, index: int) -> np.ndarray:
    return np.array([number(row[index]) for row in table[1:]])


def against_paper(found: list[Table]) -> Figure:
    """Draw our RMSE and CRPS over those of the paper, with two standard errors."""
    figure, panels = new_figure(1, 2, (8.6, 3.0))
    for panel, table, title in zip(panels[0], found, ("RMSE", "CRPS"), strict=False):
        sets = list(dict.fromkeys(row[0] for row in table[1:]))
        for method, colour, shift in (("MCBN", BLUE, -0.12), ("MCDO", ORANGE, 0.12)):
            rows = [row for row in table[1:] if row[1] == method]
            paper, ours, error = (np.array([number(row[i]) for row in rows]) for i in (2, 4, 5))
            label = {"MCBN": "MCBN", "MCDO": "MC dropout"}[method]
            where = np.arange(len(sets)) + shift
            panel.errorbar(where, ours / paper, 2 * error / paper, fmt="o", ms=4, color=colour, lw=1.2, label=label)
        panel.axhline(1, color=GREY, lw=1)
        panel.set(title=f"{title}: ours / paper", ylim=(0.8, 1.35))
        panel.set_xticks(range(len(sets)), sets, rotation=35, ha="right")
    panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


def along(name: str, low: float) -> Callable[[list[Table]], Figure]:
    """Return a chart of the normalised CRPS of each data set along the columns of a table."""

    def chart(found: list[Table]) -> Figure:
        table = found[0]
        x = [number(cell) for cell in table[0][2:]]
        rows = {(row[0], row[1]): [number(cell) for cell in row[2:]] for row in table[1:]}
        sets = list(dict.fromkeys(key[0] for key in rows))
        lines = -(-len(sets) // 5)
        figure, panels = new_figure(lines, -(-len(sets) // lines), (9.2, 2.5 * lines), share=False)
        for panel, each in zip(panels.flat, sets, strict=True):
            panel.axhline(0, color=GREY, lw=0.8)
            panel.plot(x, rows[each, "paper"], "s--", color=GREY, ms=3.5, lw=1.2, label="paper")
            errors = 2 * np.array(rows[each, "± ours"])
            panel.errorbar(x, rows[each, "ours"], errors, fmt="o-", color=BLUE, ms=3.5, lw=1.4, label="ours")
            panel.set(title=each, xscale="log")
            panel.set_ylim(max(low, panel.get_ylim()[0]), min(80, panel.get_ylim()[1]))
            panel.set_xticks([x[0], x[-1]], [f"{x[0]:.0f}", f"{x[-1]:.0f}"])
            panel.minorticks_off()
        for panel in panels[:, 0]:
            panel.set_ylabel("normalised CRPS, %")
        for panel in panels[-1]:
            panel.set_xlabel(name)
        figure.legend(*panels[0, 0].get_legend_handles_labels(), ncols=2, loc="outside upper right", frameon=False)
        return figure

    return chart


def precision(found: list[Table]) -> Figure:
    """Draw both normalised scores against tau, as a multiple of the one that was chosen."""
    figure, panels = new_figure(1, 2, (8.6, 2.8), share=False)
    table = found[0]
    for name, colour in zip(dict.fromkeys(row[0] for row in table[1:]), (BLUE, ORANGE, GREEN, VERMILION), strict=True):
        rows = [row for row in table[1:] if row[0] == name]
        chosen = next(number(row[1]) for row in rows if "chosen" in row[1])
        for panel, index in zip(panels[0], (3, 4), strict=True):
            x, y = [number(row[1]) / chosen for row in rows], [number(row[index]) for row in rows]
            panel.plot(x, y, "o-", color=colour, ms=3, lw=1.4, label=f"{name.replace(',', ', split')}")
    for panel, title in zip(panels[0], ("normalised CRPS, %", "normalised PLL, %"), strict=True):
        panel.axvline(1, color=GREY, lw=0.8)
        panel.set(xscale="log", xlabel="tau / chosen tau", title=title)
    panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


def flows(found: list[Table]) -> Figure:
    """Draw the RMSE of both kinds of noise over that of the paper."""
    unit, matched = ([row for row in found[0][1:] if row[1] == method] for method in ("MNF", "MNF, matched noise"))
    paper, ours, ours_matched = (
        np.array([number(row[i]) for row in rows]) for rows, i in ((unit, 2), (unit, 4), (matched, 4))
    )
    values = {"unit noise, as in the paper": ours / paper, "matched noise": ours_matched / paper}
    return bars([row[0] for row in unit], values, "RMSE, ours / paper", line=1.0)


def random_labels(found: list[Table]) -> Figure:
    table = found[0]
    values = {"training": column(table, 1), "test": column(table, 3), "weights that are zero": column(table, 5)}
    return bars([row[0] for row in table[1:]], values, "%", line=10.0)


def gradients(found: list[Table]) -> Figure:
    table = found[0]
    names = [f"{row[1].replace('dense', 'layer ')}\n{row[2]}" for row in table[1:7]]
    values = {
        stage: np.array([number(row[3]) for row in table[1:] if row[0] == stage]) for stage in ("start", "trained")
    }
    return bars(names, values, "variance, one draw / local noise", line=1.0, log=True)


def samplers(found: list[Table]) -> Figure:
    table = found[0]
    names = [f"{row[0].replace(' ', chr(10))}\n{row[1]} rows" for row in table[1:]]
    return bars(
        names, {"mean": column(table, 2), "covariance": column(table, 3)}, "largest error, standard errors", line=3.0
    )


def students(found: list[Table]) -> Figure:
    table = found[0]
    names = [f"{row[0]}\n({row[1]} pass{'es' * (row[1] != '1')})" for row in table[1:]]
    return bars(names, {"": column(table, 3)}, "NLL on test images")


def bars(
    names: list[str], values: dict[str, np.ndarray], label: str, *, line: float | None = None, log: bool = False
) -> Figure:
    """Draw groups of bars, with a dashed line to compare with."""
    figure, panels = new_figure(1, 1, (8.6, 2.8))
    panel, width = panels[0, 0], 0.8 / len(values)
    for i, ((name, heights), colour) in enumerate(zip(values.items(), (BLUE, ORANGE, GREEN), strict=False)):
        panel.bar(
            np.arange(len(names)) + (i - (len(values) - 1) / 2) * width, heights, 0.9 * width, color=colour, label=name
        )
    if line is not None:
        panel.axhline(line, color=GREY, lw=1, ls=(0, (4, 2)))
    panel.set(ylabel=label, yscale="log" if log else "linear")
    panel.set_xticks(range(len(names)), names)
    if len(values) > 1:
        panel.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(values))
    return figure


CHARTS: dict[str, Callable[[list[Table]], Figure]] = {
    "mcbn-uci": against_paper,
    "mcbn-batch-size": along("batch size", -140),
    "mcbn-passes": along("draws", -140),
    "precision-sensitivity": precision,
    "mnf-uci": flows,
    "random-labels": random_labels,
    "gradient-variance": gradients,
    "sg-mcmc": samplers,
    "distillation": students,
}
