import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from batchbayes_papers.data.mnist import load_mnist, read_idx

from batchbayes import BatchbayesError

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint64).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 2, 9], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes()


def written(folder: Path, images: bytes, labels: bytes) -> Path:
    (folder / "mnist").mkdir()
    (folder / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(images)
    (folder / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(labels)
    return folder


def test_images_and_labels_come_back(tmp_path: Path) -> None:
    folder = written(tmp_path, gzip.compress(idx(IMAGES)), gzip.compress(idx(LABELS)))
    images, labels = load_mnist("mnist", "test", folder)
    assert torch.equal(images, torch.from_numpy(IMAGES)[:, None])
    assert (labels.tolist(), labels.dtype) == ([7, 2, 9], torch.int64)
    images, labels = load_mnist("mnist", "test", folder, limit=2)
    assert (len(images), labels.tolist()) == (2, [7, 2])


DAMAGED = {
    "not compressed": idx(IMAGES),
    "cut off": gzip.compress(idx(IMAGES))[:-20],
    "a byte short": gzip.compress(idx(IMAGES)[:-1]),
    "a byte too many": gzip.compress(idx(IMAGES) + b"\0"),
    "half a header": gzip.compress(idx(IMAGES)[:6]),
    "floating point": gzip.compress(b"\0\0\x0d" + idx(IMAGES)[3:]),
    "nothing compressed": gzip.compress(b""),
    "empty": b"",
}


# By name: gzip writes the time into its bytes, and a test's name may not depend on the time.
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(BatchbayesError, match=r"images\.gz.*download that file again"):
        read_idx(path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, gzip.compress(idx(IMAGES)), gzip.compress(idx(LABELS[:2])))
    with pytest.raises(BatchbayesError, match="as many labels"):
        load_mnist("mnist", "test", folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchbayesError, match=r"fashion_mnist/train-images-idx3-ubyte\.gz"):
        load_mnist("fashion_mnist", "train", tmp_path)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion_mnist", 0.2860, 0.3530)])
def test_the_real_images_have_their_known_mean_and_spread(data_folder: Path, name, mean: float, std: float) -> None:
    images, labels = load_mnist(name, "train", data_folder)
    pixels = images.double() / 255
    assert images.shape == (60_000, 1, 28, 28)
    assert labels.unique().tolist() == list(range(10))
    assert (float(pixels.mean()), float(pixels.std())) == pytest.approx((mean, std), abs=1e-4)
