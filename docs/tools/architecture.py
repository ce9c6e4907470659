"""The picture of the page Architecture: which folder imports which, read from the sources."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import batchbayes as bb
from batchbayes.tools import BLUE, GREY

PACKAGE = Path(bb.__file__).parent
BOXES = {
    "errors": "_common",
    "predictive": "predictive\nlikelihoods",
    "sums": "predictive\nlikelihoods",
    "patch": "posterior",
    "likelihoods": "predictive\nlikelihoods",
}
"""Modules of the top folder that share a box."""
DOORS = {"cli", "__main__", "__init__", "sklearn", "datasets", "models", "tools"}
"""Modules that only pass on what others do, and plain data and networks: left out of the picture."""


def _part(module: str) -> str | None:
    """Return the box that a module such as "methods.samples.swag" belongs to."""
    first = module.split(".")[0]
    if first in DOORS:
        return None
    return BOXES.get(first, first)


def imports() -> dict[str, set[str]]:
    """Return the boxes that each box imports. Imports inside functions and for types alone do not count."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if (part := _part(name)) is None:
            continue
        lines = ast.parse(path.read_text(encoding="utf-8")).body
        modules = [line.module for line in lines if isinstance(line, ast.ImportFrom) and line.module]
        others = {_part(m.removeprefix("batchbayes.")) for m in modules if m.startswith("batchbayes.")}
        found.setdefault(part, set()).update(other for other in others if other not in (None, part))
    return found


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the boxes from the inside out: each stands above all that it imports."""
    sorter, found = TopologicalSorter(graph), []
    try:
        sorter.prepare()
    except CycleError as error:
        raise AssertionError(f"these folders import each other: {error.args[1]}") from error
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found.append(ready)
        sorter.done(*ready)
    return found


def architecture() -> Figure:
    """Draw the boxes, with a line to each import that no other import implies."""
    graph = imports()
    rows = levels(graph)
    places = {
        name: ((column + 0.5) / len(row), height) for height, row in enumerate(rows) for column, name in enumerate(row)
    }
    figure = Figure(figsize=(8.6, 0.75 * len(rows) + 0.4), layout="constrained")
    axes = figure.add_subplot()
    for name, wanted in graph.items():
        implied = {far for near in wanted for far in _all(graph, near)}
        for other in wanted - implied:
            (x, y), (u, v) = places[name], places[other]
            axes.plot([x, u], [y - 0.24, v + 0.24], color=GREY, lw=1)
    for name, (x, y) in places.items():
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.075, y - 0.2),
                0.15,
                0.4,
                boxstyle="round,pad=0.012",
                facecolor="white",
                edgecolor=BLUE,
                lw=1.3,
                zorder=2,
            )
        )
        axes.text(x, y, name, ha="center", va="center", fontsize=9, zorder=3)
    axes.set(xlim=(0, 1), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    return figure


def _all(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return all that a box imports, directly or not."""
    return graph[name] | {far for near in graph[name] for far in _all(graph, near)}
