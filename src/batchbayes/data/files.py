"""Read examples from arrays (.npz), tables (.csv, .parquet) and folders of images. No code in a file is executed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batchbayes.data.examples import Examples, from_dataset, from_tensors
from batchbayes.data.schema import Schema
from batchbayes.data.tables import TABLES, read_table
from batchbayes.errors import BatchbayesError

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
INPUT_KEYS, TARGET_KEYS = ("x", "inputs", "images", "data"), ("y", "targets", "labels", "target")


def read_examples(
    path: Path,
    target: str | None = None,
    *,
    id_column: str | None = None,
    schema: Schema | None = None,
    class_names: Sequence[str] | None = None,
) -> Examples:
    """Read the examples in a file or folder; `target` is the target column of a table or target array of an .npz."""
    if not path.exists():
        raise BatchbayesError(expected="a data file or folder", got=f"nothing at {path}", fix="check the path")
    if path.is_dir():
        return read_image_folder(path)
    if path.suffix.lower() in TABLES:
        return read_table(path, target, id_column=id_column, schema=schema, class_names=class_names)
    if path.suffix.lower() != ".npz":
        raise BatchbayesError(
            expected="a .npz, .csv or .parquet file, a folder of images, or pkg.module:function",
            got=str(path),
            fix="convert it, or write a function that returns a DataLoader",
        )
    return read_arrays(path, target)


def read_arrays(path: Path, target: str | None = None) -> Examples:
    """Read arrays `X` and `y` (or inputs, images; targets, labels) of an .npz file, and `class_names` if present."""
    arrays = read_npz(path)
    inputs = _named(arrays, INPUT_KEYS)
    targets = arrays.get(target) if target else _named(arrays, TARGET_KEYS)
    if inputs is None or (target and targets is None):
        wanted = "an array X of inputs" if inputs is None else f"an array {target!r}"
        raise BatchbayesError(
            expected=f"{wanted} in {path.name}", got=f"arrays {', '.join(sorted(arrays)) or 'none'}", fix="rename one"
        )
    names = arrays.get("class_names", arrays.get("classes"))
    features = arrays.get("features")
    return from_tensors(
        path.name,
        torch.from_numpy(np.asarray(inputs, dtype=np.float32)),
        None if targets is None else as_targets(targets),
        class_names=None if names is None else tuple(map(str, names)),
        feature_names=None if features is None else tuple(map(str, features)),
    )


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file. Pickled objects are refused and not loaded."""
    try:
        with path.open("rb") as stream:  # given a path, numpy would leave a damaged file open
            file = np.load(stream, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("a single array")
            return {key: file[key] for key in file.files}
    except Exception as error:  # zipfile, zlib, lzma and numpy each have their own errors for a damaged file
        raise BatchbayesError(
            expected=f"arrays of numbers in {path}",
            got=(str(error).splitlines() or [type(error).__name__])[0].rstrip("."),
            fix="write it with numpy.savez",
        ) from error


def _named(arrays: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray | None:
    return next((array for key, array in arrays.items() if key.lower() in names), None)


def as_targets(values: np.ndarray) -> Tensor:
    """Convert targets: integers become labels, other numbers become real targets."""
    whole = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    return torch.from_numpy(values.astype(np.int64 if whole else np.float32))


class ImageFolder(Dataset[Any]):
    """Images (3, H, W), RGB from 0 to 1, with labels if there are classes."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None) -> None:
        self.paths, self.labels = list(paths), labels
        self.shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = read_image(self.paths[index])
        self.shape = self.shape or tuple(image.shape)
        if tuple(image.shape) != self.shape:
            raise BatchbayesError(
                expected=f"images of one size, {self.shape[2]} x {self.shape[1]}",
                got=f"{image.shape[2]} x {image.shape[1]} in {self.paths[index].name}",
                fix="resize them, or use a data function that does",
            )
        return (image,) if self.labels is None else (image, self.labels[index])


def read_image(path: Path) -> Tensor:
    """Read one image as (3, H, W) from 0 to 1."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise BatchbayesError(
            expected="pillow, to read images", got="none", fix="pip install 'batchbayes[report]'"
        ) from error
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    except (UnidentifiedImageError, OSError) as error:
        raise BatchbayesError(
            expected=f"an image in {path}", got="a damaged file", fix="remove or replace it"
        ) from error
    return torch.from_numpy(pixels.transpose(2, 0, 1) / 255)


def read_image_folder(folder: Path) -> Examples:
    """Read images in sub-folders, which are classes in the order of their names, or in one folder without classes."""
    classes = sorted(child for child in folder.iterdir() if child.is_dir() and any(_images(child)))
    if classes:
        found = [(path, label) for label, child in enumerate(classes) for path in _images(child)]
        dataset = ImageFolder([path for path, _ in found], [label for _, label in found])
        return from_dataset(folder.name, dataset, class_names=tuple(child.name for child in classes))
    paths = list(_images(folder))
    if not paths:
        raise BatchbayesError(
            expected=f"images in {folder}, in a sub-folder for each class",
            got="none",
            fix=f"use one of {', '.join(sorted(IMAGES))}",
        )
    return from_dataset(folder.name, ImageFolder(paths, None))


def _images(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGES)
