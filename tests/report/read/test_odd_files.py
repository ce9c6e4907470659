"""Generated files of odd tables, arrays, images and masks: what they mean, or an error in words. Nothing else.

Each case is made from a number, so that a failure names the number that repeats it. A maker writes one file or folder,
and returns how to read it and what it means: (inputs, targets), or None if it has no clear meaning.
"""

import random
import unicodedata
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.errors import BatchbayesWarning
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_examples

CASES = 200
CLASSES = ("crème", "naïve", "tea")
SAME = [
    lambda name: name,
    lambda name: f"  {name}\t",
    lambda name: unicodedata.normalize("NFD", name),
    lambda name: name[:2] + "\u200b" + name[2:],
    lambda name: "\ufeff" + name,
    lambda name: name + "\u2060",
]
MISSING = ["", "NA", "None", "null", "?", "nan", "#N/A", " \u200b", "N/A", "<NA>", "none"]


def labels_in_a_table(source, folder):
    """Names of classes that look the same are the same class. Missing ones and other cases are refused."""
    labels = [*range(3), *(source.randrange(3) for _ in range(9))]
    cells = [source.choice(SAME)(CLASSES[label]) for label in labels]
    spoiled = source.random() < 0.4
    if spoiled:
        cells[source.randrange(12)] = source.choice([*MISSING, "TEA", "Naïve", "CRÈME"])
    rows = [f"{source.random()!r}" for _ in labels]
    separator = source.choice(",;\t")
    text = "\n".join([f"a{separator}k", *(f'{row}{separator}"{cell}"' for row, cell in zip(rows, cells, strict=True))])
    (folder / "t.csv").write_text(text, encoding=source.choice(["utf-8", "utf-8-sig", "utf-16"]))
    meaning = [[float(np.float32(row))] for row in rows], labels
    return folder / "t.csv", Reading("k"), None if spoiled else meaning


def values_in_a_table(source, folder):
    """Numbers as programs write them are read with their value. What is no plain number is refused."""
    values = [source.choice([0.0, 1.5, -2e-7, 3e8, 12345.678, -17.0]) for _ in range(6)]
    written = [
        source.choice(["{!r}", "{:.17e}", " {!r} ", "{:+.12g}", '"{!r}"', "{:.10E}"]).format(value) for value in values
    ]
    spoiled = source.random() < 0.5
    if spoiled:
        odd = ["1,5", "1 000", "0x10", "٣", "1_0", "12%", "$3", "inf", "-", "1e99", "TRUE", "½", "1.2.3", "--1", "(3)"]
        written[source.randrange(6)] = '"' + source.choice([*odd, *MISSING]) + '"'
    (folder / "t.csv").write_text("\n".join(["a,y", *(f"1,{cell}" for cell in written)]), encoding="utf-8")
    return folder / "t.csv", Reading("y"), None if spoiled else ([[1.0]] * 6, values)


KINDS = ["?", "i1", "u1", ">i2", "u2", "<i4", ">u4", "i8", "u8", "f2", ">f4", "f8", "g"]


def arrays(source, folder):
    """Arrays of any type, order and layout keep their numbers. Those that do not fit are refused."""
    kind, order = source.choice(KINDS), source.choice("CF")
    x = np.array([[source.choice([0, 1, 2, 3, 100]) for _ in range(3)] for _ in range(5)])
    x = np.array((x > 1) if kind == "?" else x, dtype=kind, order=order)
    y = np.array([source.choice([0, 1, 2]) for _ in range(5)]).astype(source.choice(["i1", "u2", ">i4", "u8", "i8"]))
    odd = {
        "NaN": lambda: (x.astype(float) * np.nan, y),
        "infinity": lambda: (x.astype(float) + np.inf, y),
        "large": lambda: (x, np.full(5, 2**63 + 7, np.uint64)),
        "complex": lambda: (x * 1j, y),
        "words": lambda: (x.astype(str), y),
        "short": lambda: (x, y[:-1]),
        "missing": lambda: (x, np.array(["a", source.choice(MISSING), "b", "a", "b"])),
        "cases": lambda: (x, np.array(["a", "A", "b", "a", "b"])),
        "dates": lambda: (x, y.astype("M8[D]")),
        "too large": lambda: (x.astype(float) + 1e39, y),
    }
    what = source.choice([None, None, *odd])
    saved = (x, y) if what is None else odd[what]()
    source.choice([np.savez, np.savez_compressed])(folder / "d.npz", X=saved[0], y=saved[1])
    return folder / "d.npz", Reading(), (x.astype(float).tolist(), y.tolist()) if what is None else None


def grey_image(source, folder):
    """A grey picture of any number of bits has values from 0, black, to 1, white, upright."""
    bits, values = source.choice([1, 8, 16]), np.array([[0, 1, 1], [1, 0, 1]])
    kind = {1: bool, 8: np.uint8, 16: np.uint16}[bits]
    suffix = source.choice(["png", "tif"] if bits == 16 else ["png", "tif", "bmp"])
    picture, options = Image.fromarray((values * (2**bits - 1)).astype(kind)), {}
    turned = suffix != "bmp" and source.random() < 0.4
    if turned:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 3  # stored upside down
        values = values[::-1, ::-1]
    elif suffix == "tif" and bits < 16 and source.random() < 0.5:
        options["tiffinfo"] = {262: 0}  # white is stored as zero
    picture.save(folder / f"1.{suffix}", **options)
    return folder / f"1.{suffix}", Reading(), ([np.stack([values] * 3).tolist()], None)


