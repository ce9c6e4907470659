"""Examples from image files: one image, a folder of images, or a folder with a sub-folder for each class."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from batchbayes.data.examples import Examples, from_dataset
from batchbayes.data.images import IMAGES, read_image
from batchbayes.data.preprocess import resized
from batchbayes.data.reading import Reading, class_numbers
from batchbayes.errors import BatchbayesError


class ImageFiles(Dataset[Any]):
    """Images (3, H, W), RGB from 0 to 1, with labels if there are classes."""

    def __init__(
        self, paths: Sequence[Path], labels: Sequence[int] | None = None, resize: tuple[int, int] | None = None
    ) -> None:
        self.paths, self.labels, self.resize = list(paths), labels, resize

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def size(self) -> tuple[int, int]:
        """The height and the width of all images: those that were asked for, or those of the first image."""
        if self.resize is not None:
            return self.resize
        return tuple(read_image(self.paths[0]).shape[1:])  # pyright: ignore[reportReturnType]

    def sized(self, image: Tensor, index: int) -> Tensor:
        """Return an image in the size of all images."""
        if self.resize is not None:
            return resized(image[None], self.resize)[0]
        if tuple(image.shape[1:]) != self.size:
            raise BatchbayesError(
                expected=f"images of one size, {self.size[1]} x {self.size[0]}",
                got=f"{image.shape[2]} x {image.shape[1]} in {self.paths[index].name}",
                fix="ask for one size with --resize (resize= in Python), or use a data function",
            )
        return image

    def __getitem__(self, index: int) -> Any:
        image = self.sized(read_image(self.paths[index]), index)
        return (image,) if self.labels is None else (image, self.labels[index])


def read_images(path: Path, reading: Reading, inputs_only: bool) -> Examples:
    """Read one image, or the images in a folder. Sub-folders are classes, unless `inputs_only`.

    A folder that lacks one of the classes of training keeps the numbers of the others. A folder with another class is
    refused. If no classes are known, they are the sub-folders in the order of their names, and each must have images.
    Unless they are resized, all images must have the same size.
    """
    labels, names, resize = None, reading.class_names, reading.resize
    if path.is_file():
        return from_dataset(path.name, ImageFiles([path], None, resize), class_names=names, source_ids=(path.name,))
    folders = {child.name: image_files(child) for child in visible(path) if child.is_dir()}
    loose = image_files(path, deep=False)
    if loose and any(folders.values()):
        raise BatchbayesError(
            expected=f"images of {path} in one folder, or in a sub-folder for each class",
            got=f"{loose[0].name} beside sub-folders with images",
            fix="move it into the sub-folder of its class",
        )
    paths = loose or [image for images in folders.values() for image in images]
    if not paths:
        raise BatchbayesError(
            expected=f"images in {path}, in a sub-folder for each class",
            got="none",
            fix=f"use one of {', '.join(sorted(IMAGES))}",
        )
    if not loose and not inputs_only:
        names = names or _classes(path, folders)
        used = [folder for folder, images in folders.items() for _ in images]
        labels = class_numbers(used, names, f"the sub-folders of {path}")
    ids = tuple(image.relative_to(path).as_posix() for image in paths)
    return from_dataset(path.name, ImageFiles(paths, labels, resize), class_names=names, source_ids=ids)


def image_files(folder: Path, deep: bool = True) -> list[Path]:
    """Return the images in a folder, and in its sub-folders if `deep`, in the order of their names."""
    found = folder.rglob("*") if deep else folder.glob("*")
    return sorted(
        path
        for path in found
        if path.suffix.lower() in IMAGES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def visible(folder: Path) -> list[Path]:
    """Return what is in a folder, without hidden files such as `._1.png` and `.ipynb_checkpoints`."""
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        raise BatchbayesError(
            expected=f"a folder {folder} that can be read", got=str(error.strerror), fix="check its permissions"
        ) from error


def _classes(path: Path, folders: dict[str, list[Path]]) -> tuple[str, ...]:
    empty = [name for name, images in folders.items() if not images]
    if empty:
        raise BatchbayesError(
            expected=f"images in each sub-folder of {path}, since sub-folders are classes",
            got=f"none in {', '.join(empty[:5])}",
            fix="remove it if it is no class; otherwise read the folder with the class names of the training folder",
        )
    return tuple(folders)
