"""Small convolutional networks with batch normalisation, for small grey images."""

from collections import OrderedDict

from torch import Tensor, nn

HIDDEN = 128
"""The number of units in the dense layer of `SmallVGG`."""


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


class SmallVGG(nn.Module):
    """Three convolutions and a dense layer, each with batch norm and ReLU, in the style of VGG-16.

    The first convolution halves the image, which is 28 x 28. Unlike `ConvNet` it keeps positions until the end. So it
    can memorise a small training set, as the large networks of the literature do. Dropout, if any, stands before the
    last layer.

    >>> import torch
    >>> SmallVGG(num_classes=10, width=8)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = conv_blocks(width, stride=2)
        self.dense = nn.Linear(4 * width * 3 * 3, HIDDEN, bias=False)
        self.dense_norm = nn.BatchNorm1d(HIDDEN)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, num_classes) of images (N, 1, 28, 28)."""
        hidden = self.dense_norm(self.dense(self.features(images).flatten(1)))
        return self.output(self.dropout(hidden.relu()))


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
