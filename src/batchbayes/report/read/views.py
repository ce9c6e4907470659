"""Random views that are named on the command line: crop:4,flip."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.methods.views.transforms import (
    Compose,
    RandomCrop,
    RandomFlip,
    RandomShiftScale,
    TableJitter,
    Transform,
)

KINDS = {
    "crop": ("crop:4", 2, 4),
    "flip": ("flip", 0, None),
    "shift": ("shift:0.05", 1, 4),
    "jitter": ("jitter:0.05", 1, 2),
}
"""For each name an example, the largest number of numbers after it, and how many axes the inputs must have."""
PADDING = 8
"""Images are cropped by default after a padding of 1 / this of their width, as CIFAR-10 networks are trained."""
SMALLEST = 8
"""Images with fewer pixels on a side are not cropped unless this is asked for."""


def named_views(text: str, inputs: Tensor, task: str) -> Transform | None:
    """Return the transform that a text names; None for no views.

    Args:
        text: "auto", "none", or names with numbers after a colon, such as "crop:4,flip" or "jitter:0.05".
        inputs: some inputs (n, ...), in the units of the network. They tell the size of images, what a black pixel is,
            and the spread of columns.
        task: the task of the network.

    >>> named_views("auto", torch.zeros(2, 3, 32, 32), "classification")
    Compose(RandomCrop(padding=4, fill=(0.0, 0.0, 0.0)), RandomFlip())
    """
    if text == "auto":
        text = _usual(inputs, task)
    if text == "none":
        return None
    found = [_transform(*part.strip().split(":"), inputs=inputs) for part in text.split(",")]
    return found[0] if len(found) == 1 else Compose(*found)


def _usual(inputs: Tensor, task: str) -> str:
    is_image = inputs.ndim == 4 and inputs.shape[1] in (1, 3)
    if not is_image or min(inputs.shape[2:]) < SMALLEST:
        return "none"
    return "flip" if task == "segmentation" else f"crop:{max(1, inputs.shape[3] // PADDING)},flip"


def _transform(name: str, *given: str, inputs: Tensor) -> Transform:
    """Return one transform. Its numbers are texts, as they were given."""
    if name not in KINDS:
        raise unknown_name("views", name, (*KINDS, "none", "auto"))
    example, most, axes = KINDS[name]
    if not min(1, most) <= len(given) <= most:
        raise _wrong(" ".join(given) or name, f"{name} with {f'a number, as in {example}' if most else 'no number'}")
    if axes not in (None, inputs.ndim):
        kind = "images (N, C, H, W)" if axes == 4 else "tables (N, columns)"
        raise _wrong(f"inputs of shape {tuple(inputs.shape)}", f"{kind} for {name}")
    numbers = [_number(name, text) for text in given]
    if name == "flip":
        return RandomFlip()
    if name == "jitter":
        return TableJitter.of(inputs, numbers[0])
    black = tuple(inputs.amin((0, 2, 3)).tolist())
    if name == "shift":
        return RandomShiftScale(numbers[0], 0.0, black)
    padding, fill = numbers[0], numbers[1] if len(numbers) > 1 else black
    return RandomCrop(int(padding) if padding == int(padding) else padding, fill)  # type: ignore[arg-type]


def _number(name: str, text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise _wrong(text, f"a number after {name}:")


def _wrong(got: str, expected: str) -> BatchbayesError:
    fix = "write for example --views crop:4,flip for images, --views jitter:0.05 for tables, or --views none"
    return BatchbayesError(expected=expected, got=got, fix=fix)


def words(transform: Transform) -> str:
    """Describe a transform for the report.

    >>> words(Compose(RandomCrop(4), RandomFlip()))
    'crop by up to 4 pixels, flip'
    """
    parts: Sequence[Any] = transform.transforms if isinstance(transform, Compose) else [transform]
    return ", ".join(_word(part) for part in parts)


def _word(part: Any) -> str:
    if isinstance(part, RandomCrop):
        return f"crop by up to {part.padding} pixels"
    if isinstance(part, RandomShiftScale):
        return f"shift by up to {part.shift:g} of the size"
    return "flip" if isinstance(part, RandomFlip) else f"jitter by {part.amount:g} standard deviations"


def num_views(transform: Transform, most: int) -> int:
    """Return how many different views are worth their price: two of a flip alone, and else as many as allowed."""
    return min(2, most) if isinstance(transform, RandomFlip) else most


def some_inputs(batches: Any, count: int = 512) -> Tensor:
    """Return the first inputs of batches (inputs, targets)."""
    found, total = [], 0
    for inputs, _ in batches:
        found.append(inputs)
        total += len(inputs)
        if total >= count:
            break
    return torch.cat(found)[:count]
