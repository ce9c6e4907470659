import warnings
import zipfile

import numpy as np
import pytest
import torch

from batchbayes import BatchbayesError, BatchbayesWarning
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.schema import Column, Schema
from batchbayes.report.read.sources import read_examples

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.fixture
def arrays(tmp_path):
    """A function that writes arrays and reads them."""

    def read(named, target=None, **known):
        np.savez(tmp_path / "d.npz", **named)
        return read_examples(tmp_path / "d.npz", Reading(target, **known))

    return read


def inputs_of(examples):
    return torch.cat([inputs for inputs, _ in examples])


def test_arrays_with_names(arrays):
    examples = arrays({"X": X, "y": Y, "class_names": np.array(["a", "b", "c"]), "ids": np.array(list("uvwxyz"))})
    assert inputs_of(examples).dtype == torch.float32
    assert inputs_of(examples).tolist() == X.tolist()
    assert examples.targets().tolist() == Y.tolist()
    assert examples.class_names == ("a", "b", "c")
    assert examples.ids() == tuple("uvwxyz")
    assert arrays({"X": X, "code": np.arange(6)}, id_column="code").ids() == tuple("012345")


def test_real_targets_keep_their_digits(arrays):
    assert arrays({"X": X, "y": 1e9 + Y / 8}).targets().tolist() == (1e9 + Y / 8).tolist()


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_inputs_keep_their_digits_where_the_network_takes_them(tmp_path, dtype):
    codes = [[2**24 + 1], [2**53 - 1]]  # 32 bits would round both
    np.savez(tmp_path / "d.npz", X=np.array(codes))
    (tmp_path / "d.csv").write_text("code\n" + "".join(f"{code}\n" for (code,) in codes))
    for name in ("d.npz", "d.csv"):
        found = inputs_of(read_examples(tmp_path / name, Reading(input_dtype=dtype)))
        assert (found.dtype, found.tolist()) == (getattr(torch, dtype), codes)


def test_columns_with_names_have_a_schema_and_are_put_right(arrays):
    training = arrays({"X": X, "y": X[:, 0] / 3, "features": np.array(["p", "q"]), "target": np.array("strength")})
    assert training.target_name == "strength"
    assert training.schema == Schema(
        (Column("p", "integer", 0, 10), Column("q", "integer", 1, 11)), target="strength", target_dtype="real"
    )
    new = arrays({"X": X[:, ::-1], "y": Y, "features": np.array(["q", "p"])}, schema=training.schema)
    assert inputs_of(new).tolist() == X.tolist()
    assert new.targets().is_floating_point()
    with pytest.warns(BatchbayesWarning, match="they are taken in the order p, q"):
        assert inputs_of(arrays({"X": X}, schema=training.schema)).tolist() == X.tolist()
    with pytest.raises(BatchbayesError, match=r"got no p; it has q, r"):
        arrays({"X": X, "features": np.array(["q", "r"])}, schema=training.schema)
    with pytest.raises(
        BatchbayesError, match=r"inputs of shape \(N, 2\) in d\.npz, as in training; got shape \(6, 3\)"
    ):
        arrays({"X": np.zeros((6, 3))}, schema=training.schema)


def test_names_of_classes_get_the_numbers_of_training(arrays):
    training = arrays({"X": X, "y": np.array(["dog", "cat", "emu"] * 2)})
    assert training.targets().tolist() == [1, 0, 2, 1, 0, 2]
    assert training.class_names == ("cat", "dog", "emu")
    new = arrays({"X": X[:2], "y": np.array(["emu", "emu"])}, class_names=training.class_names)
    assert new.targets().tolist() == [2, 2]
    with pytest.raises(BatchbayesError, match=r"classes of training in d.npz, one of: cat, dog, emu; got 'ibis'"):
        arrays({"X": X[:1], "y": np.array(["ibis"])}, class_names=training.class_names)


def test_numbers_of_classes_in_another_order_are_refused(arrays):
    named = {"X": X, "y": Y, "class_names": np.array(["c", "b", "a"])}
    assert arrays(named, class_names=("c", "b", "a")).targets().tolist() == Y.tolist()
    with pytest.raises(BatchbayesError, match=r"class names of training in d\.npz: a, b, c; got c, b, a"):
        arrays(named, class_names=("a", "b", "c"))


def test_targets_of_every_type_keep_their_value(arrays):
    for kind in (np.uint8, np.int32, np.uint64, bool):
        assert arrays({"X": X, "y": (Y > 0).astype(kind)}).targets().tolist() == [0, 1, 1, 0, 1, 1]
    assert arrays({"X": X, "y": np.full(6, 2**63 - 1, np.uint64)}).targets().tolist() == [2**63 - 1] * 6


