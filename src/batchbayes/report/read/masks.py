"""Examples for segmentation: images, and masks with the class number of each pixel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from batchbayes.errors import BatchbayesError
from batchbayes.report.read.examples import Examples, from_dataset
from batchbayes.report.read.images import ImageFiles, decoded, image_files, read_image, refused
from batchbayes.report.read.reading import Reading

IMAGE_FOLDER, MASK_FOLDER = "images", "masks"
LOSSLESS = {"PNG", "TIFF", "BMP"}
GREY_OR_PALETTE = {"1", "L", "P", "I"}


class MaskedImages(ImageFiles):
    """Images (3, H, W) from 0 to 1, and masks (H, W) of class numbers."""

    def __init__(self, paths: Sequence[Path], masks: Sequence[Path], reading: Reading) -> None:
        super().__init__(paths, resize=reading.resize)
        self.masks, self.reading = list(masks), reading

    def __getitem__(self, index: int) -> Any:
        image, mask = read_image(self.paths[index], may_rotate=False), read_mask(self.masks[index])
        if mask.shape != image.shape[1:]:
            raise BatchbayesError(
                expected=f"a mask of the size of {self.paths[index].name}, {image.shape[2]} x {image.shape[1]}",
                got=f"{mask.shape[1]} x {mask.shape[0]} in {self.masks[index].name}",
                fix="make both from the same image",
            )
        self._require_classes(mask, self.masks[index])
        if self.resize is not None:
            mask = interpolate(mask[None, None].double(), self.resize, mode="nearest-exact")[0, 0].long()
        return self.sized(image, index), mask

    def _require_classes(self, mask: Tensor, path: Path) -> None:
        if self.reading.class_names is None:
            return
        most, ignored = len(self.reading.class_names), self.reading.ignored_label
        wrong = mask[(mask >= most) & (mask != (-1 if ignored is None else ignored))]
        if wrong.numel():
            raise BatchbayesError(
                expected=f"class numbers from 0 to {most - 1} in {path}",
                got=f"{int(wrong[0])}",
                fix="renumber the masks, for example 255 as 1, or name the label of pixels that do not count",
            )


def read_masked_images(images: Path, masks: Path, reading: Reading) -> Examples:
    """Read a folder of images, and a folder of masks with the same names (the suffixes may be different).

    Masks are lossless grey or palette images, whose numbers are classes. If the classes have names, larger numbers are
    refused. The label of pixels that do not count stays in the targets. If images are resized, masks take the nearest
    pixel.
    """
    found, answers = _by_name(images), _by_name(masks)
    if found.keys() != answers.keys() or not found:
        alone = sorted(found.keys() ^ answers.keys())
        what = f"{alone[0]} only in {images if alone[0] in found else masks}" if alone else "no images"
        raise BatchbayesError(
            expected=f"a mask in {masks} for each image in {images}, with the same name",
            got=f"{what}{f' and {len(alone) - 1} more' if len(alone) > 1 else ''}",
            fix="add or remove files",
        )
    dataset = MaskedImages(list(found.values()), [answers[name] for name in found], reading)
    return from_dataset(
        images.parent.name if images.name == IMAGE_FOLDER else images.name,
        dataset,
        class_names=reading.class_names,
        source_ids=tuple(path.relative_to(images).as_posix() for path in dataset.paths),
        ignored_label=reading.ignored_label,
    )


def read_mask(path: Path) -> Tensor:
    """Read the class numbers (H, W) of a grey or palette image."""
    return torch.from_numpy(decoded(path, lambda image: _class_numbers(path, image)))


def _class_numbers(path: Path, image: Any) -> np.ndarray:
    if image.format not in LOSSLESS or "jpeg" in str(image.info.get("compression")):
        raise refused(path, f"a mask in {image.format}, which changes numbers", "save masks as PNG")
    if image.mode not in GREY_OR_PALETTE and not image.mode.startswith("I;16"):
        raise refused(path, f"a mask of colours (mode {image.mode})", "save class numbers as a grey or palette PNG")
    numbers = np.array(image).astype(np.int64)
    if numbers.min() < 0:
        raise refused(path, f"a class number {numbers.min()}", "number classes from 0")
    return numbers


def _by_name(folder: Path) -> dict[str, Path]:
    """Return images by their path without suffix."""
    found: dict[str, Path] = {}
    for path in image_files(folder):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in found:
            raise BatchbayesError(
                expected=f"one image with the name {name} in {folder}",
                got=f"{found[name].name} and {path.name}",
                fix="rename or remove one",
            )
        found[name] = path
    return found
