"""A multi-layer perceptron with batch normalisation, with dropout, or with neither.

Small convolutional networks with batch normalisation, for small grey images.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError


class MLP(nn.Module):
    """A linear layer, batch norm and ReLU for each hidden width, then a linear output layer.

    A linear layer before batch norm has no bias: batch norm would subtract it again. With dropout, every linear layer
    drops some of its inputs, and the first one drops raw features, as in the networks of the MCBN paper.

    >>> MLP(in_features=3, hidden_widths=[50, 50], out_features=1)(torch.zeros(4, 3)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        in_features: int,
        hidden_widths: Sequence[int],
        out_features: int,
        *,
        norm: bool = True,
        epsilon: float = 1e-5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden_widths]
        if min([*widths, out_features]) < 1:
            raise BatchbayesError(
                expected="widths of one or more",
                got=f"{in_features} inputs, hidden widths {list(hidden_widths)}, {out_features} outputs",
                fix="pass positive numbers",
            )
        self.hidden = nn.Sequential()
        for before, after in pairwise(widths):
            layer = OrderedDict[str, nn.Module]()
            if dropout:
                layer["dropout"] = SeededDropout(dropout)
            layer["linear"] = nn.Linear(before, after, bias=not norm)
            if norm:
                layer["norm"] = nn.BatchNorm1d(after, eps=epsilon)
            layer["relu"] = nn.ReLU()
            self.hidden.append(nn.Sequential(layer))
        self.dropout = SeededDropout(dropout) if dropout else None
        self.output = nn.Linear(widths[-1], out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (N, out_features) of inputs (N, in_features)."""
        hidden = self.hidden(inputs)
        return self.output(self.dropout(hidden) if self.dropout else hidden)


class SeededDropout(nn.Dropout):
    """Dropout that compares uniform random numbers with a threshold, so that other code can draw the same mask.

    It also draws numbers at rate zero. So networks with different rates see the same numbers.

    >>> _ = torch.manual_seed(0)
    >>> SeededDropout(0.5)(torch.ones(6))
    tensor([0., 2., 0., 0., 0., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set each number to zero with probability p, and scale up the others."""
        if not self.training:
            return input
        return input * (torch.rand_like(input) >= self.p) / (1 - self.p)


class ConvNet(nn.Module):
    """Three blocks of convolution, batch norm and ReLU, with 2 x 2 pooling between them, then a mean over positions.

    Because of the mean it takes images of any size from 4 x 4 on, for example digits of 8 x 8 and of 28 x 28.

    >>> import torch
    >>> network = ConvNet(num_classes=10, width=8)
    >>> network(torch.zeros(2, 1, 8, 8)).shape, network(torch.zeros(2, 1, 28, 28)).shape
    (torch.Size([2, 10]), torch.Size([2, 10]))
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.features = conv_blocks(width)
        self.output = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, num_classes) of images (N, 1, H, W)."""
        return self.output(self.features(images).mean((2, 3)))


def conv_blocks(width: int, stride: int = 1) -> nn.Sequential:
    """Return three blocks with 2 x 2 pooling between them. The stride is that of the first one."""
    first, second, third = conv_block(1, width, stride), conv_block(width, 2 * width), conv_block(2 * width, 4 * width)
    return nn.Sequential(first, nn.MaxPool2d(2), second, nn.MaxPool2d(2), third)


def conv_block(channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution, batch norm and ReLU.

    The convolution has no bias: batch norm would subtract it again.
    """
    conv = nn.Conv2d(channels_in, channels, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(channels), relu=nn.ReLU()))
