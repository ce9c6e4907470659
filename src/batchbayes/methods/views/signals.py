"""Ready transforms of signals (N, L) or (N, C, L), such as audio or the leads of an ECG. Time is the last axis.

All channels of a signal move together.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchbayes._common.checks import as_tensor, finite_number, whole_number
from batchbayes.errors import BatchbayesError
from batchbayes.methods.views.transforms import (
    Transform,
    other_places,
    require_fill,
    require_floating,
    require_stds,
    shifted,
    steps,
)


class SignalTransform(Transform):
    """A transform of signals."""

    def require_signals(self, inputs: Tensor) -> None:
        if inputs.ndim not in (2, 3):
            raise BatchbayesError(
                expected=f"signals (N, L) or (N, channels, L) for {type(self).__name__}",
                got=f"inputs of shape {tuple(inputs.shape)}",
                fix="use RandomCrop and RandomFlip for images, or a function of your own",
            )


@dataclass(frozen=True)
class SignalShift(SignalTransform):
    """Move signals in time by up to `most` steps, earlier or later. What comes in from outside is `fill`.

    An undone sequence of outputs repeats its end where the view did not see the signal.

    >>> SignalShift(2).apply(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0.0]))
    tensor([[0., 0., 1., 2.]])
    """

    most: int
    fill: float = 0.0
    size: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", whole_number("most", self.most))
        require_fill(self.fill, by_channel=False)

    def row(self, numbers: Tensor) -> Tensor:
        """Return how many steps earlier the view shows the signal."""
        return steps(numbers[0], self.most)

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        self.require_signals(inputs)
        if self.most >= (length := inputs.shape[-1]):
            got, fix = f"signals of {length}", "shift by less"
            raise BatchbayesError(expected=f"signals longer than the shift of {self.most}", got=got, fix=fix)
        return shifted(inputs, row, -1, inputs.new_full((), self.fill))

    def back(self, outputs: Tensor, inputs: Tensor, row: Tensor) -> Tensor:
        length, is_sequence = inputs.shape[-1], outputs.ndim >= min(3, inputs.ndim)
        if is_sequence and outputs.shape[-1] == length:
            return shifted(outputs, -row, -1)
        if outputs.ndim == 3 and outputs.shape[1] == length:  # steps, and then classes
            return shifted(outputs, -row, 1)
        if outputs.ndim > 2 and outputs.shape[2:].numel() > 1:
            raise other_places((length,), outputs)
        return outputs


@dataclass(frozen=True)
class SignalCrop(SignalTransform):
    """Show a part of each signal, of `share` of its length at a random place. The rest is `fill`.

    >>> SignalCrop(0.5).apply(torch.ones(1, 4), torch.tensor([0.9]))
    tensor([[0., 0., 1., 1.]])
    """

    share: float
    fill: float = 0.0
    size: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        finite_number("a share", self.share, above=0, below=1, fix="pass for example 0.9")
        require_fill(self.fill, by_channel=False)

    def row(self, numbers: Tensor) -> Tensor:
        """Return where the part begins, as a share of all its places."""
        return numbers[0].double()

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        self.require_signals(inputs)
        length, row = inputs.shape[-1], row.to(inputs.device)
        kept = max(1, round(self.share * length))
        first = (row * (length - kept + 1)).long().clamp(max=length - kept)
        places = torch.arange(length, device=inputs.device) - first
        return torch.where((places >= 0) & (places < kept), inputs, inputs.new_full((), self.fill))


@dataclass(frozen=True)
class SignalNoise(SignalTransform):
    """Add Gaussian noise: `amount` times the training standard deviation of each channel. Each example has its own.

    The noise of an example depends on the view and on the numbers of the example alone, not on its place in a batch.
    `SignalNoise.of(training_signals, 0.1)` computes the standard deviations.

    >>> noise, signals = SignalNoise(0.1, (1.0,)), torch.arange(6.0).view(2, 3)
    >>> view = noise.apply(signals, torch.tensor([0.3], dtype=torch.float64))
    >>> bool((view[1:] == noise.apply(signals[1:], torch.tensor([0.3], dtype=torch.float64))).all())
    True
    """

    amount: float
    std: tuple[float, ...]
    size: ClassVar[int] = 1  # type: ignore[misc]
    in_files: ClassVar[bool] = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        finite_number("an amount", self.amount, above=0, fix="pass for example 0.05")
        require_stds(self.std, "channel", "SignalNoise.of(training_signals, amount), from signals")

    @classmethod
    def of(cls, signals: Tensor, amount: float) -> "SignalNoise":
        """Return the noise for training signals (N, L) or (N, C, L)."""
        found = as_tensor(signals, "the training signals").double()
        found = found[:, None] if found.ndim == 2 else found
        std = found.transpose(0, 1).flatten(1).std(1, correction=0).tolist() if found.ndim == 3 else ()
        return cls(amount, tuple(std))

    def row(self, numbers: Tensor) -> Tensor:
        """Return what tells the noise of this view from that of others, (1,)."""
        return numbers

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        self.require_signals(inputs)
        require_floating(self, inputs)
        channels = inputs.shape[1] if inputs.ndim == 3 else 1
        if channels != len(self.std):
            raise BatchbayesError(
                expected=f"signals of {len(self.std)} channels, one for each standard deviation",
                got=f"shape {tuple(inputs.shape)}",
                fix="make the noise from the training signals, by SignalNoise.of(signals, amount)",
            )
        key = float(row[0]).hex().encode()
        each = [_own_noise(key, example) for example in inputs.detach().cpu().double()]
        noise = torch.stack(each) if each else torch.zeros(inputs.shape, dtype=torch.float64)
        scale = self.amount * torch.tensor(self.std, dtype=torch.float64)
        return inputs + (noise * (scale[:, None] if inputs.ndim == 3 else scale)).to(inputs)


def _own_noise(key: bytes, example: Tensor) -> Tensor:
    """Return standard normal numbers that depend on a key and on the numbers of an example."""
    digest = hashlib.sha256(key + example.contiguous().numpy().tobytes()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(example.shape, generator=random, dtype=torch.float64)
