"""Views in a file: the transforms of `methods/views`, with their parameters read from a bank instead of drawn."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes._common.rng import even_numbers
from batchbayes.errors import BatchbayesError
from batchbayes.methods.views.images import RandomCrop, RandomFlip, RandomShiftScale
from batchbayes.methods.views.posterior import ViewsPosterior
from batchbayes.methods.views.tables import TableJitter
from batchbayes.methods.views.transform import Compose, Transform

Change = Callable[[Tensor, Tensor], Tensor]
"""From inputs, or outputs, and one row of the bank to the changed ones."""


@dataclass(frozen=True, eq=False)
class BankedView:
    """One transform, with the parameters of V views."""

    rows: Tensor
    """(V, ...)"""
    look: Change
    """Returns the view of inputs (N, ...)."""
    back: Change
    """Moves outputs (N, ..., H, W) that are maps back to the places of the inputs."""


def bank_views(posterior: ViewsPosterior, count: int, seed: int) -> list[BankedView]:
    """Return the transforms of a posterior, one after the other, with the parameters of its first views."""
    if not isinstance(posterior.transform, Transform):
        raise BatchbayesError(
            expected="ready transforms such as RandomCrop, which a file can hold",
            got=f"a function of your own, {posterior.transform!r}",
            fix="export the posterior without it, or use a ready transform",
        )
    numbers = torch.stack([even_numbers(seed, index, posterior.transform.size) for index in range(count)])
    parts = posterior.transform.transforms if isinstance(posterior.transform, Compose) else (posterior.transform,)
    shares = numbers.split([part.size for part in parts], dim=1)
    return [_banked(part, share) for part, share in zip(parts, shares, strict=True)]


def _banked(transform: Transform, numbers: Tensor) -> BankedView:
    """Return one transform with the parameters that the numbers (V, size) stand for."""
    match transform:
        case RandomCrop():
            offsets = torch.tensor([transform.offsets(each) for each in numbers])
            return BankedView(offsets, lambda x, row: _cropped(x, row, transform.fill), _uncropped)
        case RandomFlip():
            return BankedView((numbers[:, 0] < 0.5).long(), _flipped, _flipped)
        case RandomShiftScale():
            rows = torch.stack([_matrices(transform, each) for each in numbers])
            return BankedView(rows, lambda x, row: _moved(x, row, transform.fill), _moved_back)
        case TableJitter():
            like = torch.zeros(1, transform.size, dtype=torch.float64)
            rows = torch.cat([transform.apply(like, each) for each in numbers])
            return BankedView(rows, lambda x, row: x + row.to(x.dtype), lambda outputs, _: outputs)
    raise BatchbayesError(
        expected="a ready transform, or Compose of some", got=type(transform).__name__, fix="use a ready transform"
    )


def _fill(fill: float | tuple[float, ...], images: Tensor) -> Tensor:
    return torch.tensor(fill, dtype=images.dtype).reshape(-1, 1, 1)


def _places(length: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each pixel of a moved row comes from, within the image, and whether it is inside."""
    places = torch.arange(length) + offset
    return places.clamp(0, length - 1), (places >= 0) & (places < length)


def _cropped(images: Tensor, row: Tensor, fill: float | tuple[float, ...]) -> Tensor:
    (rows, in_rows), (columns, in_columns) = (
        _places(length, offset) for length, offset in zip(images.shape[-2:], row.unbind(), strict=True)
    )
    seen = images.index_select(-2, rows).index_select(-1, columns)
    return torch.where(in_rows[:, None] & in_columns, seen, _fill(fill, images))


def _uncropped(outputs: Tensor, row: Tensor) -> Tensor:
    (rows, _), (columns, _) = (
        _places(length, -offset) for length, offset in zip(outputs.shape[-2:], row.unbind(), strict=True)
    )
    return outputs.index_select(-2, rows).index_select(-1, columns)


def _flipped(images: Tensor, row: Tensor) -> Tensor:
    columns = torch.arange(images.shape[-1])
    return images.index_select(-1, torch.where(row > 0, columns.flip(0), columns))


def _matrices(transform: RandomShiftScale, numbers: Tensor) -> Tensor:
    """Return the matrices of the view and of its inverse, (2, 2, 3)."""
    zoom, (across, down) = transform.parameters(numbers)
    there = [[1 / zoom, 0.0, -across], [0.0, 1 / zoom, -down]]
    back = [[zoom, 0.0, across * zoom], [0.0, zoom, down * zoom]]
    return torch.tensor([there, back])


def _moved(images: Tensor, row: Tensor, fill: float | tuple[float, ...]) -> Tensor:
    return _resampled(images - _fill(fill, images), row[0], "zeros") + _fill(fill, images)


def _moved_back(outputs: Tensor, row: Tensor) -> Tensor:
    maps = outputs.flatten(1, -3) if outputs.ndim > 3 else outputs[:, None]
    return _resampled(maps, row[1], "border").reshape(outputs.shape)


def _resampled(images: Tensor, matrix: Tensor, outside: str) -> Tensor:
    fine = images.to(torch.promote_types(images.dtype, torch.float32))  # half precision is too coarse for places
    grid = F.affine_grid(matrix[None].to(fine.dtype), [1, *images.shape[1:]], align_corners=False)
    grid = grid.repeat(images.shape[0], 1, 1, 1)  # onnxruntime does not broadcast it
    return F.grid_sample(fine, grid, padding_mode=outside, align_corners=False).to(images.dtype)
