"""One small table, and the ways to write it: for a terminal, as CSV, Markdown and LaTeX.

Numbers stay numbers until they are written: CSV gets all their digits, the others those of the column's format.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchbayes.errors import BatchbayesError

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    >>> table = Table("Errors", ("method", "RMSE"), (("MCBN", 2.754), ("MCDO", None)), ("", ".2f"), ("Lowest wins.",))
    >>> print(to_terminal(table))
    Errors
    method  RMSE
    MCBN    2.75
    MCDO
    Lowest wins.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: tuple[str, ...] = ()
    """A format specification for the numbers of each column, such as ".3f"; () for all as they are."""
    notes: tuple[str, ...] = ()
    """Sentences that stand under the rows."""

    def __post_init__(self) -> None:
        widths = {len(self.columns), *map(len, self.rows), len(self.formats or self.columns)}
        if len(widths) > 1:
            raise BatchbayesError(
                expected=f"{len(self.columns)} cells a row and as many formats in the table {self.title!r}",
                got=f"rows or formats of {', '.join(map(str, sorted(widths - {len(self.columns)})))}",
                fix="give each column its cell, None where there is nothing to say",
            )

    def texts(self) -> list[list[str]]:
        """The cells as they are written; None is empty."""
        formats = self.formats or ("",) * len(self.columns)
        return [[written(cell, form) for cell, form in zip(row, formats, strict=True)] for row in self.rows]


def written(cell: Cell, form: str) -> str:
    """A cell as text.

    >>> written(0.1234, ".2f"), written("0.1234", ".2f"), written(None, ".2f"), written(-0.0001, ".2f")
    ('0.12', '0.1234', '', '0.00')
    """
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    text = format(cell, form)
    return text[1:] if text.startswith("-") and not re.search("[1-9a-z]", text) else text


def to_terminal(table: Table) -> str:
    """Columns aligned by spaces: numbers to the right, words to the left."""
    texts = table.texts()
    aligned = [
        [name.rjust(width) if right else name.ljust(width) for name in column]
        for column, width, right in zip(
            zip(table.columns, *texts, strict=True), _widths(table, texts), _numeric(table), strict=True
        )
    ]
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    return "\n".join([table.title, *lines, *table.notes])


def to_csv(table: Table) -> str:
    """Names and rows, with every digit of the numbers; the title and the notes are left out.

    >>> to_csv(Table("Errors", ("method", "RMSE"), (("a, b", 0.1), ("c", None))))
    'method,RMSE\\n"a, b",0.1\\nc,\\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """A heading, a pipe table, and the notes as a list.

    >>> print(to_markdown(Table("Errors", ("method", "RMSE"), (("a|b", 0.125),), ("", ".2f"), ("A note.",))))
    ## Errors
    <BLANKLINE>
    | method | RMSE |
    |---|---:|
    | a\\|b | 0.12 |
    <BLANKLINE>
    - A note.
    """
    rule = "".join("|---:" if right else "|---" for right in _numeric(table)) + "|"
    rows = [_pipes(table.columns), rule, *map(_pipes, table.texts())]
    notes = ["", *(f"- {_one_line(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([f"## {_one_line(table.title)}", "", *rows, *notes])


def to_latex(table: Table) -> str:
    r"""A `tabular` for the package booktabs, in a `table` with a caption.

    >>> print(to_latex(Table("Errors", ("method", "RMSE"), (("a_b", 0.125),), ("", ".2f"))))
    \begin{table}
      \centering
      \begin{tabular}{lr}
        \toprule
        method & RMSE \\
        \midrule
        a\_b & 0.12 \\
        \bottomrule
      \end{tabular}
      \caption{Errors}
    \end{table}
    """

    def line(cells: Sequence[str]) -> str:
        return f"    {' & '.join(map(_latex, cells))} \\\\"

    return "\n".join(
        [
            "\\begin{table}",
            "  \\centering",
            f"  \\begin{{tabular}}{{{''.join('r' if right else 'l' for right in _numeric(table))}}}",
            "    \\toprule",
            line(table.columns),
            "    \\midrule",
            *map(line, table.texts()),
            "    \\bottomrule",
            "  \\end{tabular}",
            f"  \\caption{{{' '.join(_latex(text) for text in (table.title, *table.notes))}}}",
            "\\end{table}",
        ]
    )


FORMATS: dict[str, Callable[[Table], str]] = {
    "terminal": to_terminal,
    "csv": to_csv,
    "markdown": to_markdown,
    "latex": to_latex,
}

_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "±": "$\\pm$",
    "−": "$-$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_one_line(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers and no words."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    return [
        any(cell is not None for cell in column) and not any(isinstance(cell, str) for cell in column)
        for column in columns
    ]


def _widths(table: Table, texts: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(table.columns, *texts, strict=True)]
