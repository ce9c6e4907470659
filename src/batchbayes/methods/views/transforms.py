"""What a transform is, and several of them one after the other.

A transform turns some uniform numbers into one view of the inputs. The same numbers serve for all inputs, so an input's
view does not depend on its neighbours. Geometric transforms can be undone on outputs that are maps of the inputs.

Ready transforms of images: crop, flip, shift and scale.

A ready transform of tables: jitter in units of the training standard deviations.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.checks import as_tensor, finite_number, whole_number
from batchbayes.errors import BatchbayesError, unknown_name

Layout = Literal["NCHW", "NHWC", "NHW"]
"""Where the axes of images are: examples, channels, height, width."""


class Transform(ABC):
    """A random transform of inputs (N, ...), whose shape it keeps."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many uniform numbers one view takes."""

    @abstractmethod
    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the view of inputs (N, ...) that uniform numbers (size,) stand for."""

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Move outputs (N, ..., H, W) for this view back to the places of the original inputs."""
        return outputs

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random view of the inputs."""
        return self.apply(inputs, torch.rand(self.size, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class Compose(Transform):
    """Apply several transforms, one after the other: `Compose(RandomCrop(4), RandomFlip())`."""

    transforms: tuple[Transform, ...]

    def __init__(self, *transforms: Transform) -> None:
        if not transforms or not all(isinstance(each, Transform) for each in transforms):
            raise BatchbayesError(
                expected="one ready transform or more",
                got=", ".join(type(each).__name__ for each in transforms) or "none",
                fix="call your own functions inside one function, and pass that to with_views",
            )
        object.__setattr__(self, "transforms", transforms)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.transforms)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        for each, own in self._shares(numbers):
            inputs = each.apply(inputs, own)
        return inputs

    def undo(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        for each, own in reversed(self._shares(numbers)):
            outputs = each.undo(outputs, own)
        return outputs

    def _shares(self, numbers: Tensor) -> list[tuple[Transform, Tensor]]:
        shares = numbers.split([each.size for each in self.transforms])
        return list(zip(self.transforms, shares, strict=True))

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


def require_floating(transform: Transform, inputs: Tensor) -> None:
    if not inputs.is_floating_point():
        raise BatchbayesError(
            expected=f"floating-point inputs for {type(transform).__name__}",
            got=str(inputs.dtype),
            fix="convert the inputs first",
        )


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Pad images (N, C, H, W) or (N, H, W) on all sides, and cut out a part of the old size at a random place.

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
    layout: Layout | None = field(default=None, repr=False)
    """The axes of the images, if their shape does not tell."""
    size: ClassVar[int] = 2  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", whole_number("padding", self.padding))
        _require_fill(self.fill)
        _require_layout(self.layout)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        if _require_images(self, inputs, self.layout) == "NHWC":
            return replace(self, layout="NCHW").apply(inputs.movedim(-1, 1), numbers).movedim(1, -1)
        height, width = inputs.shape[-2:]
        if self.padding >= min(height, width):
            raise BatchbayesError(
                expected=f"images larger than the padding of {self.padding}",
                got=f"{height} x {width} pixels",
                fix="use a smaller padding",
            )
        down, right = self.offsets(numbers)
        view = _filled(self.fill, inputs).expand_as(inputs).clone()
        (to_rows, rows), (to_columns, columns) = overlap(down, height), overlap(right, width)
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
    """Mirror images (N, C, H, W) or (N, H, W), left to right, in half of the views.

    `layout` says where the axes of the images are, if their shape does not tell.
    """

    layout: Layout | None = field(default=None, repr=False)
    size: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        _require_layout(self.layout)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        if _require_images(self, inputs, self.layout) == "NHWC":
            return self.undo(inputs.movedim(-1, 1), numbers).movedim(1, -1)
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
        if inputs.ndim != 4:
            raise _no_images(self, inputs)
        _require_images(self, inputs, None)
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


def _require_images(transform: Transform, inputs: Tensor, layout: Layout | None) -> Layout:
    """Return where the axes of images are, as it was said or as their shape tells; or refuse them.

    Images with few channels, or as wide as they are high, tell it. Signals (N, channels, L) are no images (N, H, W).
    """
    shape, axes = tuple(inputs.shape), inputs.ndim
    if layout is not None:
        if axes != len(layout):
            raise _no_images(transform, inputs, layout)
        return layout
    if axes == 3 and shape[1] == shape[2]:
        return "NHW"
    if axes < 4 or (axes == 4 and _is_channels_last(shape)):
        raise _no_images(transform, inputs)
    return "NCHW"


def _is_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images have at most four colours last, or are square if their colours are last but not else."""
    if shape[1] <= 4:
        return False
    return shape[3] <= 4 or (shape[1] == shape[2] != shape[3])


def _no_images(transform: Transform, inputs: Tensor, layout: str = "NCHW") -> BatchbayesError:
    return BatchbayesError(
        expected=f"images {layout} for {type(transform).__name__}: examples, channels, height, width",
        got=f"inputs of shape {tuple(inputs.shape)}",
        fix='say what the axes are, as in RandomFlip(layout="NHWC"), layout="NHW" for images without channels, or '
        'layout="NCHW"; use SignalShift, SignalCrop and SignalNoise for signals, and TableJitter for tables',
    )


def _require_layout(layout: object) -> None:
    if layout is not None and layout not in get_args(Layout):
        raise unknown_name("a layout", layout, get_args(Layout))


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


def overlap(offset: int, length: int) -> tuple[slice, slice]:
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


@dataclass(frozen=True)
class TableJitter(Transform):
    """Add Gaussian noise to each column of a table (N, D): `amount` times the column's training standard deviation.

    All rows get the same noise in a view. `TableJitter.of(training_inputs, 0.1)` computes the standard deviations.
    """

    amount: float
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        finite_number("an amount", self.amount, above=0, fix="pass for example 0.05")
        known = isinstance(self.std, tuple | list)
        if not (known and self.std and all(0 <= std < math.inf for std in self.std) and any(self.std)):
            raise BatchbayesError(
                expected="finite standard deviations that are not all 0, one for each training column",
                got=f"{self.std}",
                fix="make the jitter by TableJitter.of(training_inputs, amount), from a table (N, D) without NaN",
            )

    @classmethod
    def of(cls, inputs: Tensor, amount: float) -> "TableJitter":
        """Return the jitter for training inputs (N, D)."""
        table = as_tensor(inputs, "the training inputs").double()
        return cls(amount, tuple(table.std(0, correction=0).tolist()) if table.ndim == 2 else ())

    @property
    def size(self) -> int:
        return len(self.std)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        if inputs.shape[1:] != (self.size,):
            raise BatchbayesError(
                expected=f"a table (N, {self.size}), one column for each standard deviation",
                got=f"shape {tuple(inputs.shape)}",
                fix="make the jitter from the training inputs, by TableJitter.of(inputs, amount)",
            )
        require_floating(self, inputs)
        noise = torch.special.ndtri(numbers.clamp(1e-9, 1 - 1e-9))  # standard normal
        return inputs + (self.amount * torch.tensor(self.std, dtype=torch.float64) * noise).to(inputs)
