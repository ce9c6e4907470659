"""What a transform is, several of them one after the other, and ready transforms of images and tables.

A transform turns some uniform numbers into the parameters of one view, a row. The same row serves for all inputs, so an
input's view does not depend on its neighbours. Geometric transforms can be undone on outputs that are maps of the
inputs. `look` and `back` run in `predict` and are traced for files: rows are tensors, and no number of them is read.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.checks import as_tensor
from batchbayes._common.signatures import Count, Positive, checked
from batchbayes.errors import BatchbayesError

Layout = Literal["NCHW", "NHWC", "NHW"]
"""Where the axes of images are: examples, channels, height, width."""


class Transform(ABC):
    """A random transform of inputs (N, ...), whose shape it keeps."""

    in_files: bool = True
    """Whether its views are a plain computation, which a file can hold."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many uniform numbers one view takes."""

    @abstractmethod
    def row(self, numbers: Tensor) -> Any:
        """Return the parameters of the view that uniform numbers (size,) stand for."""

    @abstractmethod
    def look(self, inputs: Tensor, row: Any) -> Tensor:
        """Return the view of inputs (N, ...) with these parameters."""

    def back(self, outputs: Tensor, inputs: Tensor, row: Any) -> Tensor:
        """Return the outputs for this view. If they have the places of the inputs, these are moved back."""
        return outputs

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the view of inputs (N, ...) that uniform numbers (size,) stand for."""
        return self.look(inputs, self.row(numbers))

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random view of the inputs."""
        return self.apply(inputs, torch.rand(self.size, generator=generator, dtype=torch.float64))

    def fitting(self, inputs: Tensor, is_so: bool, expected: str, fix: str) -> Tensor:
        """Return the inputs, or raise an error that says what is expected of them."""
        if is_so:
            return inputs
        got = f"inputs of shape {tuple(inputs.shape)} and {inputs.dtype}"
        raise BatchbayesError(f"{expected} for {type(self).__name__}", got, fix)

    def real(self, inputs: Tensor) -> Tensor:
        return self.fitting(inputs, inputs.is_floating_point(), "floating-point inputs", "convert the inputs first")


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
        object.__setattr__(self, "in_files", all(each.in_files for each in transforms))

    @property
    def size(self) -> int:
        return sum(each.size for each in self.transforms)

    def row(self, numbers: Tensor) -> tuple[Any, ...]:
        shares = numbers.split([each.size for each in self.transforms])
        return tuple(each.row(own) for each, own in zip(self.transforms, shares, strict=True))

    def look(self, inputs: Tensor, row: tuple[Any, ...]) -> Tensor:
        for each, own in zip(self.transforms, row, strict=True):
            inputs = each.look(inputs, own)
        return inputs

    def back(self, outputs: Tensor, inputs: Tensor, row: tuple[Any, ...]) -> Tensor:
        for each, own in zip(self.transforms[::-1], row[::-1], strict=True):
            outputs = each.back(outputs, inputs, own)
        return outputs

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


def read_fill(_: str, fill: Any) -> Any:
    """Return a fill value, or a tuple of them, that is finite."""
    values = fill if isinstance(fill, tuple) else (fill,)
    if values and all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return fill
    expected, fix = (
        "a finite fill value, or a tuple of one for each channel",
        "pass that of a black pixel or of silence",
    )
    raise BatchbayesError(expected, repr(fill), f"{fix}, after standardisation")


def read_stds(_: str, std: Any) -> tuple[float, ...]:
    """Return standard deviations that are finite and not all 0."""
    if isinstance(std, tuple | list) and std and all(0 <= value < math.inf for value in std) and any(std):
        return tuple(std)
    expected = "finite standard deviations that are not all 0, one for each training column or channel"
    raise BatchbayesError(expected, f"{std}", "make it by .of(training_inputs, amount), from inputs without NaN")


Fill = Annotated[float | tuple[float, ...], read_fill]
Stds = Annotated[tuple[float, ...], read_stds]