def folder_of_classes(source, folder):
    """A sub-folder for each class, and what systems and people leave beside them."""
    colours = []
    for label, name in enumerate(CLASSES):
        (folder / "d" / name).mkdir(parents=True)
        for number in range(source.randrange(1, 3)):
            colours.append((51 * source.randrange(6), label))
            picture = Image.new("RGB", (2, 2), (colours[-1][0],) * 3)
            picture.save(folder / "d" / name / f"{number}.{source.choice(['png', 'bmp', 'TIF'])}")
    extras = {
        "MACOSX": lambda d: (d / "__MACOSX" / "tea").mkdir(parents=True),
        "checkpoints": lambda d: (d / "tea" / ".ipynb_checkpoints").mkdir(),
        "text": lambda d: (d / "labels.txt").write_text("tea"),
        "link": lambda d: (d / "tea" / "9.png").symlink_to(d / "gone.png"),
        "link of a folder": lambda d: (d / "coffee").symlink_to(d / "gone"),
        "empty class": lambda d: (d / "coffee").mkdir(),
        "same name": lambda d: (d / "TEA").mkdir() or Image.new("RGB", (2, 2)).save(d / "TEA" / "0.png"),
        "loose": lambda d: Image.new("RGB", (2, 2)).save(d / "0.png"),
        "size": lambda d: Image.new("RGB", (3, 2)).save(d / "tea" / "9.png"),
        "junk": lambda d: (d / "tea" / "9.png").write_bytes(b"junk"),
    }
    extra = source.choice([None, *extras])
    if extra is not None:
        extras[extra](folder / "d")
    clear = extra in (None, "MACOSX", "checkpoints", "text")
    images = [np.full((3, 2, 2), colour / 255).tolist() for colour, _ in colours]
    return folder / "d", Reading(), (images, [label for _, label in colours]) if clear else None


def masks(source, folder):
    """Masks keep the numbers that are stored. Black and white ones are classes 0 and 1; unclear ones are refused."""
    kind = source.choice(["grey", "grey", "palette", "16 bits", "white is zero", "black and white", "one bit"])
    numbers = np.array([[source.choice([0, 1, 2, 7]) for _ in range(3)], [0, 1, 2]])
    if kind in ("black and white", "one bit"):
        numbers = numbers % 2
    stored = {"black and white": numbers * 255, "white is zero": 255 - numbers}.get(kind, numbers)
    made = Image.fromarray(stored.astype({"16 bits": np.uint16, "one bit": bool}.get(kind, np.uint8)))
    if kind == "palette":
        made = Image.frombytes("P", made.size, made.tobytes())
        made.putpalette([value for i in range(256) for value in (255 - i, i, 7)])
    suffix, options = source.choice(["png", "tif"]), {}
    if kind == "white is zero":
        suffix, options = "tif", {"tiffinfo": {262: 0}}  # pillow inverts what it writes then
    what = source.choice([None, None, None, "rotated", "JPEG", "colours", "size", "missing", "float"])
    if what == "rotated":
        options = {"exif": Image.Exif()}
        options["exif"][0x0112] = source.choice([2, 3, 4])
    made = made.convert("RGB") if what == "colours" else made.resize((4, 2)) if what == "size" else made
    made = Image.fromarray(numbers.astype(np.float32)) if what == "float" else made
    made = made.convert("L") if what == "JPEG" else made
    suffix = {"JPEG": "jpg", "float": "tif"}.get(what, suffix)
    options = {} if what in ("JPEG", "colours", "float") else options
    for name in ("images", "masks"):
        (folder / "d" / name).mkdir(parents=True)
    Image.new("RGB", (3, 2), (255, 0, 0)).save(folder / "d" / "images" / "1.png")
    made.save(folder / "d" / "masks" / f"{'2' if what == 'missing' else '1'}.{suffix}", **options)
    red = np.stack([np.ones((2, 3)), np.zeros((2, 3)), np.zeros((2, 3))])
    return folder / "d", Reading(), ([red.tolist()], [numbers.tolist()]) if what is None else None


MAKERS = [labels_in_a_table, values_in_a_table, arrays, grey_image, folder_of_classes, masks]


def outcome(number, folder):
    """Return whether a file was read or refused, after a check that this is right."""
    path, reading, meaning = MAKERS[number % len(MAKERS)](random.Random(number), folder)
    if meaning is None:
        with pytest.raises(BatchbayesError):
            list(read_examples(path, reading))
        return "refused"
    batches = list(read_examples(path, reading))
    inputs = torch.cat([inputs for inputs, _ in batches])
    np.testing.assert_allclose(inputs.numpy(), np.array(meaning[0], np.float32), rtol=1e-6)
    targets = [targets for _, targets in batches]
    if meaning[1] is None:
        assert targets == [None]
    else:
        assert torch.cat(targets).tolist() == meaning[1]
    return "read"


def test_odd_files(tmp_path):
    counts = Counter()
    for number in range(CASES):
        name = MAKERS[number % len(MAKERS)].__name__
        (tmp_path / str(number)).mkdir()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BatchbayesWarning)
                counts[name, outcome(number, tmp_path / str(number))] += 1
        except BaseException as error:
            raise AssertionError(f"case {number} ({name})") from error
    for maker in MAKERS:  # neither refuses everything nor takes everything
        kinds = {result: counts[maker.__name__, result] for result in ("read", "refused")}
        assert kinds["read"] >= 5, counts
        assert kinds["refused"] >= (0 if maker is grey_image else 5), counts


@pytest.mark.slow
def test_many_odd_files(tmp_path):
    for number in range(CASES, 12 * CASES):
        (tmp_path / str(number)).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BatchbayesWarning)
            outcome(number, tmp_path / str(number))
