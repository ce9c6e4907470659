"""Preprocessing that is named by numbers, not by code, so that it can be kept with a posterior."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from batchbayes.errors import BatchbayesError


@dataclass(frozen=True)
class Standardise:
    """Subtract a mean and divide by a standard deviation: for each column of a table, or each channel of an image.

    A single number is used for all columns or channels.

    >>> Standardise((1.0, 0.0), (2.0, 1.0))(torch.tensor([[3.0, 4.0]]))
    tensor([[1., 4.]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise _refused("as many numbers for the mean as for the std", f"{len(self.mean)} and {len(self.std)}")
        if not all(map(math.isfinite, self.mean)) or not all(math.isfinite(std) and std > 0 for std in self.std):
            raise _refused("finite numbers, with a std above zero", f"a mean {self.mean} and a std {self.std}")

    @classmethod
    def fit(cls, batches: Iterable[tuple[Tensor, Any]]) -> "Standardise":
        r"""Learn means and standard deviations (with $1/N$) from examples. A constant column gets a std of 1.

        Two parts with counts $n_1$ and $n_2$ have together the sum of squares
        $q_1 + q_2 + (m_1 - m_2)^2 n_1 n_2 / (n_1 + n_2)$, so that no pass over the data has to know the mean.
        """
        total, mean, squares, low, high = 0, *torch.tensor([0.0, 0.0, math.inf, -math.inf], dtype=torch.float64)
        for inputs, _ in batches:
            values = inputs.detach().cpu().double().transpose(0, 1).flatten(1)  # (columns or channels, values)
            found, difference = values.shape[1], values.mean(1) - mean
            squares = squares + values.var(1, correction=0) * found + difference**2 * total * found / (total + found)
            total, mean = total + found, mean + difference * found / (total + found)
            low, high = torch.minimum(low, values.amin(1)), torch.maximum(high, values.amax(1))
        if not total:
            raise _refused("examples to learn the standardisation from", "none")
        std = torch.where(low < high, (squares / total).sqrt(), 1.0)
        return cls(tuple(mean.tolist()), tuple(std.tolist()))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return standardised inputs (N, columns) or (N, channels, ...)."""
        if inputs.ndim < 2 or len(self.mean) not in (1, inputs.shape[1]):
            raise BatchbayesError(
                expected=f"inputs with {len(self.mean)} columns or channels, as the mean and the std",
                got=f"shape {tuple(inputs.shape)}",
                fix="give one number for each column or channel, or the data that the numbers were learnt from",
            )
        # A column such as a year has a mean far above its spread, so 32 bits are too few for the mean of a column.
        exact = torch.float64 if inputs.ndim == 2 else inputs.dtype
        mean, std = torch.tensor([self.mean, self.std], dtype=exact, device=inputs.device).reshape(
            2, 1, -1, *[1] * (inputs.ndim - 2)
        )
        return ((inputs.to(exact) - mean) / std).to(inputs.dtype)


class InTargetUnits(nn.Module):
    """A network that was trained on standardised targets, with outputs in the unit of the targets.

    >>> InTargetUnits(nn.Identity(), Standardise((10.0,), (2.0,)))(torch.tensor([[1.0], [-1.0]])).flatten()
    tensor([12.,  8.])
    """

    def __init__(self, network: nn.Module, targets: Standardise) -> None:
        super().__init__()
        self.network = network
        for name, numbers in (("mean", targets.mean), ("std", targets.std)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float64), persistent=False)
        self.to(next((p.device for p in network.parameters()), None))

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = self.network(*inputs)
        return outputs * self.std.to(outputs.dtype) + self.mean.to(outputs.dtype)

    @staticmethod
    def weights(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of a network under the names that they have in this module."""
        return {f"network.{name}": tensor for name, tensor in own.items()}


@dataclass(frozen=True)
class Preprocessing:
    """What is done to inputs before the network sees them: first the size, then the scale."""

    resize: tuple[int, int] | None = None
    """Height and width of the images."""
    standardise: Standardise | None = None

    def __post_init__(self) -> None:
        sides = (1, 1) if self.resize is None else self.resize
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise _refused("a height and a width in pixels", f"{self.resize}")

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the network for a batch."""
        if self.resize is not None:
            inputs = resized(inputs, self.resize)
        return inputs if self.standardise is None else self.standardise(inputs)

    def to_json(self) -> dict[str, Any]:
        """Return the preprocessing as dicts, lists and numbers, which `json` can write."""
        scale = self.standardise
        return {
            "resize": None if self.resize is None else list(self.resize),
            "mean": None if scale is None else list(scale.mean),
            "std": None if scale is None else list(scale.std),
        }

    @classmethod
    def from_json(cls, fields: Any) -> "Preprocessing":
        """Return the preprocessing that `to_json` described."""
        try:
            resize, mean, std = (
                None if fields[key] is None else tuple(fields[key]) for key in ("resize", "mean", "std")
            )
            scale = None if mean is None and std is None else Standardise(mean or (), std or ())
            return cls(resize, scale)  # pyright: ignore[reportArgumentType]  # a wrong length is refused
        except (KeyError, TypeError, OverflowError) as error:
            raise _refused("the description of a preprocessing", f"something else ({error})") from error


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images (N, C, H, W) to a height and a width, without aliasing. The shape of what they show may change.

    >>> resized(torch.ones(1, 3, 8, 6), (4, 4)).shape
    torch.Size([1, 3, 4, 4])
    """
    if images.ndim != 4:
        raise _refused("images (N, channels, height, width) to resize", f"shape {tuple(images.shape)}")
    if tuple(images.shape[2:]) == tuple(size):
        return images
    return interpolate(images, size, mode="bilinear", antialias=True)


def _refused(expected: str, got: str) -> BatchbayesError:
    return BatchbayesError(expected=expected, got=got, fix="check the preprocessing that was asked for")