class ImageTransform(Transform):
    """A transform of images (N, C, H, W) or (N, H, W). Others need the option `layout`, which each of them has."""

    layout: Layout | None

    @abstractmethod
    def view(self, images: Tensor, row: Tensor) -> Tensor:
        """Return the view of images (N, C, H, W) or (N, H, W)."""

    @abstractmethod
    def undo(self, maps: Tensor, row: Tensor) -> Tensor:
        """Move maps (N, ..., H, W) for this view back to the places of the images."""

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        """Signals (N, channels, L) are no images (N, H, W), so these must be square if nobody says what they are."""
        shape, axes = inputs.shape, inputs.ndim
        may_be_last = axes == 4 and shape[1] > 4 and (shape[3] <= 4 or shape[1] == shape[2] != shape[3])  # of colours
        is_image = (axes > 3 and not may_be_last) or (axes == 3 and shape[1] == shape[2])
        self.fitting(
            inputs, is_image if self.layout is None else axes == len(self.layout), f"images {self.layout or 'NCHW'}",
            'say what the axes are, as in RandomFlip(layout="NHWC"), layout="NHW" for images without channels, or '
            'layout="NCHW"; use SignalShift, SignalCrop and SignalNoise for signals, and TableJitter for tables',
        )  # fmt: skip
        if self.layout == "NHWC":
            return self.view(inputs.movedim(-1, 1), row).movedim(1, -1)
        return self.view(inputs, row)

    def back(self, outputs: Tensor, inputs: Tensor, row: Tensor) -> Tensor:
        height, width = places = inputs.shape[1:3] if self.layout == "NHWC" else inputs.shape[-2:]
        if self.layout == "NHWC" and outputs.ndim == 4 and outputs.shape[1:3] == places:
            return self.undo(outputs.movedim(-1, 1), row).movedim(1, -1)
        if outputs.ndim > 2 and outputs.shape[-2:] == places:
            return self.undo(outputs, row)
        is_pooled = (1, 1) in (outputs.shape[-2:], outputs.shape[1:3])
        is_row = inputs.ndim == outputs.ndim == 3 and (outputs.shape[1] == height or outputs.shape[2] == width)
        if is_row or (outputs.ndim > 3 and not is_pooled):
            raise other_places(tuple(places), outputs)
        return outputs

    def filled(self, fill: float | tuple[float, ...], images: Tensor) -> Tensor:
        """Return the fill value, ready to broadcast with images (N, C, H, W)."""
        each = fill if isinstance(fill, tuple) else (fill,)
        fix = f"give values in the units of the inputs, in place of {fill}: one for each channel, or a single number"
        self.fitting(images, all(_holds(images.dtype, value) for value in each), "fill values that they can hold", fix)
        if not isinstance(fill, tuple):
            return images.new_full((), fill)
        has_channels = images.ndim == 4 and images.shape[1] == len(fill)
        self.fitting(images, has_channels, f"images (N, {len(fill)}, H, W), one channel for each fill value,", fix)
        return images.new_tensor(fill).view(-1, 1, 1)


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a type of numbers has this one, up to one percent."""
    if dtype.is_floating_point:
        return abs(value) <= torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and abs(int(value) - value) <= 0.01 * abs(value)


def other_places(places: tuple[int, ...], outputs: Tensor) -> BatchbayesError:
    """Return the error for outputs that cannot be moved back to the places of the inputs."""
    return BatchbayesError(
        expected=f"maps of the size of the inputs, {places}, so that views can be undone",
        got=f"outputs of shape {tuple(outputs.shape)}",
        fix="wrap the network so that it scales its outputs to the size of its inputs; or pass functions of your own "
        "as transform and as undo=",
    )


@checked
@dataclass(frozen=True)
class RandomCrop(ImageTransform):
    """Pad images on all sides, and cut out a part of the old size at a random place.

    `fill` is the value of the padding, or one value for each channel. Give it in the units of the inputs: black is not
    zero after standardisation. An undone map repeats its edge where the crop did not see the image.

    >>> image = torch.arange(9.0).view(1, 1, 3, 3)
    >>> RandomCrop(padding=1, fill=-1).apply(image, torch.tensor([0.9, 0.5]))[0, 0]
    tensor([[ 3.,  4.,  5.],
            [ 6.,  7.,  8.],
            [-1., -1., -1.]])
    """

    padding: Count
    fill: Fill = 0.0
    layout: Layout | None = field(default=None, repr=False)
    """The axes of the images, if their shape does not tell."""
    size: ClassVar[int] = 2  # type: ignore[misc]

    def row(self, numbers: Tensor) -> Tensor:
        """Return how far the crop lies below and to the right of the image, in pixels, (2,)."""
        return steps(numbers, self.padding)

    def view(self, images: Tensor, row: Tensor) -> Tensor:
        is_large = self.padding < min(images.shape[-2:])
        self.fitting(images, is_large, f"images larger than the padding of {self.padding}", "use a smaller padding")
        down, right = row.unbind()
        return overlaid(images, self.filled(self.fill, images), {-2: down, -1: right})

    def undo(self, maps: Tensor, row: Tensor) -> Tensor:
        down, right = row.to(maps.device).unbind()
        return shifted(shifted(maps, -down, -2)[0], -right, -1)[0]


@checked
@dataclass(frozen=True)
class RandomFlip(ImageTransform):
    """Mirror images, left to right, in half of the views."""

    layout: Layout | None = field(default=None, repr=False)
    """The axes of the images, if their shape does not tell."""
    size: ClassVar[int] = 1  # type: ignore[misc]

    def row(self, numbers: Tensor) -> Tensor:
        """Return whether the view is mirrored, (1,)."""
        return numbers < 0.5

    def view(self, images: Tensor, row: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.where(row.to(images.device), images.flip(-1), images)
        return images.flip(-1) if bool(row) else images

    def undo(self, maps: Tensor, row: Tensor) -> Tensor:
        return self.view(maps, row)


@checked
@dataclass(frozen=True)
class RandomShiftScale(ImageTransform):
    """Move images by up to `shift` of their size, and zoom by a factor of up to 1 + `scale`, or 1 / it.

    Pixels between others are interpolated. Pixels outside of the image have the value `fill`, as for `RandomCrop`.
    """

    shift: float = 0.05
    scale: float = 0.1
    fill: Fill = 0.0
    layout: Layout | None = field(default=None, repr=False)
    """The axes of the images, if their shape does not tell."""
    size: ClassVar[int] = 3  # type: ignore[misc]

    def __post_init__(self) -> None:
        if not (0 <= self.shift < 0.5 and 0 <= self.scale < 1 and self.shift + self.scale > 0):
            expected, got = "a shift from 0 to 0.5 and a scale from 0 to 1, not both 0", f"{self.shift}, {self.scale}"
            raise BatchbayesError(expected, got, "use shares of the size of the image, such as 0.05 and 0.1")

    def row(self, numbers: Tensor) -> Tensor:
        """Return the matrices that places of the view, and of the image, are read at, (2, 2, 3)."""
        across, down, zoom = (2 * numbers - 1).tolist()
        zoom, across, down = (1 + self.scale) ** zoom, 2 * self.shift * across, 2 * self.shift * down
        there = [[1 / zoom, 0.0, -across], [0.0, 1 / zoom, -down]]  # in units of half an image
        back = [[1 / (1 / zoom), 0.0, across * zoom], [0.0, 1 / (1 / zoom), down * zoom]]
        return torch.tensor([there, back], dtype=torch.float64)

    def view(self, images: Tensor, row: Tensor) -> Tensor:
        fill = self.filled(self.fill, self.real(images))
        return _resampled(images - fill, row[0], "zeros") + fill

    def undo(self, maps: Tensor, row: Tensor) -> Tensor:
        return _resampled(maps, row[1], "border")


def steps(numbers: Tensor, most: int) -> Tensor:
    """Return whole numbers from `-most` to `most` that uniform numbers stand for."""
    return (numbers.double() * (2 * most + 1)).long() - most


def shifted(values: Tensor, offset: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return what lies `offset` places further along an axis, and which places (L,) lie inside.

    Outside the last one that is known is repeated.
    """
    length = values.shape[axis]
    places = torch.arange(length, device=values.device) + offset.to(values.device)
    inside = (places >= 0) & (places < length)
    return values.index_select(axis, places.clamp(0, length - 1)), inside


