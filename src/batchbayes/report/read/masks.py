"""Examples for segmentation: images, and masks with the class number of each pixel."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from batchbayes.errors import BatchbayesError
from batchbayes.report.read.examples import Examples, from_dataset
from batchbayes.report.read.images import (
    BITS_PER_SAMPLE,
    PHOTOMETRIC,
    ImageFiles,
    decoded,
    image_files,
    read_image,
    refused,
)
from batchbayes.report.read.reading import Reading

IMAGE_FOLDER, MASK_FOLDER = "images", "masks"
LOSSLESS = {"PNG", "TIFF", "BMP"}
GREY_OR_PALETTE = {"1", "L", "P", "I"}
WHITE, WHITE_IS_ZERO = 255, 0
PNG_BIT_DEPTH = 24
"""The byte of a PNG file that has the number of bits of a pixel."""


class MaskedImages(ImageFiles):
    """Images (3, H, W) from 0 to 1, and masks (H, W) of class numbers."""

    def __init__(self, paths: Sequence[Path], masks: Sequence[Path], reading: Reading) -> None:
        super().__init__(paths, resize=reading.resize)
        self.masks, self.reading = list(masks), reading

    @cached_property
    def is_black_and_white(self) -> bool:
        """Whether the masks have no numbers but 0 and 255. These are two classes, unless 255 does not count."""
        names, ignored = self.reading.class_names, self.reading.ignored_label
        if ignored == WHITE or (names is not None and len(names) != 2):
            return False
        return all(bool(((mask == 0) | (mask == WHITE)).all()) for mask in map(read_mask, self.masks))

    def __getitem__(self, index: int) -> Any:
        image, mask = read_image(self.paths[index], may_rotate=False), read_mask(self.masks[index])
        if self.is_black_and_white:
            mask = mask // WHITE
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

    Masks are lossless grey or palette images, whose numbers are classes. If all of them are black and white, white is
    class 1. If the classes have names, larger numbers are refused. The label of pixels that do not count stays in the
    targets. If images are resized, masks take the nearest pixel.
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
    """Read the class numbers (H, W) of a grey or palette image, as they stand in the file."""
    return torch.from_numpy(decoded(path, lambda image: _class_numbers(path, image), may_rotate=False))


def _class_numbers(path: Path, image: Any) -> np.ndarray:
    if image.format not in LOSSLESS or "jpeg" in str(image.info.get("compression")):
        raise refused(path, f"a mask in {image.format}, which changes numbers", "save masks as PNG")
    if image.mode not in GREY_OR_PALETTE and not image.mode.startswith("I;16"):
        raise refused(path, f"a mask of colours (mode {image.mode})", "save class numbers as a grey or palette PNG")
    numbers = np.array(image).astype(np.int64)
    if image.mode in ("1", "L"):
        numbers = _as_stored(path, image, numbers)
    if numbers.min() < 0:
        raise refused(path, f"a class number {numbers.min()}", "number classes from 0")
    return numbers


def _as_stored(path: Path, image: Any, numbers: np.ndarray) -> np.ndarray:
    """Undo what pillow does to grey images: it scales 2 and 4 bits to 255, and inverts TIFF files whose 0 is white."""
    tags, largest = getattr(image, "tag_v2", {}), 1 if image.mode == "1" else WHITE
    bits = path.read_bytes()[PNG_BIT_DEPTH] if image.format == "PNG" else tags.get(BITS_PER_SAMPLE, (8,))[0]
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        numbers = largest - numbers
    return numbers // (largest // (2**bits - 1)) if bits in (2, 4) else numbers


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
