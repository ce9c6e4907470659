"""Generated bad and odd files and options through the command line: a right answer, or one line that says what to do.

Each case is made from a number, so that a failure names the number that repeats it. It is a call of `main` in this
process. A case knows which rows its files hold, and so what a right answer is: the predictions of the same rows from a
plain file. Files without a clear meaning must be refused. A few cases run always, all of them with `pytest -m slow`,
and some of these as processes of their own.
"""

import contextlib
import csv
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assess_cases
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from batchbayes import cli

CASES, FEW, ASSESSMENTS, PROCESSES = 1000, 110, 100, 12
HELPERS = "helpers.assess_cases"
JUNK = [
    "",
    " ",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "1e9",
    "10**3",
    "abc",
    "１",
    "\n",
    "0x10",
    "1_0",
    "--",
    "é",
    "a,b",
    "None",
]
ANSWER = {"classification": "confidence", "regression": "mean", "images": "confidence"}
NONE = object()
"""The expected answer of a file without a clear meaning: only a refusal is right."""
ANY = object()
"""The expected answer where several are right: no traceback, and no cells that are NaN or infinite."""


@dataclass
class Command:
    """Arguments that work, as a dict, the command, and what a right answer is."""

    name: str
    options: dict[str, object]
    expected: object
    """For each row the number in the column `answer`; or NONE or ANY."""
    answer: str = "mean"

    def words(self):
        given = [w for k, v in self.options.items() if v is not None for w in ((k,) if v is True else (k, str(v)))]
        return [self.name, *given]


@dataclass
class Base:
    """What an assessment of a plain case left behind."""

    folder: Path
    options: dict[str, object]
    """Options of `predict`, without the input."""
    inputs: np.ndarray
    answers: np.ndarray
    assess: list[str]


# Plain cases


def run(words):
    """Run a command in this process. Return the exit code, what it printed, and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit:  # argparse
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def numbers(text, column):
    rows = list(csv.DictReader(io.StringIO(text)))
    return np.array([float(row[column]) for row in rows])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Assess a table of values, a table of classes and a folder of images, and predict the rows of a plain file."""
    made = {}
    for kind, write in (("regression", write_regression), ("classification", write_classes), ("images", write_images)):
        folder = tmp_path_factory.mktemp(kind)
        inputs, plain, assess, predict = write(folder)
        code, _, errors = run(["assess", *assess, "--draws", "4", "--quiet", "--out", folder / "out"])
        assert code == 0, errors
        predict |= {"--posterior": folder / "out" / "posterior.safetensors"}
        base = Base(folder, predict, inputs, np.empty(0), assess)
        code, text, errors = run(Command("predict", predict | {"--input": plain}, None).words())
        assert code == 0, errors
        base.answers = numbers(text, ANSWER[kind])
        assert len(base.answers) == len(inputs)
        assert len(set(base.answers)) > 0.9 * len(inputs)  # a row that is mistaken for another one is seen
        made[kind] = base
    return made


def write_regression(folder):
    arguments = assess_cases.write_case("regression", folder)
    x, y = assess_cases.wave(40, 7)
    assess_cases.write_csv(folder / "plain.csv", x, y)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    keep = {key: options[key] for key in ("--model", "--weights")}
    return x.numpy(), folder / "plain.csv", [word for word in arguments if word != "--quiet"], keep


def write_classes(folder):
    arguments = assess_cases.write_case("classification", folder)
    x, _ = assess_cases.blobs(40, 7)
    np.savez(folder / "plain.npz", X=x.numpy())
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    keep = {key: options[key] for key in ("--model", "--weights")}
    return x.numpy(), folder / "plain.npz", [word for word in arguments if word != "--quiet"], keep


