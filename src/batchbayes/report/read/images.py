"""Examples from image files: one image, a folder of images, or a folder with a sub-folder for each class.

One image file as numbers from 0 to 1. What has no clear scale is refused.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from batchbayes._common.checks import install_command
from batchbayes.errors import BatchbayesError
from batchbayes.report.read.examples import Examples, from_dataset
from batchbayes.report.read.preprocess import resized
from batchbayes.report.read.reading import Reading, class_numbers, cleaned


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
    _require_links(path, visible(path))
    children = [child for child in visible(path) if child.is_dir()]
    if len(folders := {cleaned(child.name): image_files(child) for child in children}) < len(children):
        got, fix = "two that differ in characters that nobody sees", "put their images into one"
        raise BatchbayesError(expected=f"sub-folders with different names in {path}", got=got, fix=fix)
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
    images = [
        path
        for path in found
        if path.suffix.lower() in IMAGES and not any(map(is_hidden, path.relative_to(folder).parts))
    ]
    _require_links(folder, images)
    return sorted(path for path in images if path.is_file())


def _require_links(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse links to nothing, which would be left out: images, or folders of images."""
    if dangling := [path for path in paths if path.is_symlink() and not path.exists()]:
        raise BatchbayesError(
            expected=f"images in {folder}",
            got=f"{len(dangling)} that are links to nowhere, such as {dangling[0].name}",
            fix="copy the images instead of the links, or remove the links",
        )


def is_hidden(name: str) -> bool:
    """Whether a name is that of a hidden file, or of a folder that zip on a Mac, a Synology or Windows adds."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "Thumbs.db")


def visible(folder: Path) -> list[Path]:
    """Return what is in a folder, without hidden files such as `._1.png` and `.ipynb_checkpoints`."""
    try:
        return sorted(child for child in folder.iterdir() if not is_hidden(child.name))
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


IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
BYTES = {"1", "L", "P", "RGB", "LA", "PA", "RGBA", "CMYK", "YCbCr", "HSV"}
"""The modes of pillow with values from 0 to 255 (or palettes of such values), which it converts to RGB."""
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC, BLACK_IS_ZERO = 0x0112, 258, 262, 1


def read_image(path: Path, may_rotate: bool = True) -> Tensor:
    """Read one image as RGB (3, H, W) with values from 0 to 1, upright as a viewer shows it.

    - Images with 8 bits or 1 bit, palettes, CMYK and YCbCr are converted to RGB and divided by 255.
    - Grey images with 16 bits are divided by 65535.
    - Grey images of floats must have values from 0 to 1, and keep them.
    - Other integers (32 bits, 12 bits, signed) are refused, because their scale is unknown.
    - Transparent pixels and several frames are refused. An opaque alpha channel is dropped.
    - Images that EXIF tags rotate are refused if they may not be rotated, because a mask belongs to them.
    """
    return torch.from_numpy(decoded(path, lambda image: _pixels(path, image), may_rotate))


def decoded(path: Path, convert: Callable[[Any], np.ndarray], may_rotate: bool) -> np.ndarray:
    """Open an image with pillow and convert it. Damaged files and files that are too large are refused in words."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BatchbayesError(expected="pillow, to read images", got="none", fix=install_command("report")) from error
    bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(path) as image:
            if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # the first frame of MPO is the photo
                raise refused(path, f"{frames} frames", "save one frame as an image of its own")
            if not may_rotate and image.getexif().get(ORIENTATION, 1) != 1:  # loading a TIFF file would turn it
                fix = "save images and masks without the tags, in the same direction"
                raise refused(path, "EXIF tags that rotate it", fix)
            image.load()
            return convert(image)
    except BatchbayesError:
        raise
    except bomb as error:
        raise refused(
            path, f"too many pixels ({error})", "make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except Exception as error:  # pillow raises errors of many types for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise refused(path, f"a damaged file ({reason})", "remove or replace it") from error


def refused(path: Path, got: str, fix: str) -> BatchbayesError:
    """Return an error about an image file."""
    return BatchbayesError(expected=f"an image in {path}", got=got, fix=fix)


def _pixels(path: Path, image: Any) -> np.ndarray:
    from PIL import ImageOps

    is_png, tags = image.format == "PNG", getattr(image, "tag_v2", {})
    image = ImageOps.exif_transpose(image)
    if image.mode in BYTES:
        return np.asarray(_opaque(path, image), dtype=np.float32).transpose(2, 0, 1) / 255
    if image.mode.startswith("I;16") or (image.mode == "I" and is_png):  # PNG has at most 16 bits
        bits, photometric = tags.get(BITS_PER_SAMPLE, (16,)), tags.get(PHOTOMETRIC, BLACK_IS_ZERO)
        if bits != (16,) or photometric != BLACK_IS_ZERO:
            raise refused(path, f"{bits[0]} bits, photometric {photometric}", "convert it to 16 bits with black as 0")
        grey = np.asarray(image, dtype=np.float32) / 65535
    elif image.mode == "F":
        grey = np.array(image, dtype=np.float32)
        if not (grey.min() >= 0 and grey.max() <= 1):
            got = f"floats from {grey.min():g} to {grey.max():g}"
            raise refused(path, got, "scale floats to values from 0 to 1, or use a data function")
    else:
        raise refused(path, f"pixels of mode {image.mode} with unknown scale", "convert it to 8 or 16 bits")
    return np.repeat(grey[None], 3, axis=0)


def _opaque(path: Path, image: Any) -> Any:
    """Return an image as RGB, after a check that no pixel is transparent."""
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        if image.convert("RGBA").getextrema()[3][0] < 255:
            raise refused(path, "transparent pixels", "put it on the background that was used in training")
        image = image.convert("RGBA")
    return image.convert("RGB")
