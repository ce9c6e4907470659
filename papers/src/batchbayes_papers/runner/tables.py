"""A small table, and functions that write it for a terminal or as CSV, Markdown or LaTeX.

CSV has all digits of each number. The other formats use the number format of the column.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from batchbayes import BatchbayesError

CellValue = str | float | int | None


@dataclass(frozen=True)
class ResultTable:
    """A title, named columns, rows and notes.

    >>> rows = (("MCBN", 2.754), ("MCDO", None))
    >>> table = ResultTable("Errors", ("method", "RMSE"), rows, formats=("", ".2f"), notes=("Low is good.",))
    >>> print(to_terminal(table))
    Errors
    method  RMSE
    MCBN    2.75
    MCDO
    Low is good.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[CellValue, ...], ...]
    formats: tuple[str, ...] = ()
    """One format for the numbers of each column, for example ".3f"; () if no column has a format."""
    notes: tuple[str, ...] = ()
    """Sentences below the rows."""

    def __post_init__(self) -> None:
        widths = {len(self.columns), *map(len, self.rows), len(self.formats or self.columns)}
        if len(widths) > 1:
            raise BatchbayesError(
                expected=f"{len(self.columns)} cells in each row and as many formats in the table {self.title!r}",
                got=f"rows or formats with {', '.join(map(str, sorted(widths - {len(self.columns)})))}",
                fix="give each column a cell, and use None for an empty one",
            )

    def has_words(self) -> list[bool]:
        """Return for each column whether it has words, which stand on the left in a page."""
        return [is_text(column) for column in zip(*self.rows, strict=True)] if self.rows else [True] * len(self.columns)

    def cell_texts(self) -> list[list[str]]:
        """Return the cells of each row as texts. None becomes an empty text."""
        formats = self.formats or ("",) * len(self.columns)
        return [[cell_text(cell, form) for cell, form in zip(row, formats, strict=True)] for row in self.rows]


def is_text(column: Iterable[CellValue]) -> bool:
    """Return whether a column has words: a text that does not begin with a number.

    >>> is_text(["MCBN", None]), is_text([0.1, "0.1 ± 0.2", "-3 (1 run)"]), is_text([None])
    (True, False, False)
    """
    return any(isinstance(cell, str) and not re.match(r"[-+−]?\d|$", cell) for cell in column)


def mean_of(rows: Iterable[object], name: str) -> float | None:
    """Return the mean of an attribute over the rows that have it; None if no row does."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return sum(values) / len(values) if values else None


def with_error(values: Sequence[float], form: str) -> str:
    """Return the mean of several runs with two standard errors; no text if there are no runs.

    A run that diverged, with NaN or infinity, leaves no standard error.

    >>> with_error([1.0, 2.0, 3.0], ".1f"), with_error([2.0], ".0f"), with_error([], ".0f")
    ('2.0 ± 1.2', '2', '')
    """
    if not values:
        return ""
    is_finite = all(map(math.isfinite, values))  # the functions of `statistics` fail otherwise
    mean = format(fmean(values) if is_finite else sum(values) / len(values), form)
    spread = stdev(values) if is_finite and len(values) > 1 else math.nan
    return mean if len(values) == 1 else f"{mean} ± {2 * spread / len(values) ** 0.5:{form}}"


def interleaved(ours: Sequence[CellValue], published: Sequence[CellValue]) -> list[CellValue]:
    """Return our values, each with the published one behind it.

    >>> interleaved([1, 2], [3, 4])
    [1, 3, 2, 4]
    """
    return [cell for pair in zip(ours, published, strict=True) for cell in pair]


def cell_text(cell: CellValue, form: str) -> str:
    """Return a cell as text. A number that is rounded to zero has no sign.

    >>> cell_text(0.1234, ".2f"), cell_text("0.1234", ".2f"), cell_text(None, ".2f"), cell_text(-0.0001, ".2f")
    ('0.12', '0.1234', '', '0.00')
    """
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    text = format(cell, form)
    return text[1:] if text.startswith("-") and not re.search("[1-9a-z]", text) else text


def to_terminal(table: ResultTable) -> str:
    """Return aligned columns: columns of numbers are aligned to the right, all others to the left."""
    aligned = []
    columns = zip(table.columns, *table.cell_texts(), strict=True)
    for column, right in zip(columns, _numeric(table), strict=True):
        width = max(map(len, column))
        aligned.append([text.rjust(width) if right else text.ljust(width) for text in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    return "\n".join([table.title, *lines, *table.notes])


def to_csv(table: ResultTable) -> str:
    """Return column names and rows, without the title and the notes.

    >>> to_csv(ResultTable("Errors", ("method", "RMSE"), (("a, b", 0.1), ("c", None))))
    'method,RMSE\\n"a, b",0.1\\nc,\\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def to_markdown(table: ResultTable) -> str:
    """Return a heading, a pipe table, and the notes as a list.

    >>> print(to_markdown(ResultTable("Errors", ("method", "RMSE"), (("a|b", 0.125),), ("", ".2f"), ("A note.",))))
    ## Errors
    <BLANKLINE>
    | method | RMSE |
    |---|---:|
    | a\\|b | 0.12 |
    <BLANKLINE>
    - A note.
    """
    rule = "".join("|---:" if right else "|---" for right in _numeric(table)) + "|"
    rows = [_pipes(table.columns), rule, *map(_pipes, table.cell_texts())]
    notes = ["", *(f"- {_one_line(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([f"## {_one_line(table.title)}", "", *rows, *notes])


def to_latex(table: ResultTable) -> str:
    r"""Return a `table` with a label made from its title. The title is the first sentence of the caption.

    >>> table = ResultTable("Errors, by size", ("method", "RMSE"), (("a_b", 0.125),), ("", ".2f"), ("Low is good.",))
    >>> print(to_latex(table))
    % The rules need \usepackage{booktabs} in the preamble.
    \begin{table}
      \centering
      \caption{Errors, by size. Low is good.}
      \label{tab:errors-by-size}
      \begin{tabular}{lr}
        \toprule
        method & RMSE \\
        \midrule
        a\_b & 0.12 \\
        \bottomrule
      \end{tabular}
    \end{table}
    """

    def line(cells: Sequence[str]) -> str:
        return f"    {' & '.join(map(_latex, cells))} \\\\"

    return "\n".join(
        [
            "% The rules need \\usepackage{booktabs} in the preamble.",
            "\\begin{table}",
            "  \\centering",
            f"  \\caption{{{' '.join(_latex(_sentence(text)) for text in (table.title, *table.notes))}}}",
            f"  \\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')}}}",
            f"  \\begin{{tabular}}{{{''.join('r' if right else 'l' for right in _numeric(table))}}}",
            "    \\toprule",
            line(table.columns),
            "    \\midrule",
            *map(line, table.cell_texts()),
            "    \\bottomrule",
            "  \\end{tabular}",
            "\\end{table}",
        ]
    )


FORMATS: dict[str, Callable[[ResultTable], str]] = {
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


def _sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends a sentence already."""
    return text if text.rstrip().endswith((".", "?", "!")) else f"{text.rstrip()}."


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_one_line(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _numeric(table: ResultTable) -> list[bool]:
    """Return for each column whether it holds numbers and no texts."""
    columns = [[row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))]
    return [bool(column) and not any(isinstance(cell, str) for cell in column) for column in columns]
