"""Tables: columns by name, ids, classes, and files that could be misread."""

import json
import math
import os
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchbayes import BatchbayesError
from batchbayes.errors import BatchbayesWarning
from batchbayes.report.read import tables
from batchbayes.report.read.reading import Reading, cleaned
from batchbayes.report.read.schema import Column, Schema
from batchbayes.report.read.sources import example_shape, read_examples


@pytest.fixture
def table(tmp_path):
    """A function that writes a table and reads it."""

    def read(content, target=None, **known):
        path = tmp_path / "t.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_examples(path, Reading(target, **known))

    return read


def inputs_of(examples):
    return torch.cat([inputs for inputs, _ in examples]).tolist()


TRAINING = "id,a,height,b\n007,1,10.5,2.5\nr2,3,11,4\n"


def test_the_target_and_the_ids_are_no_inputs(table):
    examples = table(TRAINING, "height", id_column="id")
    assert inputs_of(examples) == [[1, 2.5], [3, 4]]
    assert examples.targets().tolist() == [10.5, 11]
    assert examples.ids() == ("007", "r2")
    assert (examples.feature_names, examples.target_name) == (("a", "b"), "height")


def test_the_schema_of_a_training_table(table):
    schema = table(TRAINING, "height", id_column="id").schema
    assert schema == Schema(
        columns=(Column("a", "integer", 1, 3), Column("b", "real", 2.5, 4)),
        target="height",
        target_dtype="real",
        id_column="id",
    )
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_a_table_in_another_order_is_put_right_by_name(table):
    schema = table(TRAINING, "height", id_column="id").schema
    examples = table("height,b,id,a\n7,2,x,1\n", schema=schema)
    assert inputs_of(examples) == [[1, 2]]
    assert examples.targets().tolist() == [7]
    assert examples.targets().is_floating_point()  # as in training
    assert examples.ids() == ("x",)
    assert examples.schema == schema


def test_new_data_needs_neither_targets_nor_ids(table):
    schema = table(TRAINING, "height", id_column="id").schema
    for text in ("b,a\n2,1\n", "b,a,height\n2,1,\n"):
        examples = table(text, schema=schema)
        assert inputs_of(examples) == [[1, 2]]
        assert [targets for _, targets in examples] == [None]
        assert examples.ids() is None


def test_missing_columns_are_refused(table):
    schema = table(TRAINING, "height", id_column="id").schema
    with pytest.raises(BatchbayesError, match=r"2 input columns of the training table in t.csv; got no b; it has a, B"):
        table("a,B\n1,2\n", schema=schema)


def test_extra_columns_are_named_and_not_used(table):
    schema = table(TRAINING, "height", id_column="id").schema
    with pytest.warns(BatchbayesWarning, match=r"did not have: colour, c\. They are not used"):
        examples = table("colour,a,c,b\nred,1,9,2\n", schema=schema)
    assert inputs_of(examples) == [[1, 2]]


def test_the_ids_of_a_split_follow_its_rows(table):
    text = "name,x,y\n" + "".join(f"row {i},{i},{i / 2}\n" for i in range(300))
    part, rest = table(text, "y", id_column="name").split(0.3, seed=1)
    assert part.ids() == tuple(f"row {row}" for row in part.rows().tolist())
    assert not set(part.ids()) & set(rest.ids())


def test_names_of_classes_get_the_numbers_of_training(table):
    training = table("a,k\n1,dog\n2,cat\n3,emu\n", "k")
    assert training.targets().tolist() == [1, 0, 2]
    assert training.class_names == training.schema.class_names == ("cat", "dog", "emu")
    schema = Schema.from_json(json.loads(json.dumps(training.schema.to_json())))
    new = table("k,a\nemu,1\ndog,2\n", schema=schema)
    assert new.targets().tolist() == [2, 1]
    assert new.class_names == training.class_names
    assert table("a,k\n1,emu\n", "k", class_names=training.class_names).targets().tolist() == [2]
    with pytest.raises(BatchbayesError, match=r"upper and lower case in .*; got 'emu' and 'emu'"):
        table("a,k\n1,emu\n", "k", class_names=("emu", "emu"))
    with pytest.raises(BatchbayesError, match=r"classes of training in line 3, column 'k' of t.csv, .*'ibis'"):
        table("k,a\nemu,1\nibis,2\n", schema=schema)


