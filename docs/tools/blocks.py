"""The code blocks of a Markdown page: found, run in order, and followed by what they print.

A page is run as a reader would run it: from the top, in one folder, with one set of names.

- A `python` block is executed. As in a notebook, what it prints and the value of its last line are shown below it.
- A `python` block that begins with a comment such as `# mine.py` is a file. It is written, not executed.
- In a `sh` block, commands of batchbayes are executed, and what they print is shown. Other lines (`pip`, `make`) are
  not executed.
"""

import ast
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w/]+\.py)\n")

Show = Callable[[Any], str]


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    code: str
    line: int
    """The line of the page where its code begins."""
    end: int
    """The position in the text after the block."""


def find_blocks(text: str) -> list[Block]:
    """Return the blocks of a page that are run.

    >>> [(block.language, block.code, block.line) for block in find_blocks("Add:\\n\\n```python\\n1 + 1\\n```\\n")]
    [('python', '1 + 1\\n', 4)]
    """
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[1], match[2], line, match.end()))
    return found


def run_page(path: Path, folder: Path) -> Iterator[tuple[Block, list[Any]]]:
    """Run the blocks of a page in a folder. Yield each block with what it shows: text, and matplotlib figures."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in find_blocks(path.read_text(encoding="utf-8")):
        with _inside(folder):
            shown = _run_python(block, path, names) if block.language == "python" else _run_commands(block, path)
        yield block, shown


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, whose modules can be imported. Forget these modules afterwards: other pages have their own."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            places = [getattr(sys.modules[name], "__file__", None), *getattr(sys.modules[name], "__path__", [])]
            if any(folder in Path(place).parents for place in places if place):
                del sys.modules[name]


def _run_python(block: Block, path: Path, names: dict[str, Any]) -> list[Any]:
    if file_name := FILE_NAME.match(block.code):
        Path(file_name[1]).parent.mkdir(exist_ok=True)
        Path(file_name[1]).write_text(block.code, encoding="utf-8")
        return []
    tree = ast.parse("\n" * (block.line - 1) + block.code, str(path))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
    shown: list[Any] = [printed.getvalue()] if printed.getvalue() else []
    if isinstance(value, Figure):
        return [*shown, value]
    return shown if value is None else [*shown, repr(value)]


def _run_commands(block: Block, path: Path) -> list[Any]:
    from batchbayes.cli import main

    printed = io.StringIO()
    os.environ["COLUMNS"] = "110"  # the width of --help
    for command in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words[:1] != ["batchbayes"]:
            continue
        with redirect_stdout(printed):
            try:
                code = main(words[1:])
            except SystemExit as end:  # --help
                code = end.code
        if code:
            raise RuntimeError(f"{path}, line {block.line}: exit code {code} of {command}")
    return [printed.getvalue()] if printed.getvalue() else []
