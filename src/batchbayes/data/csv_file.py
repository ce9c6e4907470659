"""Read the text of a CSV file, and refuse what could be misread."""

import codecs
import csv
import io
import re
from pathlib import Path

from batchbayes.data.text_table import Table, as_numbers
from batchbayes.errors import BatchbayesError

DELIMITERS = ",;\t"


def read_csv(path: Path) -> Table:
    """Read a table with column names in its first line, separated by commas, semicolons or tabs."""
    text = _decoded(path)
    records = [(line, [cell.strip() for cell in cells]) for line, cells in _records(path, text)]
    while records and not any(records[-1][1]):
        records.pop()
    if len(records) < 2:
        raise _refused(path, "no rows" if records else "an empty file", "check the file")
    (_, header), *rows = records
    _require_header(path, header)
    if len(header) > 1:  # in a table with one column, an empty line is an empty cell
        rows = [(line, cells) for line, cells in rows if cells not in ([], [""])]
    uneven = next(((line, cells) for line, cells in rows if len(cells or [""]) != len(header)), None)
    if uneven:
        got = f"line {uneven[0]} with another number of cells, {len(uneven[1])} instead of {len(header)}"
        raise _refused(path, got, "check the file")
    columns = [[cells[i] if cells else "" for _, cells in rows] for i in range(len(header))]
    return Table(path.name, tuple(header), columns, [f"line {line}" for line, _ in rows])


def _decoded(path: Path) -> str:
    """Decode UTF-8, or UTF-16 with its mark. In other encodings a name could be misread without any sign."""
    raw = path.read_bytes()
    marked = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = raw.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        got = f"a byte {raw[error.start]:#x} in line {line}, which is not UTF-8 (perhaps Latin-1)"
        raise _refused(path, got, "save it as UTF-8, in Excel as 'CSV UTF-8'") from error
    if "\0" in text:
        raise _refused(path, "a zero byte (perhaps UTF-16 or UTF-32, or no text at all)", "save it as UTF-8")
    return text


def _records(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Return the cells of each record, with the number of the line in which the record starts."""
    line = 1
    try:
        first = re.sub(r'"[^"]*"', "", text).partition("\n")[0]  # marks inside quotation marks do not count
        delimiter = max(DELIMITERS, key=first.count)  # a comma if they tie
        reader, records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), []
        for cells in reader:
            records.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        got = f"a record that starts in line {line} and cannot be read ({error})"
        fix = "look for a quotation mark that is not closed, and for cells longer than 131,072 characters"
        raise _refused(path, got, fix) from error
    return records


def _require_header(path: Path, header: list[str]) -> None:
    """Refuse a first line that holds data. A name such as 2019 is allowed beside names that are no numbers."""
    numbers = [cell for cell in header if as_numbers([cell]) is not None]
    if numbers and (len(numbers) == len(header) or not all(cell.isdigit() for cell in numbers)):
        raise _refused(path, f"numbers in the first line, such as {numbers[0]}", "add a first line with column names")


def _refused(path: Path, got: str, fix: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"a line of column names, and rows with as many cells, in {path.name}", got=got, fix=fix
    )