def test_names_are_refused_where_training_had_numbers(table):
    schema = table("a,k\n1,0\n2,1\n", "k").schema
    with pytest.raises(BatchbayesError, match=r"numbers in column 'k' of t\.csv; got 'yes' in line 2"):
        table("a,k\n1,yes\n2,no\n", schema=schema)


def test_whole_numbers_are_classes_unless_training_had_fractions(table):
    assert table("a,k\n1,0\n3,2\n", "k").targets().dtype == torch.int64
    schema = table("a,k\n1,0.5\n3,2\n", "k").schema
    assert table("a,k\n1,0\n3,2\n", schema=schema).targets().dtype == torch.float64


def test_real_targets_keep_their_digits(table):
    assert table("a,k\n1,1000000000.25\n3,1000000000.5\n", "k").targets().tolist() == [1000000000.25, 1000000000.5]


@pytest.mark.parametrize("cell", ["1e20", "100000000000000000000", "-1e20", "9223372036854775808"])
def test_large_targets_keep_their_sign_and_size(table, cell):
    assert table(f"a,y\n1,{cell}\n2,1\n", "y").targets().tolist() == pytest.approx([float(cell), 1])


def test_large_integers_are_exact(table):
    assert table("a,y\n1,9223372036854775807\n", "y").targets().tolist() == [2**63 - 1]


@pytest.mark.parametrize("cell", ["NA", "None", "null", "?", "N/A", "nan", " ", "#N/A", "<NA>"])
def test_a_missing_name_is_no_class(table, cell):
    with pytest.raises(BatchbayesError, match=r"names of classes in line 3, column 'k' of t\.csv; got "):
        table(f"a,k\n1,cat\n2,{cell}\n3,dog\n", "k")


def test_names_that_look_the_same_are_one_class(table):
    examples = table("a,k\n1,caf\u00e9\n2,cafe\u0301\n3,caf\u00e9\u200b\n4,tea \n5,\ufefftea\n", "k")
    assert examples.class_names == ("caf\u00e9", "tea")
    assert examples.targets().tolist() == [0, 0, 0, 1, 1]
    for first, second in (("True", "true"), ("Cat", "cat"), ("STRASSE", "stra\u00dfe")):
        with pytest.raises(BatchbayesError, match=f"upper and lower case in .*; got '{first}' and '{second}'"):
            table(f"a,k\n1,{first}\n2,{second}\n", "k")


def test_a_wrong_target_or_id_column(table):
    schema = table(TRAINING, "height", id_column="id").schema
    with pytest.raises(BatchbayesError, match="target column of training, 'height'; got 'a'"):
        table(TRAINING, "a", schema=schema)
    with pytest.raises(BatchbayesError, match=r"a target column 'y' in t.csv; got columns id, a, height, b"):
        table(TRAINING, "y")
    with pytest.raises(BatchbayesError, match=r"an id column 'name' in t.csv; got columns id"):
        table(TRAINING, "height", id_column="name")
    with pytest.raises(BatchbayesError, match="different columns for targets and ids"):
        table(TRAINING, "height", id_column="height")


EXPECTED = [[1, 2], [3, 4]]
READABLE = {
    "UTF-8 with a mark": b"\xef\xbb\xbfa,b\n1,2\n3,4\n",
    "UTF-16": "a,b\n1,2\n3,4\n".encode("utf-16"),
    "UTF-16, big-endian": b"\xfe\xff" + "a,b\n1,2\n3,4\n".encode("utf-16-be"),
    "semicolons": "a;b\n1;2\n3;4\n",
    "tabs": "a\tb\n1\t2\n3\t4\n",
    "lines of Windows": "a,b\r\n1,2\r\n3,4\r\n",
    "empty lines": "a,b\n\n1,2\n  \n3,4\n\n\n",
    "empty rows at the end": "a,b\n1,2\n3,4\n,\n,\n",
    "spaces": "a , b\n 1, 2\n3 ,4\n",
    "quoted cells": '"a","b"\n"1","2"\n3,4\n',
    "no end of line": "a,b\n1,2\n3,4",
    "plus and exponents": "a,b\n+1,.2e1\n30e-1,4.\n",
    "years as names": "a,2019\n1,2\n3,4\n",
}


@pytest.mark.parametrize("name", READABLE)
def test_odd_files_that_are_read(table, name):
    assert inputs_of(table(READABLE[name])) == EXPECTED


