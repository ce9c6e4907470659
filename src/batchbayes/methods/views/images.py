"""Ready transforms of images: crop, flip, shift and scale."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.checks import whole_number
from batchbayes.errors import BatchbayesError
from batchbayes.methods.views.transform import Transform, require_floating


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Pad images (N, ..., H, W) on all sides, and cut out a part of the old size at a random place.

    `fill` is the value of the padding, or one value for each channel. Give it in the units of the inputs: black is not
    zero after standardisation. An undone map repeats its edge where the crop did not see the image.

    >>> image = torch.arange(9.0).view(1, 1, 3, 3)
    >>> RandomCrop(padding=1, fill=-1).apply(image, torch.tensor([0.9, 0.5]))[0, 0]
    tensor([[ 3.,  4.,  5.],
            [ 6.,  7.,  8.],
            [-1., -1., -1.]])
    """

    padding: int
    fill: float | tuple[float, ...] = 0.0
    size: ClassVar[int] = 2  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", whole_number("padding", self.padding))
        _require_fill(self.fill)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        _require_images(self, inputs, 3)
        height, width = inputs.shape[-2:]
        if self.padding >= min(height, width):
            raise BatchbayesError(
                expected=f"images larger than the padding of {self.padding}",
                got=f"{height} x {width} pixels",
                fix="use a smaller padding",
            )
        down, right = self.offsets(numbers)
        view = _filled(self.fill, inputs).expand_as(inputs).clone()
        (to_rows, rows), (to_columns, columns) = _overlap(down, height), _overlap(right, width)
        view[..., to_rows, to_columns] = inputs[..., rows, columns]
        return view

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        down, right = self.offsets(numbers)
        rows, columns = (
            (torch.arange(length, device=outputs.device) - offset).clamp(0, length - 1)
            for length, offset in zip(outputs.shape[-2:], (down, right), strict=True)
        )
        return outputs[..., rows, :][..., columns]

    def offsets(self, numbers: Tensor) -> list[int]:
        """Return how far the crop lies below and to the right of the image, in pixels."""
        return [int(number * (2 * self.padding + 1)) - self.padding for number in numbers.tolist()]


@dataclass(frozen=True)
class RandomFlip(Transform):
    """Mirror images (N, ..., H, W), left to right, in half of the views."""

    size: ClassVar[int] = 1  # type: ignore[misc]

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        _require_images(self, inputs, 3)
        return self.undo(inputs, numbers)

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        return outputs.flip(-1) if float(numbers[0]) < 0.5 else outputs


@dataclass(frozen=True)
class RandomShiftScale(Transform):
    """Move images (N, C, H, W) by up to `shift` of their size, and zoom by a factor of up to 1 + `scale`, or 1 / it.

    Pixels between others are interpolated. Pixels outside of the image have the value `fill`, as for `RandomCrop`.
    """

    shift: float = 0.05
    scale: float = 0.1
    fill: float | tuple[float, ...] = 0.0
    size: ClassVar[int] = 3  # type: ignore[misc]

    def __post_init__(self) -> None:
        if not (0 <= self.shift < 0.5 and 0 <= self.scale < 1 and self.shift + self.scale > 0):
            raise BatchbayesError(
                expected="a shift from 0 to 0.5 and a scale from 0 to 1, not both 0",
                got=f"shift={self.shift}, scale={self.scale}",
                fix="use shares of the size of the image, such as 0.05 and 0.1",
            )
        _require_fill(self.fill)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        _require_images(self, inputs, 4, 4)
        require_floating(self, inputs)
        fill, (zoom, offsets) = _filled(self.fill, inputs), self.parameters(numbers)
        return _resampled(inputs - fill, zoom, offsets, "zeros") + fill

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        zoom, offsets = self.parameters(numbers)
        maps = outputs.flatten(1, -3) if outputs.ndim > 3 else outputs[:, None]
        return _resampled(maps, 1 / zoom, [-offset * zoom for offset in offsets], "border").view_as(outputs)

    def parameters(self, numbers: Tensor) -> tuple[float, list[float]]:
        """Return the zoom, and the shift along x and y in units of half an image."""
        across, down, zoom = (2 * numbers - 1).tolist()
        return (1 + self.scale) ** zoom, [2 * self.shift * across, 2 * self.shift * down]


def _require_images(transform: Transform, inputs: Tensor, fewest: int, most: int = 9) -> None:
    if not fewest <= inputs.ndim <= most:
        raise BatchbayesError(
            expected=f"images (N, C, H, W) for {type(transform).__name__}",
            got=f"inputs of shape {tuple(inputs.shape)}",
            fix="use TableJitter for tables, or a function of your own",
        )


def _require_fill(fill: float | tuple[float, ...]) -> None:
    values = fill if isinstance(fill, tuple) else (fill,)
    if not values or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise BatchbayesError(
            expected="a finite fill value, or a tuple of one for each channel",
            got=repr(fill),
            fix="pass the value of a black pixel after standardisation",
        )


def _filled(fill: float | tuple[float, ...], images: Tensor) -> Tensor:
    """Return the fill value, ready to broadcast with images (N, C, H, W)."""
    values = torch.tensor(fill, dtype=torch.float64)
    if not torch.allclose(values.to(images.dtype).double(), values, rtol=0.01):
        raise BatchbayesError(
            expected=f"fill values that {images.dtype} can hold",
            got=f"{fill}",
            fix="give them in the units of the inputs",
        )
    if not isinstance(fill, tuple):
        return images.new_full((), fill)
    if images.ndim != 4 or images.shape[1] != len(fill):
        raise BatchbayesError(
            expected=f"images (N, {len(fill)}, H, W), one channel for each fill value",
            got=f"shape {tuple(images.shape)}",
            fix="pass one fill value for each channel, or a single number",
        )
    return images.new_tensor(fill).view(-1, 1, 1)


def _overlap(offset: int, length: int) -> tuple[slice, slice]:
    """Return the part of the view that shows the image, and the part of the image that it shows."""
    before, after = max(0, -offset), max(0, offset)
    return slice(before, length - after), slice(after, length - before)


def _resampled(images: Tensor, zoom: float, offsets: list[float], outside: str) -> Tensor:
    """Return images (N, C, H, W) read at the places y -> y / zoom - offset, in units of half an image."""
    fine = images.to(torch.promote_types(images.dtype, torch.float32))  # half precision is too coarse for places
    matrix = torch.tensor([[1 / zoom, 0, -offsets[0]], [0, 1 / zoom, -offsets[1]]], dtype=fine.dtype)
    grid = F.affine_grid(matrix[None].to(images.device), [1, *images.shape[1:]], align_corners=False)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(fine, grid, padding_mode=outside, align_corners=False).to(images.dtype)
