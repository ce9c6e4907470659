"""Tutorials as notebooks: the text of a page and its Python blocks, as cells."""

import json
import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)


def notebook(text: str) -> dict[str, object]:
    """Return a notebook (nbformat 4.5) of a page in Markdown.

    >>> [cell["cell_type"] for cell in notebook("# Title\\n\\n```python\\n1 + 1\\n```\\nThe end.\\n")["cells"]]
    ['markdown', 'code', 'markdown']
    """
    cells = []
    for number, part in enumerate(BLOCK.split(text)):  # text and code take turns
        if part.strip():
            kind = "code" if number % 2 else "markdown"
            cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": part.strip()}
            cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def write_notebook(text: str, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(notebook(text), indent=1), encoding="utf-8")
