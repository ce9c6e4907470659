"""Odd files of arrays."""

import zipfile

import numpy as np

from helpers.odd_commands.command import ANY, NONE, Command


def odd_arrays(source, bases, folder):
    """An .npz file of some rows."""
    base = bases["classification"]
    rows = source.sample(range(40), source.choice([1, 5, 30]))
    x, expected, path = base.inputs[rows], base.answers[rows], folder / "odd.npz"
    good = {
        "double": {"X": x.astype(np.float64)}, "big-endian": {"X": x.astype(">f4")},
        "Fortran": {"X": np.asfortranarray(x)},
        "other name": {"inputs": x}, "lower case": {"x": x}, "y": {"X": x, "y": np.arange(len(x)) % 3},
        "wrong y": {"X": x, "y": np.full(len(x), 99)}, "text beside": {"X": x, "note": np.array("hello")},
        "strided": {"X": np.repeat(x, 2, 1)[:, ::2]}, "ids": {"X": x, "ids": np.array([f"=row{i}" for i in rows])},
        "more": {"X": x, "Z": np.zeros(3)}, "long double": {"X": x.astype(np.longdouble)},
    }  # fmt: skip
    bad = {
        "NaN": {"X": spoiled(x, np.nan)}, "inf": {"X": spoiled(x, -np.inf)}, "text": {"X": x.astype(str)},
        "objects": {"X": x.astype(object)}, "complex": {"X": x + 1j}, "no X": {"Q": x}, "nothing": {},
        "flat": {"X": x.ravel()},
        "wide": {"X": np.c_[x, x]}, "deep": {"X": x[None]}, "no rows": {"X": x[:0]}, "no columns": {"X": x[:, :0]},
        "scalar": {"X": np.float32(3)}, "two": {"X": x, "inputs": x + 1}, "dates": {"X": x.astype("datetime64[s]")},
        "records": {"X": np.zeros(4, [("a", "f4"), ("b", "f4")])}, "bytes": {"X": x.astype("S8")},
        "ids": {"X": x, "ids": np.arange(99)},
    }  # fmt: skip
    half = {"half": {"X": x.astype(np.float16)}, "integers": {"X": (10 * x).astype(np.int8)}, "bits": {"X": x > 0}}
    groups = [(good, expected), (good, expected), (bad, NONE), (bad, NONE), (half, ANY)]
    arrays, right = source.choice(groups)
    np.savez(path, **arrays[source.choice(list(arrays))])
    if source.random() < 0.15:
        damage(source, path)
        right = expected if right is not NONE and zipfile.is_zipfile(path) else NONE
        right = ANY if right is not NONE else NONE  # zip has checksums, but not of all bytes
    return Command("predict", base.options | {"--input": path}, right, "confidence")


def spoiled(x, value):
    x = x.copy()
    x[-1, -1] = value
    return x


def damage(source, path):
    """Cut a file, or change some of its bytes."""
    data = bytearray(path.read_bytes())
    what = source.choice(["cut", "bytes", "empty", "text", "zeros"])
    if what == "cut":
        data = data[: source.randrange(len(data))]
    elif what == "bytes":
        for _ in range(source.choice([1, 5, 40])):
            data[source.randrange(len(data))] = source.randrange(256)
    else:
        data = {"empty": b"", "text": b"hello\n", "zeros": bytes(len(data))}[what]
    path.write_bytes(bytes(data))
