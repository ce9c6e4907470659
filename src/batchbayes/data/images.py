"""One image file as numbers from 0 to 1. What has no clear scale is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError

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
    return torch.from_numpy(decoded(path, lambda image: _pixels(path, image, may_rotate)))


def decoded(path: Path, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Open an image with pillow and convert it. Damaged files and files that are too large are refused in words."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BatchbayesError(
            expected="pillow, to read images", got="none", fix="pip install 'batchbayes[report]'"
        ) from error
    bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(path) as image:
            if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # the first frame of MPO is the photo
                raise refused(path, f"{frames} frames", "save one frame as an image of its own")
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


def _pixels(path: Path, image: Any, may_rotate: bool) -> np.ndarray:
    from PIL import ImageOps

    if not may_rotate and image.getexif().get(ORIENTATION, 1) != 1:
        raise refused(path, "EXIF tags that rotate it", "save it without the tags, in the direction of its mask")
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
