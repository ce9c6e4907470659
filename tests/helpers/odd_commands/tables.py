"""Tables with odd formats, columns, cells and rows."""

import csv
import io

from helpers.odd_commands.command import NONE, Command


def odd_table(source, bases, folder):
    """A .csv file of some rows, changed in one or two ways."""
    base = bases["regression"]
    rows = source.sample(range(40), source.choice([1, 3, 12]))
    table = Table(source, [[f"{float(v)!r}" for v in base.inputs[row]] for row in rows])
    expected = base.answers[rows]
    clear = True
    for change in source.sample(TABLE_CHANGES, source.choice([1, 1, 2])):
        clear &= change(source, table)
    path = folder / "odd.csv"
    path.write_bytes(table.encoded())
    return Command("predict", base.options | {"--input": path}, expected if clear else NONE)


class Table:
    """A table of text, and how it is written."""

    def __init__(self, source, cells):
        self.header, self.cells = ["left", "right"], cells
        self.delimiter, self.end, self.encoding, self.quote = ",", "\n", "utf-8", False
        self.raw = []

    def encoded(self):
        file = io.StringIO(newline="")
        quoting = csv.QUOTE_ALL if self.quote else csv.QUOTE_MINIMAL
        writer = csv.writer(file, delimiter=self.delimiter, lineterminator=self.end, quoting=quoting)
        if self.header is not None:
            writer.writerow(self.header)
        writer.writerows(self.cells)
        data = file.getvalue().encode(self.encoding)
        for change in self.raw:
            data = change(data)
        return data

    def add(self, name, cell, place=None):
        at = len(self.header or "12") if place is None else place
        for number, row in enumerate(self.cells):
            row.insert(at, cell(number))
        if self.header is not None:
            self.header.insert(at, name)


def change_format(source, table):
    what = source.choice(
        ["delimiter", "end", "quote", "utf-8-sig", "utf-16", "latin-1", "no newline", "blank lines", "nul"]
    )
    if what == "delimiter":
        table.delimiter = source.choice([";", "\t"])
    elif what == "end":
        table.end = source.choice(["\r\n", "\r"])
    elif what == "quote":
        table.quote = True
    elif what in ("utf-8-sig", "utf-16", "latin-1"):
        table.add("größe", lambda number: "7", 0)
        table.encoding = what
    elif what == "no newline":
        table.raw.append(bytes.rstrip)
    elif what == "blank lines":
        table.raw.append(lambda data: data + b"\n\n\n")
    else:
        table.raw.append(lambda data: data.replace(b".", b"\0", 1))
        return False
    return True


def change_columns(source, table):
    if not table.cells:
        return False
    what = source.choice(
        ["order", "extra", "text", "target", "twice", "missing", "no header", "renamed", "spaces", "empty name"]
    )
    if what == "order":
        table.header = table.header and table.header[::-1]
        table.cells = [row[::-1] for row in table.cells]
    elif what == "extra":
        table.add("more", lambda number: "1", source.choice([0, None]))
    elif what == "text":
        table.add("remark", lambda number: source.choice(['a "word"', "a,b;c", "x\ny", "=1+1", ""]), 0)
    elif what == "target":
        table.add("height", lambda number: source.choice(["", "5", "abc"]))
    elif what == "twice":
        table.add("left", lambda number: "99", source.choice([0, None]))
        return False
    elif what == "missing":
        table.cells = [row[:-1] for row in table.cells]
        table.header = table.header and table.header[:-1]
        return False
    elif what == "no header":
        table.header = None
        return False
    elif what == "renamed":
        table.header = table.header and [name.replace("left", "Left") for name in table.header]
        return False
    elif what == "spaces":
        table.header = table.header and [f" {name} " for name in table.header]
    else:
        table.add("", lambda number: str(number), 0)
        return False
    return True


def change_cell(source, table):
    if not table.cells or len(table.cells[0]) < 2 or "left" in table.cells[-1]:
        return False
    column = (table.header or ["left"]).index("left") if "left" in (table.header or ["left"]) else 0
    row = source.choice(table.cells)
    cell = row[column]
    same = [
        f" {cell} ",
        f"{float(cell):.17e}",
        f"{cell}0" if "e" not in cell else cell,
        f"+{cell}" if cell[0] != "-" else cell,
    ]
    bad = ["", "NaN", "inf", "-Infinity", "abc", "1_0", "0x1A", "１", "1e400", "1e39", "1,5", "5%", "None", "TRUE",
           "1 2", "--1",
           "9" * 200_000, "1;2", "'1", "1.5abc", "١", "½", "1e", "#N/A", "01/02/2020"]  # fmt: skip
    if source.random() < 0.3:
        row[column] = source.choice(same)
        return True
    row[column] = source.choice(bad)
    return False


def change_rows(source, table):
    what = source.choice(["none", "ragged", "long", "trailing", "header again", "comment"])
    if what == "none":
        table.cells = []
    elif what == "ragged":
        table.cells[source.randrange(len(table.cells))].pop()
    elif what == "long":
        table.cells[source.randrange(len(table.cells))].append("4")
    elif what == "trailing":
        table.raw.append(lambda data: data.replace(table.end.encode(), f",{table.end}".encode()))
    elif what == "header again":
        table.cells.append(list(table.header or ["left", "right"]))
    else:
        table.raw.append(lambda data: b"# made today\n" + data)
    return False


TABLE_CHANGES = [change_format, change_columns, change_cell, change_rows]