def test_quoted_newlines_and_delimiters_do_not_shift_rows(table):
    examples = table('name,"a\nb"\n"x,\ny",1\nz,2\n', id_column="name")
    assert examples.ids() == ("x,\ny", "z")
    assert examples.feature_names == ("a\nb",)
    with pytest.raises(BatchbayesError, match="'w' in line 5"):
        table('name,"a\nb"\n"x,\ny",1\nz,w\n', id_column="name")


REFUSED = {
    "duplicate names": ("a,b,a\n1,2,3\n", "different column names in t.csv; got a more than once"),
    "duplicate names after spaces": ("a, a\n1,2\n", "got a more than once"),
    "no header": ("1,2\n3,4\n", "numbers in the first line, such as 1"),
    "no header beside words": ("row1,2.5\nrow2,4\n", "numbers in the first line, such as 2.5"),
    "a column without name": (",a\n0,1\n", "a name for each column of t.csv; got none for column 1"),
    "an underscore": ("a,b\n1,2\n3,1_0\n", "numbers in column 'b' of t.csv; got '1_0' in line 3"),
    "digits of another script": ("a,b\n1,٣\n", "'٣' in line 2"),
    "a decimal comma": ("a;b\n1;2,5\n", "'2,5' in line 2"),
    "a decimal comma in the target": ("a;y\n1;2,5\n", "column 'y' of t.csv; got '2,5' in line 2"),
    "a unit in the target": ("a,y\n1,2 MPa\n", "column 'y' of t.csv; got '2 MPa' in line 2"),
    "a word among numbers": ("a,y\n1,2\n3,high\n", "column 'y' of t.csv; got 'high' in line 3"),
    "infinity": ("a,b\n1,inf\n", "'inf' in line 2"),
    "not a number": ("a,b\n1,NaN\n", "'NaN' in line 2"),
    "an empty cell": ("a,b\n1,2\n\n,4\n", "column 'a' of t.csv; got an empty cell in line 4"),
    "an empty cell in the target": ("a,y\n1,cat\n2,\n", "in line 3, column 'y' of t.csv; got an empty cell"),
    "an empty line in one column": ("a\n1\n\n3\n", "an empty cell in line 3"),
    "a number that is too large": ("a,b\n1,1e39\n", "'1e39' in line 2"),
    "a number with 400 digits": ("a,b\n1," + "9" * 400 + "\n", "999... in line 2|999...' in line 2"),
    "only a target": ("y\n1\n2\n", "at least one input column in t.csv; got no column beside y"),
    "only names of columns": ("a,b\n", "got no rows"),
    "nothing": ("", "got an empty file"),
    "too few cells": ("a,b\n1,2\n\n3\n", "line 4 with another number of cells, 1 instead of 2"),
    "a cell of 200 kB": (f"a,b\n1,{'7' * 200_000}\n", "starts in line 2 and cannot be read .field larger"),
    "a quotation mark that is not closed": ('a,b\n1,2\n"3,4\n', "starts in line 3 and cannot be read"),
    "Latin-1": ("a,größe\n1,2\n".encode("latin-1"), r"a byte 0xf6 in line 1, which is not UTF-8 \(perhaps Latin-1"),
    "UTF-16 without a mark": ("a,b\n1,2\n".encode("utf-16-le"), "a zero byte"),
    "UTF-32": ("a,b\n1,2\n".encode("utf-32"), "a zero byte|is not UTF-8"),
    "half of UTF-16": ("a,b\n1,2\n".encode("utf-16")[:-1], "is not UTF"),
    "bytes": (bytes(range(256)), "is not UTF-8"),
    "spaces between columns": ("a b\n1 2\n", "'1 2' in line 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_could_be_misread_are_refused(table, name):
    text, message = REFUSED[name]
    content = text if isinstance(text, bytes) else text.encode()
    target = "y" if b"y" in content.split(b"\n")[0] else None
    with pytest.raises(BatchbayesError, match=message):
        table(content, target)


def test_values_that_training_did_not_have_are_named():
    schema = Schema((Column("a", "integer", 0, 5), Column("b", "real", 0.1, 0.3)))
    assert schema.differences(torch.tensor([[5.0, 0.1], [0.0, 0.3]])) == []  # 0.1 is rounded to 32 bits in both
    assert schema.differences(torch.tensor([[6.0, 0.2], [2.5, 0.2]])) == [
        "a: 1 of 2 values outside 0 to 5",
        "a: fractions, but only whole numbers in training",
    ]


GOOD = Schema((Column("a", "real", 0, 1),), target="y", target_dtype="integer", class_names=("p", "q")).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"columns": None},
        {"columns": [{"name": "a"}]},
        {"columns": GOOD["columns"] * 2},
        {"columns": [GOOD["columns"][0] | {"low": 2}]},
        {"columns": [GOOD["columns"][0] | {"high": float("nan")}]},
        {"columns": [GOOD["columns"][0] | {"high": 10**400}]},
        {"columns": [GOOD["columns"][0] | {"high": "1"}]},
        {"columns": [GOOD["columns"][0] | {"dtype": "text"}]},
        {"columns": [GOOD["columns"][0] | {"name": 3}]},
        {"class_names": "pq"},
        {"class_names": [1, 2]},
        {"target": 5},
        {"target_dtype": "complex"},
        {"other": 1},
    ],
)
def test_a_damaged_schema_is_refused(change):
    assert Schema.from_json(GOOD).class_names == ("p", "q")
    with pytest.raises(BatchbayesError, match="expected the schema of a training table; got something else"):
        Schema.from_json(GOOD | change)


