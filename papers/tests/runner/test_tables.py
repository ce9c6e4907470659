import csv
import io
import math

import pytest
from batchbayes_papers.runner.tables import ResultTable, to_csv, to_latex, to_markdown, to_terminal, with_error
from hypothesis import given
from hypothesis import strategies as st

from batchbayes import BatchbayesError

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]))
CELLS = TEXTS | st.floats() | st.integers() | st.none()
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.builds(
        ResultTable,
        TEXTS,
        st.tuples(*[TEXTS] * width),
        st.lists(st.tuples(*[CELLS] * width), max_size=4).map(tuple),
        st.just((".3g",) * width),
        st.lists(TEXTS, max_size=2).map(tuple),
    )
)


@given(TABLES)
def test_csv_keeps_every_digit(table: ResultTable) -> None:
    read = list(csv.reader(io.StringIO(to_csv(table), newline="")))
    assert tuple(read[0]) == table.columns
    for texts, cells in zip(read[1:], table.rows, strict=True):
        for text, cell in zip(texts, cells, strict=True):
            if isinstance(cell, float):
                assert float(text) == cell or (math.isnan(cell) and text == "nan")
            else:
                assert text == ("" if cell is None else str(cell))


@given(TABLES)
def test_markdown_has_one_line_for_each_row(table: ResultTable) -> None:
    lines = to_markdown(table).split("\n")
    rows = lines[2 : 4 + len(table.rows)]
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(table.columns) + 1}
    assert lines[4 + len(table.rows) :] == ([""] if table.notes else []) + [
        f"- {' '.join(note.split())}" for note in table.notes
    ]


@given(TABLES)
def test_latex_escapes_all_special_characters(table: ResultTable) -> None:
    body = to_latex(table).split("\\toprule\n")[1].split("    \\bottomrule")[0]
    lines = [line for line in body.split("\n") if line and line != "    \\midrule"]
    assert len(lines) == 1 + len(table.rows)
    for line in lines:
        plain = line.removesuffix("\\\\").replace("$\\pm$", "").replace("$-$", "").replace("{}", "")
        for mark in "&%$#_{}":
            plain = plain.replace(f"\\{mark}", "")
        assert plain.count("&") == len(table.columns) - 1
        assert not set(plain) & set("%$#_{}~^<>")


def test_columns_are_aligned() -> None:
    table = ResultTable(
        "T", ("name", "number", "mixed"), (("a", 1.0, 2.0), ("bcdefg", -10.25, "x")), ("", ".1f", ".2f")
    )
    assert to_terminal(table).split("\n") == ["T", "name    number  mixed", "a          1.0  2.00", "bcdefg   -10.2  x"]


def test_a_table_without_rows_has_its_names() -> None:
    table = ResultTable("T", ("a", "b"), ())
    assert to_terminal(table) == "T\na  b"
    assert to_csv(table) == "a,b\n"
    assert "| a | b |" in to_markdown(table)
    assert "a & b" in to_latex(table)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(BatchbayesError, match="2 cells in each row"):
        ResultTable("T", ("a", "b"), ((1.0,),))
    with pytest.raises(BatchbayesError, match="as many formats"):
        ResultTable("T", ("a", "b"), ((1.0, 2.0),), (".1f",))


@pytest.mark.parametrize(("values", "expected"), [
    ((0.5, math.nan), "nan ± nan"), ((math.inf, 1.0), "inf ± nan"), ((math.inf, -math.inf), "nan ± nan"),
])  # fmt: skip
def test_a_run_that_diverged_is_a_value_too(values: tuple[float, ...], expected: str) -> None:
    assert with_error(values, ".1f") == expected