def overlaid(values: Tensor, fill: Tensor, offsets: Mapping[int, Tensor]) -> Tensor:
    """Return what lies `offsets` places further along some axes, and `fill` outside.

    A file traces places by numbers; slices are many times faster, and their ends cannot be traced.
    """
    if torch.compiler.is_compiling():
        for axis, offset in offsets.items():
            seen, inside = shifted(values, offset, axis)
            values = torch.where(inside.view(-1, *[1] * (-1 - axis)), seen, fill)
        return values
    found = fill.expand_as(values).clone()
    target, source = found, values
    for axis, by in ((axis, int(offset)) for axis, offset in offsets.items()):
        length = values.shape[axis] - abs(by)
        target, source = target.narrow(axis, max(-by, 0), length), source.narrow(axis, max(by, 0), length)
    target.copy_(source)
    return found


def _resampled(images: Tensor, matrix: Tensor, outside: str) -> Tensor:
    """Return images (N, ..., H, W) read at the places that a matrix (2, 3) makes of theirs."""
    fine = images.to(torch.promote_types(images.dtype, torch.float32))  # half precision is too coarse for places
    fine = fine.flatten(1, -3) if images.ndim > 3 else fine[:, None]
    grid = F.affine_grid(matrix[None].to(fine), [1, *fine.shape[1:]], align_corners=False)
    grid = grid.expand(images.shape[0], -1, -1, -1)
    return F.grid_sample(fine, grid, padding_mode=outside, align_corners=False).to(images.dtype).view_as(images)


@checked
@dataclass(frozen=True)
class TableJitter(Transform):
    """Add Gaussian noise to each column of a table (N, D): `amount` times the column's training standard deviation.

    All rows get the same noise in a view. `TableJitter.of(training_inputs, 0.1)` computes the standard deviations.
    """

    amount: Positive
    std: Stds

    @classmethod
    def of(cls, inputs: Tensor, amount: float) -> "TableJitter":
        """Return the jitter for training inputs (N, D)."""
        table = as_tensor(inputs, "the training inputs").double()
        return cls(amount, tuple(table.std(0, correction=0).tolist()) if table.ndim == 2 else ())

    @property
    def size(self) -> int:
        return len(self.std)

    def row(self, numbers: Tensor) -> Tensor:
        """Return what is added to each column, (D,)."""
        noise = torch.special.ndtri(numbers.clamp(1e-9, 1 - 1e-9))  # standard normal
        return self.amount * torch.tensor(self.std, dtype=torch.float64) * noise

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        fix = "make the jitter from the training inputs, by TableJitter.of(inputs, amount)"
        self.fitting(inputs, inputs.shape[1:] == (self.size,), f"a table (N, {self.size})", fix)
        return self.real(inputs) + row.to(inputs)
