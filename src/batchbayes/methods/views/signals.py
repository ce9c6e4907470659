"""Ready transforms of signals (N, L) or (N, C, L), such as audio or the leads of an ECG. Time is the last axis.

All channels of a signal move together.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchbayes._common.checks import as_tensor
from batchbayes._common.signatures import Count, Finite, Positive, Share, checked
from batchbayes.methods.views.transforms import Stds, Transform, other_places, overlaid, shifted, steps


class SignalTransform(Transform):
    """A transform of signals."""

    size: ClassVar[int] = 1  # type: ignore[misc]

    def signals(self, inputs: Tensor) -> Tensor:
        fix = "use RandomCrop and RandomFlip for images, or a function of your own"
        return self.fitting(inputs, inputs.ndim in (2, 3), "signals (N, L) or (N, channels, L)", fix)


@checked
@dataclass(frozen=True)
class SignalShift(SignalTransform):
    """Move signals in time by up to `most` steps, earlier or later. What comes in from outside is `fill`.

    Outputs with as many numbers last as the signal has steps are a sequence, and are moved back. It repeats its end
    where the view did not see the signal.

    >>> SignalShift(2).apply(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0.0]))
    tensor([[0., 0., 1., 2.]])
    """

    most: Count
    fill: Finite = 0.0

    def row(self, numbers: Tensor) -> Tensor:
        """Return how many steps earlier the view shows the signal."""
        return steps(numbers[0], self.most)

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        is_long = self.signals(inputs).shape[-1] > self.most
        self.fitting(inputs, is_long, f"signals longer than the shift of {self.most}", "shift by less")
        return overlaid(inputs, inputs.new_full((), self.fill), {-1: row})

    def back(self, outputs: Tensor, inputs: Tensor, row: Tensor) -> Tensor:
        length = inputs.shape[-1]
        if outputs.ndim > 1 and outputs.shape[-1] == length:
            return shifted(outputs, -row, -1)[0]
        if outputs.ndim == 3 and outputs.shape[1] == length:  # steps, and then classes
            return shifted(outputs, -row, 1)[0]
        if outputs.ndim > 2 and outputs.shape[2:].numel() > 1:
            raise other_places((length,), outputs)
        return outputs


@checked
@dataclass(frozen=True)
class SignalCrop(SignalTransform):
    """Show a part of each signal, of `share` of its length at a random place. The rest is `fill`.

    >>> SignalCrop(0.5).apply(torch.ones(1, 4), torch.tensor([0.9]))
    tensor([[0., 0., 1., 1.]])
    """

    share: Share
    fill: Finite = 0.0

    def row(self, numbers: Tensor) -> Tensor:
        """Return where the part begins, as a share of all its places."""
        return numbers[0].double()

    def look(self, inputs: Tensor, row: Tensor) -> Tensor:
        length = self.signals(inputs).shape[-1]
        kept = max(1, round(self.share * length))
        first = (row.to(inputs.device) * (length - kept + 1)).long().clamp(max=length - kept)
        places = torch.arange(length, device=inputs.device) - first
        return torch.where((places >= 0) & (places < kept), inputs, inputs.new_full((), self.fill))


@checked
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

    amount: Positive
    std: Stds
    in_files: ClassVar[bool] = False  # type: ignore[misc]

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
        channels = inputs.shape[1] if self.signals(inputs).ndim == 3 else 1
        fix = "make the noise from the training signals, by SignalNoise.of(signals, amount)"
        self.fitting(self.real(inputs), channels == len(self.std), f"signals of {len(self.std)} channels", fix)
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
