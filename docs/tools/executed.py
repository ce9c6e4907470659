"""A Sphinx extension: every page is run when the site is built, and shows what its blocks print and draw."""

import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from blocks import run_page
from matplotlib.figure import Figure
from notebooks import write_notebook

PLACE = "_generated"
"""Figures go to this folder of the documentation. It is not kept."""
NOT_RUN = ("results/", "api/", "changelog")


def setup(app: Any) -> dict[str, bool]:
    logging.getLogger("onnx_ir").setLevel(logging.WARNING)  # Sphinx would show its notes
    app.connect("env-before-read-docs", gallery_last)
    app.connect("source-read", insert_outputs, priority=100)
    return {"parallel_read_safe": True}


def gallery_last(app: Any, env: Any, names: list[str]) -> None:
    """Read the gallery after the pages whose pictures it shows."""
    names.sort(key=lambda name: (name == "gallery", name))


def insert_outputs(app: Any, name: str, source: list[str]) -> None:
    """Run a page, and put what it shows below each block."""
    if name.startswith(NOT_RUN):
        return
    text, pieces, position, figures = source[0], [], 0, []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for block, shown in run_page(Path(app.env.doc2path(name)), Path(folder).resolve()):
            pieces += [text[position : block.end], *(_markdown(app, name, block.line, each) for each in shown)]
            position = block.end
            figures += [each for each in shown if isinstance(each, Figure)]
    source[0] = "".join([*pieces, text[position:]])
    if name.startswith("tutorials/") and name != "tutorials/index":
        if not figures:
            raise ValueError(f"{name} draws no figure: a tutorial begins with the first of its figures")
        source[0] = _as_tutorial(Path(app.srcdir) / PLACE, name, text, source[0], figures[0])


def _as_tutorial(folder: Path, name: str, text: str, shown: str, figure: Figure) -> str:
    """Begin a tutorial with the first of its figures, and with a link to the page as a notebook."""
    path = folder / f"{name.removeprefix('tutorials/')}.ipynb"
    write_notebook(text, path)
    figure.savefig(folder / picture_of(name), dpi=150, bbox_inches="tight")
    title, _, rest = shown.partition("\n")
    picture = f"![{_about(figure)}](/{PLACE}/{picture_of(name)})"
    return f"{title}\n\n{picture}\n\n{{download}}`This page as a notebook </{PLACE}/{path.name}>`\n{rest}"


def picture_of(name: str) -> str:
    """Return the name of the file with the first picture of a tutorial."""
    return f"{name.replace('/', '-')}.png"


def _markdown(app: Any, name: str, line: int, shown: Any) -> str:
    if not isinstance(shown, Figure):
        return f"\n\n```{{code-block}} text\n:class: output\n\n{shown.rstrip()}\n```\n"
    path = Path(app.srcdir) / PLACE / f"{name.replace('/', '-')}-{line}.png"
    path.parent.mkdir(exist_ok=True)
    shown.savefig(path, dpi=150, bbox_inches="tight")
    return f"\n\n![{_about(shown)}](/{PLACE}/{path.name})\n"


def _about(figure: Figure) -> str:
    """Return the words of a figure, for readers who do not see it."""
    titles = [axes.get_title() or f"{axes.get_ylabel()} against {axes.get_xlabel()}" for axes in figure.axes]
    return re.sub(r"[\[\]\n]", " ", "; ".join(title for title in titles if title != " against ")) or "Figure"
