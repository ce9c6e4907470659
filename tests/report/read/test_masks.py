import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError, BatchbayesWarning
from batchbayes.likelihoods import Categorical
from batchbayes.report.read.examples import from_tensors
from batchbayes.report.read.masks import read_mask, read_masked_images
from batchbayes.report.read.preprocess import Preprocessing
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_examples
from batchbayes.report.read.task import require_fitting

NUMBERS = np.array([[0, 1, 2], [2, 1, 255]])


def save(path, made, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(path, **options)


def grey(numbers=NUMBERS, kind=np.uint8):
    return Image.fromarray(np.asarray(numbers).astype(kind))


def palette():
    made = grey()
    made = Image.frombytes("P", made.size, made.tobytes())
    made.putpalette([value for i in range(256) for value in (255 - i, i, 7)])
    return made


@pytest.fixture
def folder(tmp_path):
    for name in ("b", "sub/a"):
        save(tmp_path / "images" / f"{name}.jpg", Image.new("RGB", (3, 2), (255, 255, 255)))
        save(tmp_path / "masks" / f"{name}.png", grey())
    return tmp_path


@pytest.mark.parametrize("mask", [grey(), grey(kind=np.uint16), palette()], ids=["grey", "16 bits", "palette"])
def test_masks_are_class_numbers(folder, mask):
    save(folder / "masks" / "b.png", mask)
    examples = read_examples(folder, Reading(class_names=("x", "y", "z"), ignored_label=255))
    ((inputs, targets),) = examples
    assert inputs.shape == (2, 3, 2, 3)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [NUMBERS.tolist()] * 2
    assert (examples.ids(), examples.ignored_label) == (("b.jpg", "sub/a.jpg"), 255)


def test_one_bit_masks(folder):
    save(folder / "masks" / "b.png", Image.fromarray(NUMBERS > 0))
    assert read_examples(folder).targets()[0].tolist() == (NUMBERS > 0).tolist()


def test_black_and_white_masks_are_two_classes(folder):
    for name, white in (("b", NUMBERS > 0), ("sub/a", NUMBERS > 9)):
        save(folder / "masks" / f"{name}.png", grey(255 * white))
    wanted = [(NUMBERS > 0).tolist(), (NUMBERS > 9).tolist()]
    for reading in (Reading(), Reading(class_names=("x", "y")), Reading(ignored_label=7)):
        assert read_examples(folder, reading).targets().tolist() == wanted
    assert read_examples(folder, Reading(ignored_label=255)).targets().unique().tolist() == [0, 255]
    with pytest.raises(BatchbayesError, match=r"class numbers from 0 to 2 .*; got 255"):
        list(read_examples(folder, Reading(class_names=("x", "y", "z"))))
    save(folder / "masks" / "b.png", grey(NUMBERS))  # 255 is no class beside 1 and 2
    assert read_examples(folder).targets().unique().tolist() == [0, 1, 2, 255]


def test_one_class_that_is_left_is_told(folder):
    for name in ("b", "sub/a"):
        save(folder / "masks" / f"{name}.png", grey(255 * (NUMBERS > 0)))
    outputs = torch.zeros(2, 2, 2, 3)
    examples = read_examples(folder, Reading(ignored_label=255))
    with pytest.warns(BatchbayesWarning, match="that count are of class 0, .* Check the masks, and ignore_label="):
        require_fitting("segmentation", Categorical(), outputs, [examples], 255)
    require_fitting("segmentation", Categorical(), outputs, [read_examples(folder)], None)
    given = from_tensors("given", torch.zeros(1, 3, 1, 2), torch.tensor([[[0, 255]]]))
    with pytest.raises(BatchbayesError, match=r"Do this: pass \(y == 255\).long\(\) for two classes"):
        require_fitting("segmentation", Categorical(), outputs[:1, :, :1, :2], [given], None)


def few_bits(path, numbers, bits):
    """Write a grey PNG with 1, 2, 4 or 8 bits for each pixel."""
    rows = ["".join(f"{number:0{bits}b}" for number in row) for row in numbers]
    packed = [bytes([0, *(int(row[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(row), 8))]) for row in rows]
    header = struct.pack(">IIBBBBB", len(numbers[0]), len(numbers), bits, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(packed))), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks_of_few_bits_keep_their_numbers(tmp_path, bits):
    numbers = np.arange(15).reshape(3, 5) % 2**bits
    few_bits(tmp_path / "m.png", numbers.tolist(), bits)
    assert read_mask(tmp_path / "m.png").tolist() == numbers.tolist()


@pytest.mark.parametrize("kind", [np.uint8, bool])
def test_masks_in_which_zero_is_shown_as_white_keep_their_numbers(tmp_path, kind):
    numbers = NUMBERS if kind is np.uint8 else NUMBERS > 1
    inverted = 255 - numbers if kind is np.uint8 else ~numbers  # pillow inverts what it writes
    save(tmp_path / "m.tif", Image.fromarray(inverted.astype(kind)), tiffinfo={262: 0})
    assert read_mask(tmp_path / "m.tif").tolist() == numbers.tolist()


def test_a_pair_of_folders(folder, tmp_path):
    (folder / "masks").rename(folder / "answers")
    examples = read_masked_images(folder / "images", folder / "answers", Reading())
    assert examples.targets().shape == (2, 2, 3)


def test_new_images_have_no_masks(folder, tmp_path):
    (folder / "masks").rename(folder / "images" / "sub" / ".masks")
    (folder / "images" / "sub" / "a.jpg").unlink()
    examples = read_examples(folder, Reading(class_names=("x", "y")))
    assert ([targets for _, targets in examples], examples.ids()) == ([None], ("b.jpg",))


def test_masks_are_resized_without_new_classes(folder):
    ((inputs, targets),) = read_examples(folder, Reading(preprocessing=Preprocessing(resize=(4, 6))))
    assert inputs.shape == (2, 3, 4, 6)
    assert targets[0].tolist() == NUMBERS.repeat(2, 0).repeat(2, 1).tolist()


def rotated(path, made):
    tags = Image.Exif()
    tags[0x0112] = 3
    path.with_suffix(".png").unlink(missing_ok=True)
    save(path, made, exif=tags)


REFUSED = {
    "no mask": (lambda f: (f / "masks" / "b.png").unlink(), r"a mask in .*; got b only in .*images"),
    "no image": (lambda f: (f / "images" / "b.jpg").unlink(), r"got b only in .*masks"),
    "two masks": (lambda f: save(f / "masks" / "b.bmp", grey()), r"got b\.bmp and b\.png"),
    "another size": (
        lambda f: save(f / "masks" / "b.png", grey(NUMBERS.T)),
        r"a mask of the size of b\.jpg, 3 x 2; got 2 x 3 in b\.png",
    ),
    "colours": (lambda f: save(f / "masks" / "b.png", grey().convert("RGB")), "b.png; got a mask of colours .mode RGB"),
    "a class too many": (
        lambda f: save(f / "masks" / "b.png", grey(NUMBERS * 0 + 3)),
        r"class numbers from 0 to 2 in .*b\.png; got 3",
    ),
    "a negative class": (
        lambda f: ((f / "masks" / "b.png").unlink(), save(f / "masks" / "b.tif", grey(-NUMBERS, np.int32))),
        "a class number -255",
    ),
    "a lossy mask": (
        lambda f: ((f / "masks" / "b.png").unlink(), save(f / "masks" / "b.jpg", grey())),
        "a mask in JPEG, which changes numbers",
    ),
    "an image that is rotated": (
        lambda f: rotated(f / "images" / "b.jpg", Image.new("RGB", (3, 2))),
        r"b\.jpg; got EXIF tags that rotate it",
    ),
    "a mask that is rotated": (
        lambda f: rotated(f / "masks" / "b.png", grey()),
        r"b\.png; got EXIF tags that rotate it",
    ),
    "a TIFF mask that is rotated": (
        lambda f: rotated(f / "masks" / "b.tif", grey()),
        r"b\.tif; got EXIF tags that rotate it",
    ),
    "a damaged mask": (lambda f: (f / "masks" / "b.png").write_bytes(b"x"), r"b\.png; got a damaged file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_do_not_fit_are_refused(folder, name):
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises(BatchbayesError, match=message):
        list(read_examples(folder, Reading(class_names=("x", "y", "z"), ignored_label=255)))


def test_the_label_of_pixels_that_do_not_count_must_be_named(folder):
    with pytest.raises(BatchbayesError, match=r"class numbers from 0 to 2 .*; got 255"):
        list(read_examples(folder, Reading(class_names=("x", "y", "z"))))