REFUSED = {
    "words as inputs": ({"X": X.astype(str), "y": Y}, "real numbers as inputs in d.npz; got an array of type <U"),
    "bytes as inputs": ({"X": X.astype("S4"), "y": Y}, r"inputs in d.npz; got an array of type \|S4"),
    "bytes as targets": ({"X": X, "y": Y.astype("S4")}, r"numbers as targets in d.npz; got an array of type \|S4"),
    "complex numbers": ({"X": X * 1j, "y": Y}, "real numbers as inputs in d.npz; got an array of type complex128"),
    "dates": ({"X": X, "y": Y.astype("M8[D]")}, "an array of type datetime64"),
    "objects": ({"X": X, "y": np.array([{}] * 6)}, "arrays of numbers in .*; got Object arrays cannot be loaded"),
    "no inputs": ({"y": Y, "Z": X}, "an array X of inputs in d.npz; got arrays Z, y"),
    "a number as inputs": ({"X": np.array(3.0)}, "an array X of inputs in d.npz; got arrays X"),
    "two inputs": ({"X": X, "images": X}, "an array X of inputs in d.npz; got more than one: X, images"),
    "two targets": ({"X": X, "y": Y, "labels": Y}, "an array of targets in d.npz; got more than one: y, labels"),
    "no examples": ({"X": X[:0]}, "examples in d.npz; got none"),
    "too few targets": ({"X": X, "y": Y[:5]}, "as many targets as inputs in d.npz; got 6 inputs and 5 targets"),
    "NaN": ({"X": np.where(X == 5, np.nan, X)}, "as inputs in d.npz; got 1 row with NaN .* the first is row 2"),
    "NaN targets": ({"X": X, "y": np.where(Y == 2, np.nan, Y)}, "numbers as targets in d.npz; got 2 rows with NaN"),
    "a number that is too large": ({"X": X * 1e39}, "got 6 rows with NaN or infinity"),
    "numbers beyond 64 bits with a sign": (
        {"X": X, "y": np.full(6, 2**63, np.uint64)}, r"below 2\^63 as targets in d\.npz; got 9223372036854775808"),
    "too few features": ({"X": X, "features": np.array(["a"])}, r"2 names as features in .*; got <U1 of shape \(1,\)"),
    "equal features": ({"X": X, "features": np.array(["a", "a"])}, "different column names in features; got a more"),
    "too few ids": ({"X": X, "ids": np.array(["a"])}, "6 names as ids in d.npz"),
    "a number of classes": ({"X": X, "classes": np.array(3)}, "a list of names as classes in d.npz; got int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_cannot_be_used_are_refused(arrays, name):
    named, message = REFUSED[name]
    with pytest.raises(BatchbayesError, match=message):
        arrays(named)


def test_arrays_that_were_asked_for_and_are_not_there(arrays):
    with pytest.raises(BatchbayesError, match=r"an array 'height' in d\.npz; got arrays X, y"):
        arrays({"X": X, "y": Y}, "height")
    with pytest.raises(BatchbayesError, match=r"an array 'name' in d\.npz; got arrays X, y"):
        arrays({"X": X, "y": Y}, id_column="name")


def test_damaged_files(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", X=X)
    content = (tmp_path / "d.npz").read_bytes()
    for wrong in (b"", content[:40], content[:-9], content[:60] + b"\xff" * 20 + content[80:], b"X,y\n1,2\n"):
        (tmp_path / "d.npz").write_bytes(wrong)
        with pytest.raises(BatchbayesError, match=r"arrays of numbers in .*d\.npz"):
            read_examples(tmp_path / "d.npz")
    np.save(tmp_path / "d.npy", X)
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    with pytest.raises(BatchbayesError, match="got a single array"):
        read_examples(tmp_path / "d.npz")


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    np.savez(tmp_path / "d.npz", X=X)
    for name in ("X.npy", "X"):
        np.savez(tmp_path / "d.npz", X=X)
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "d.npz", "a") as archive:
            warnings.simplefilter("ignore")
            archive.writestr(name, archive.read("X.npy"))
        with pytest.raises(BatchbayesError, match=r"arrays of numbers in .*; got more than one array X"):
            read_examples(tmp_path / "d.npz")


def test_a_missing_name_is_no_class(arrays):
    for word in ("NA", "None", "", "?"):
        with pytest.raises(BatchbayesError, match=r"names of classes in d\.npz; got "):
            arrays({"X": X, "y": np.array(["dog", word, "emu"] * 2)})
    with pytest.raises(BatchbayesError, match=r"upper and lower case in d\.npz; got 'True' and 'true'"):
        arrays({"X": X, "y": np.array(["True", "true"] * 3)})


def test_a_lost_chunk_is_told(tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "d.zarr"), mode="w")
    group.create_array("X", data=X + 1, chunks=(2, 2))
    assert inputs_of(read_examples(tmp_path / "d.zarr")).tolist() == (X + 1).tolist()
    chunks = [path for path in (tmp_path / "d.zarr" / "X" / "c").rglob("*") if path.is_file()]
    assert len(chunks) == 3
    chunks[0].unlink()
    with pytest.warns(BatchbayesWarning, match=r"1 of 3 chunks of X are missing in d\.zarr\. They are read as 0"):
        read_examples(tmp_path / "d.zarr")
