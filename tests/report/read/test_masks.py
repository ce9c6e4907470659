import numpy as np
import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.report.read.masks import read_masked_images
from batchbayes.report.read.preprocess import Preprocessing
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_examples

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


def rotated(folder):
    tags = Image.Exif()
    tags[0x0112] = 3
    save(folder / "images" / "b.jpg", Image.new("RGB", (3, 2)), exif=tags)


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
    "an image that is rotated": (rotated, r"b\.jpg; got EXIF tags that rotate it"),
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