PLAIN = {
    "whole numbers and fractions": "a,b,y\n1,.5,3\n-2,4.,4\n",
    "ids with zeros in front": "id,a\n007,1\n08,2\n",
    "large integers": "a,y\n9223372036854775807,1\n18446744073709551615,2\n",
    "a negative zero": "a,b\n-0,1\n2,-0.5\n",
    "an infinity": "a,b\n1,1e999\n2,3\n",
    "an empty cell": "a,b\n1,\n2,3\n",
    "an empty line": "a,b\n1,2\n\n2,3\n",
    "too few cells": "a,id\n1,2\n2\n",
    "too many cells": "a,b\n1,2\n2,3,4\n",
    "two signs": "a,b\n1,--2\n2,3\n",
    "a delimiter at the end": "a,b\n1,2,\n2,3,\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_long_tables_of_numbers_are_read_as_short_ones(table, monkeypatch, name):
    """Pandas reads them, and what it would guess is left to the strict reader."""

    def outcome(lines):
        monkeypatch.setattr(tables, "LONG", lines)
        target, id_column = ("y" if "y" in PLAIN[name] else None), ("id" if "id" in PLAIN[name] else None)
        try:
            found = table(PLAIN[name], target, id_column=id_column)
        except BatchbayesError as error:
            return str(error)
        targets = None if target is None else (found.targets().tolist(), found.targets().dtype)
        return str(inputs_of(found)), found.schema, found.ids(), targets

    assert outcome(0) == outcome(10**9)


def test_numbers_of_a_long_table_keep_all_digits(table):
    values = torch.randn(2**15, 2, dtype=torch.float64).tolist()
    found = table("a,y\n" + "".join(f"{a!r},{y!r}\n" for a, y in values), "y", input_dtype="float64")
    assert [[a, y] for (a,), y in zip(inputs_of(found), found.targets().tolist(), strict=True)] == values


def test_time_grows_as_the_number_of_columns(table):
    header = ",".join(f"column {number}" for number in range(50_000))
    schema = table(f"{header}\n{','.join('7' * 50_000)}\n").schema
    assert len(table(f"{header}\n{','.join('7' * 50_000)}\n", schema=schema).feature_names) == 50_000


def test_a_pipe_is_not_waited_for(tmp_path):
    for suffix in ("csv", "npz", "zarr", "parquet", "png"):
        os.mkfifo(tmp_path / f"t.{suffix}")
        with pytest.raises(BatchbayesError, match=r"expected a \.npz, \.zarr, \.csv or \.parquet file"):
            read_examples(tmp_path / f"t.{suffix}")
        with pytest.raises(BatchbayesError, match=r"expected a \.npz, \.zarr, \.csv or \.parquet file"):
            example_shape(tmp_path / f"t.{suffix}")


def test_parquet_of_pandas_has_no_column_of_row_numbers(tmp_path):
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "k": ["cat ", "dog", "cat"]})
    frame[frame.a != 2].to_parquet(tmp_path / "t.parquet")
    examples = read_examples(tmp_path / "t.parquet", Reading("k"))
    assert (examples.feature_names, inputs_of(examples)) == (("a",), [[1], [3]])
    assert (examples.class_names, examples.targets().tolist()) == (("cat",), [0, 0])
    frame.set_index("a").to_parquet(tmp_path / "t.parquet")  # an index with a name is a column
    assert inputs_of(read_examples(tmp_path / "t.parquet", Reading("k"))) == [[1], [2], [3]]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": [1.0, 3.0], "k": [0.5, 2.5], "n": [7, 1], "id": ["p", "q"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    examples = read_examples(tmp_path / "t.parquet", Reading("k", "id"))
    assert (inputs_of(examples), examples.targets().tolist()) == ([[1, 7], [3, 1]], [0.5, 2.5])
    assert examples.schema.columns[1] == Column("n", "integer", 1, 7)
    with pytest.raises(BatchbayesError, match=r"column 'id' of t.parquet; got 'p' in row 1"):
        read_examples(tmp_path / "t.parquet", Reading("k"))
    kinds = {
        "words": ["1", " 2.5"], "halves": np.array([0.5, 2], np.float16), "large": np.full(2, 2**63, np.uint64),
        "decimals": [Decimal("1.50"), Decimal("-2")], "categories": pyarrow.array([7, 8]).dictionary_encode(),
    }  # fmt: skip
    parquet.write_table(pyarrow.table(kinds), tmp_path / "t.parquet")
    examples = read_examples(tmp_path / "t.parquet")
    assert inputs_of(examples) == [[1, 0.5, 2.0**63, 1.5, 7], [2.5, 2, 2.0**63, -2, 8]]
    assert [column.dtype for column in examples.schema.columns] == ["real"] * 4 + ["integer"]
    for values, message in (([1.0, math.nan], "'nan' in row 2"), ([1e39], "'1e.39' in row 1"), ([True], "'True' in")):
        parquet.write_table(pyarrow.table({"a": values}), tmp_path / "t.parquet")
        with pytest.raises(BatchbayesError, match=message):
            read_examples(tmp_path / "t.parquet")
    parquet.write_table(pyarrow.table({"a": [1.0, None]}), tmp_path / "t.parquet")
    with pytest.raises(BatchbayesError, match="an empty cell in row 2"):
        read_examples(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(BatchbayesError, match="a damaged file"):
        read_examples(tmp_path / "t.parquet")


letters = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
names = letters.map(lambda name: cleaned(f"n{name}n"))  # two names may look the same, and are the same then
integers = st.integers(-(10**6), 10**6).map(float)
reals = st.floats(-(2.0**99), 2.0**99, allow_subnormal=False, width=32)


@given(data=st.data())
def test_order_and_delimiter_and_encoding_of_a_table_do_not_matter(data, tmp_path_factory):
    columns = data.draw(st.lists(names, min_size=1, max_size=5, unique=True), "columns")
    kinds = data.draw(st.lists(st.sampled_from([integers, reals]), min_size=len(columns), max_size=len(columns)))
    rows = data.draw(st.lists(st.tuples(*kinds), min_size=1, max_size=6), "rows")
    order = data.draw(st.permutations(range(len(columns))), "order")

    def read(order, delimiter, encoding, **known):
        quoted = ['"' + columns[i].replace('"', '""') + '"' for i in order]
        cells = [[repr(row[i]) if kinds[i] is reals else str(int(row[i])) for i in order] for row in rows]
        path = tmp_path_factory.mktemp("tables") / "t.csv"
        path.write_text("\n".join(map(delimiter.join, [quoted, *cells])), encoding=encoding, newline="")
        return read_examples(path, Reading(**known))

    first = read(range(len(columns)), ",", "utf-8")
    schema = Schema.from_json(json.loads(json.dumps(first.schema.to_json())))
    again = read(
        order, data.draw(st.sampled_from(",;\t")), data.draw(st.sampled_from(["utf-8-sig", "utf-16"])), schema=schema
    )
    assert inputs_of(first) == inputs_of(again) == [list(row) for row in rows]
    assert again.feature_names == first.feature_names == tuple(columns)
    assert [column.dtype for column in schema.columns] == ["real" if kind is reals else "integer" for kind in kinds]
    assert [(c.low, c.high) for c in schema.columns] == [(min(c), max(c)) for c in zip(*rows, strict=True)]
    assert schema.differences(torch.tensor(inputs_of(again))) == []


@given(content=st.binary(max_size=60) | st.text(st.sampled_from('ab1,;\n"\r.e-_ \t'), max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused_in_words(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "t.csv"
    path.write_bytes(content)
    refusal, inputs = "", []
    try:
        inputs = inputs_of(read_examples(path))
    except BatchbayesError as error:
        refusal = str(error)
    assert "t.csv" in refusal or torch.isfinite(torch.tensor(inputs)).all()