def write_images(folder):
    """Images of 6 x 6 pixels of 8 bits in three classes: which colour is the strongest."""
    source = np.random.default_rng(0)
    for part, count in (("train", 48), ("test", 36)):
        for label, name in enumerate(("blue", "green", "red")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count // 3):
                save_png(folder / part / name / f"{i}.png", picture(source, 2 - label))
    pictures = np.stack([picture(source, i % 3) for i in range(20)])
    (folder / "plain").mkdir()
    for i, each in enumerate(pictures):
        save_png(folder / "plain" / f"{i:02d}.png", each)
    network = assess_cases.colours()
    save_file(network.state_dict(), folder / "weights.safetensors")
    model = {"--model": f"{HELPERS}:colours", "--weights": str(folder / "weights.safetensors")}
    scale = ["--mean", "0.3", "--std", "0.2", "--batch-size", "12"]
    files = ["--train", str(folder / "train"), "--test", str(folder / "test")]
    return pictures, folder / "plain", [*(w for pair in model.items() for w in pair), *files, *scale], model


def picture(source, strong):
    pixels = source.integers(0, 120, (6, 6, 3), dtype=np.uint8)
    pixels[:, :, strong] += 60
    pixels[0, 0] = 0
    return pixels


def save_png(path, pixels):
    Image.fromarray(pixels).save(path)


# Tables


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


# Arrays


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


# Images


def odd_images(source, bases, folder):
    """A folder of images, or one image, with one odd file."""
    base = bases["images"]
    rows = sorted(source.sample(range(20), source.choice([1, 4])))
    place = folder / "odd"
    place.mkdir()
    for row in rows:
        save_png(place / f"{row:02d}.png", base.inputs[row])
    path, pixels, expected = place / f"{rows[0]:02d}.png", base.inputs[rows[0]], base.answers[rows]
    right = source.choice(IMAGE_CHANGES)(source, path, pixels, place)
    given = path if len(rows) == 1 and path.exists() and source.random() < 0.5 else place
    return Command("predict", base.options | {"--input": given}, expected if right is True else right, "confidence")


def image_format(source, path, pixels, place):
    image = Image.fromarray(pixels)
    suffix = source.choice(["bmp", "tif", "webp", "PNG"])
    path.unlink()
    image.save(path.with_suffix(f".{suffix}"), lossless=True)
    return True


def image_mode(source, path, pixels, place):
    image = Image.fromarray(pixels)
    mode = source.choice(["RGBA", "transparent", "P", "I;16", "I", "F", "CMYK", "1", "L", "LA", "rotated"])
    if mode == "RGBA":
        image.convert("RGBA").save(path)
        return True
    if mode == "transparent":
        image.putalpha(source.choice([0, 128, 254]))
        image.save(path)
        return NONE
    if mode == "P":
        image.quantize(256).save(path)
        return ANY  # quantize may round colours
    if mode in ("I;16", "I", "F"):
        grey = np.asarray(image.convert("L")).astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
        path.unlink()
        Image.fromarray(grey * (257 if mode == "I;16" else 1)).save(path.with_suffix(".tif"))
        return ANY if mode == "I;16" else NONE
    if mode == "CMYK":
        path.unlink()
        image.convert("CMYK").save(path.with_suffix(".tif"))
        return ANY
    if mode == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.rotate(90, expand=True).save(path, exif=exif)
        return True
    image.convert(mode).save(path)
    return ANY


def image_size(source, path, pixels, place):
    shape = source.choice([(1, 1), (6, 7), (600, 2)])
    save_png(path, np.zeros((*shape, 3), np.uint8))
    return NONE


def image_damage(source, path, pixels, place):
    damage(source, path)
    try:
        with Image.open(path) as image:
            return True if np.array_equal(np.asarray(image), pixels) else NONE if image.mode != "RGB" else ANY
    except Exception:
        return NONE


def image_bomb(source, path, pixels, place):
    """A header that promises a picture of many gigabytes."""
    size = source.choice([(2**31 - 1, 2**31 - 1), (100_000, 100_000), (0, 5), (1, 2**30)])
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return NONE


def image_company(source, path, pixels, place):
    """Other things in the folder."""
    what = source.choice(["text", "hidden", "hidden folder", "folder", "link"])
    if what == "text":
        (place / "notes.txt").write_text("hello")
    elif what == "hidden":
        (place / "._1.png").write_bytes(b"junk")
    elif what == "hidden folder":
        (place / ".cache").mkdir()
        (place / ".cache" / "1.png").write_bytes(b"junk")
    elif what == "folder":
        (place / "empty").mkdir()
    else:
        (place / "99.png").symlink_to(place / "nowhere.png")
        return ANY
    return True


IMAGE_CHANGES = [image_format, image_mode, image_mode, image_size, image_damage, image_bomb, image_company]


# Options, places, networks, posteriors


def odd_options(source, bases, folder):
    """Junk as an option of `predict`."""
    base = bases["regression"]
    name = source.choice(["--draws", "--seed", "--threads", "--engine", "--device", "--target", "--id", "--method",
                          "--input", "--posterior", "--weights", "--model", "--out", "--junk", "--quiet"])  # fmt: skip
    value = source.choice([*JUNK, "7", "12"])
    command = Command("predict", base.options | {"--input": base.folder / "plain.csv", name: value}, NONE)
    if name == "--out" and value.strip():
        command.options[name] = folder / value
        command.expected = ANY if Path(value).name in (".", "..", "") else base.answers
    elif name in ("--draws", "--seed", "--threads"):
        is_whole = re.fullmatch(r"-?[0-9]+" if name == "--seed" else r"0*[1-9][0-9]*", value)
        command.expected = (ANY if name != "--threads" else base.answers) if is_whole else NONE
    return command


def odd_place(source, bases, folder):
    """A place where nothing can be written, or where something is already."""
    base = bases["regression"]
    (folder / "file.csv").write_text("keep")
    inside = ["x" * 250, "x" * 300, "no/such/o.csv", "", "file.csv", "file.csv/o.csv"]
    place = source.choice([*(folder / name for name in inside), "/proc/o.csv", "/dev/full", "/dev/null/o", "/sys/o"])
    return Command("predict", base.options | {"--input": base.folder / "plain.csv", "--out": place}, NONE)


def odd_network(source, bases, folder):
    """Factories that fail, and weights that do not fit."""
    base = bases["regression"]
    options = base.options | {"--input": base.folder / "plain.csv"}
    if source.random() < 0.4:
        model = source.choice(["raising", "exiting", "not_a_network", "nobody", "__doc__", "classifier", "segmenter",
                               "trained",
                               "without_batch_norm", "blobs", "Path", "EVIL"])  # fmt: skip
        return Command("predict", options | {"--model": f"{HELPERS}:{model}"}, NONE)
    weights, path = (
        load_file(options["--weights"]),
        folder / source.choice(["w.safetensors", "w.pt", "w.pth", "w.ckpt", "w.txt"]),
    )
    key = source.choice([name for name, tensor in weights.items() if tensor.is_floating_point()])
    what = source.choice(
        ["same", "double", "missing", "extra", "shape", "NaN", "other", "prefix", "nested", "damage", "pickle"]
    )
    right = ANY if what == "double" else base.answers if what in ("same", "prefix", "nested") else NONE
    if what == "double":
        weights = {name: tensor.double() for name, tensor in weights.items()}
    elif what == "missing":
        del weights[key]
    elif what == "extra":
        weights["other"] = torch.zeros(3)
    elif what == "shape":
        weights[key] = torch.zeros(7, 5)
    elif what == "NaN":
        weights[key] = torch.full_like(weights[key], float("nan"))
    elif what == "other":
        weights[key] = weights[key] + 1
    elif what == "prefix":
        weights = {f"module.{name}": tensor for name, tensor in weights.items()}
    if path.suffix == ".safetensors":
        save_file(weights, path)
    elif what == "pickle":
        torch.save({"state_dict": weights, "me": assess_cases.EVIL, "f": Path("x")}, path)
    else:
        torch.save({"state_dict": weights} if what == "nested" else weights, path)
    if what == "damage":
        damage(source, path)
    if path.suffix == ".txt" or (what == "nested" and path.suffix == ".safetensors"):
        right = NONE if path.suffix == ".txt" else base.answers
    if what == "pickle" and path.suffix == ".safetensors":
        right = base.answers
    return Command("predict", options | {"--weights": path}, right)


def odd_posterior(source, bases, folder):
    """A posterior file with a changed value, or damaged."""
    kind = source.choice(["regression", "classification"])
    base, path = bases[kind], folder / "p.safetensors"
    options = base.options | {"--input": base.folder / ("plain.csv" if kind == "regression" else "plain.npz")}
    with safe_open(options["--posterior"], framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    right = base.answers
    if source.random() < 0.25:
        save_file(tensors, path, metadata)
        damage(source, path)
        right = ANY
    else:
        name = source.choice(list(metadata))
        try:
            header = json.loads(metadata[name])
        except ValueError:
            header = None
        if isinstance(header, dict):
            spoil(source, header)
            metadata[name] = json.dumps(header)
        else:
            metadata[name] = source.choice(JUNK)
        right = ANY
        save_file(tensors, path, metadata)
    return Command("predict", options | {"--posterior": path}, right, ANSWER[kind])


def spoil(source, header):
    """Change one value somewhere in nested JSON."""
    key = source.choice(list(header))
    if isinstance(header[key], dict) and header[key] and source.random() < 0.8:
        spoil(source, header[key])
    elif source.random() < 0.2:
        del header[key]
    else:
        header[key] = source.choice([None, True, 0, -1, 1e308, 0.5, float("nan"), float("inf"), "text", "", [], {},
                                     [[]], 10**30, [1, "a"], "a" * 1000])  # fmt: skip


def odd_assessment(source, bases, folder):
    """Junk as an option of `assess`."""
    base = bases[source.choice(["regression", "classification", "images"])]
    name = source.choice(["--draws", "--batch-size", "--threads", "--seed", "--task", "--class-names",
                          "--mean", "--std", "--resize", "--method", "--center", "--engine", "--target", "--id",
                          "--ood", "--calibration",
                          "--train", "--test", "--ignore-label", "--device", "--standardise", "--views", "--budget",
                          "--reference", "--maps"])  # fmt: skip
    options = dict(zip(base.assess[::2], base.assess[1::2], strict=True))
    value = source.choice([*JUNK, "segmentation", "0,0,0", "1,1", "3x4x5", "6", "x" * 300])
    words = {"--out": folder / "out", "--draws": 2, name: True if name == "--standardise" else value}
    if name == "--maps":
        words[name] = folder / "maps"
    return Command("assess", options | words, ANY)


KINDS = [odd_table, odd_arrays, odd_images, odd_table, odd_options, odd_place, odd_network, odd_posterior, odd_table,
         odd_arrays, odd_images]  # fmt: skip


# Judging


def judge(command, code, printed, errors):
    """Return "refused" or "answered", or raise an error if the outcome is neither in words nor right."""
    assert "Traceback" not in errors, errors
    if code != 0:
        assert code == 2, (code, errors)
        line = errors.strip().splitlines()[-1]
        assert ("expected " in line and "Do this: " in line) or "error: " in line, errors
        return "refused"
    assert command.expected is not NONE, f"an answer from nonsense: {printed[:400]}"
    if command.name == "assess":
        found = json.loads((command.options["--out"] / "metrics.json").read_text())
        assert found["verdict"]["headline"]
        return "answered"
    text = Path(command.options["--out"]).read_text() if command.options.get("--out") else printed
    cells = [cell.lower() for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not {"nan", "inf", "-inf"} & set(cells), text[:400]
    if command.expected is not ANY:
        np.testing.assert_allclose(numbers(text, command.answer), command.expected, rtol=1e-4, atol=1e-5)
    return "answered"


def outcome(number, bases, folder):
    command = KINDS[number % len(KINDS)](random.Random(number), bases, folder)
    return judge(command, *run(command.words()))


def count(numbers, bases, tmp_path):
    counts = Counter()
    for number in numbers:
        name = KINDS[number % len(KINDS)].__name__
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            counts[name, outcome(number, bases, folder)] += 1
        except BaseException as error:
            raise AssertionError(f"case {number} ({name})") from error
    return counts


def test_a_few_odd_commands(bases, tmp_path):
    counts = count(range(FEW), bases, tmp_path)
    assert {result for _, result in counts} == {"answered", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_odd_commands(bases, tmp_path, part):
    counts = count(range(part, CASES, 4), bases, tmp_path)
    for kind in ("odd_table", "odd_arrays", "odd_images"):  # neither refuses everything nor takes everything
        refused, answered = (counts[kind, result] for result in ("refused", "answered"))
        assert min(refused, answered) > 0.2 * (refused + answered), counts


@pytest.mark.slow
def test_odd_options_of_assess(bases, tmp_path, monkeypatch):
    for task, name in (("classification", "class"), ("regression", "value"), ("segmentation", "image")):
        compare = import_module(f"batchbayes.assessment.{task}.compare")
        monkeypatch.setattr(compare, f"{name}_figures", lambda *_: {})  # they take long
    for number in range(ASSESSMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = odd_assessment(random.Random(number), bases, folder)
        try:
            judge(command, *run(command.words()))
        except BaseException as error:
            raise AssertionError(f"case {number}: {command.words()}") from error


@pytest.mark.slow
def test_odd_commands_as_processes(bases, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for number in range(2000, 2000 + PROCESSES):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = KINDS[number % len(KINDS)](random.Random(number), bases, folder)
        words = [
            sys.executable,
            "-c",
            "import sys; from batchbayes.cli import main; sys.exit(main())",
            *command.words(),
        ]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
        judge(command, done.returncode, done.stdout, done.stderr)
