"""The three networks of Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018.

They follow the authors' code: the scales of batch norm start uniformly between 0 and 1, and dropout stands where the
code has it. `width` is the number of channels of the first stage, which the paper has at 64.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn


class AtanovLeNet5(nn.Sequential):
    """LeNet-5 for 28 x 28 grey images, with batch norm and dropout after each layer but the last.

    The maximum over 2 x 2 pixels stands before ReLU: the result is the same as after it, and it is cheaper.

    >>> AtanovLeNet5(dropout=0.5)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, 5, bias=False),
                norm1=nn.BatchNorm2d(20),
                **_dropped("1", dropout, nn.MaxPool2d(2)),
                conv2=nn.Conv2d(20, 50, 5, bias=False),
                norm2=nn.BatchNorm2d(50),
                **_dropped("2", dropout, nn.MaxPool2d(2)),
                flatten=nn.Flatten(),
                dense1=nn.Linear(800, 500, bias=False),
                norm3=nn.BatchNorm1d(500),
                **_dropped("3", dropout),
                dense2=nn.Linear(500, 10),
            )
        )
        start_scales(self)


def _dropped(number: str, dropout: float, pool: nn.Module | None = None) -> dict[str, nn.Module]:
    """Return ReLU, dropout if there is any, and a pooling that moves before ReLU if there is none."""
    relu, pooled = {f"relu{number}": nn.ReLU()}, {f"pool{number}": pool} if pool else {}
    if not dropout:
        return {**pooled, **relu}
    return {**relu, f"drop{number}": nn.Dropout(dropout), **pooled}


class VGG11(nn.Module):
    """VGG-11 with batch norm, for 32 x 32 colour images.

    `dropout` holds the rate before the classifier, and the rate after each convolution that no pooling follows.

    >>> VGG11(classes=5, width=4, dropout=(0.5, 0.3))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    def __init__(self, classes: int = 10, width: int = 64, dropout: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for factors in ((1,), (2,), (4, 4), (8, 8), (8, 8)):
            for number, factor in enumerate(factors):
                out = factor * width
                layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
                channels = out
                if dropout[1] and number < len(factors) - 1:
                    layers.append(nn.Dropout(dropout[1]))
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout[0]) if dropout[0] else nn.Identity()
        self.classifier = nn.Linear(channels, classes)
        start_scales(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.features(images).flatten(1)))


class PreActivationBlock(nn.Module):
    """Batch norm, ReLU and convolution, twice, and a shortcut from the first ReLU if the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        changes = stride > 1 or channels != channels_in
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(self.norm2(self.conv1(active)).relu()) + shortcut


class ResNet18(nn.Module):
    """A pre-activation ResNet-18 for 32 x 32 colour images, without batch norm before the last mean.

    >>> ResNet18(classes=5, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, channels = [], width
        for factor in (1, 2, 4, 8):
            for number in range(2):
                blocks.append(PreActivationBlock(channels, factor * width, 2 if factor > 1 and not number else 1))
                channels = factor * width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)
        start_scales(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(images)).mean((2, 3)))


def start_scales(network: nn.Module) -> None:
    """Draw the scales of all batch-norm layers from U(0, 1), as the authors' code does."""
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            with torch.no_grad():
                layer.weight.uniform_()
