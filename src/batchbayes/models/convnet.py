"""A small convolutional network with batch normalisation, for little grey images."""

from collections import OrderedDict

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three blocks of convolution -> batch norm -> ReLU with 2 x 2 pooling between them, then a mean over positions.

    The mean makes it fit images of any size from 4 x 4 on: 8 x 8 digits as well as 28 x 28 ones.

    >>> import torch
    >>> network = ConvNet(num_classes=10, width=8)
    >>> network(torch.zeros(2, 1, 8, 8)).shape, network(torch.zeros(2, 1, 28, 28)).shape
    (torch.Size([2, 10]), torch.Size([2, 10]))
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _block(1, width),
            nn.MaxPool2d(2),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _block(2 * width, 4 * width),
        )
        self.output = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, H, W) -> logits (N, num_classes)."""
        return self.output(self.features(images).mean((2, 3)))


def _block(before: int, after: int) -> nn.Sequential:
    """A convolution before batch norm has no bias: the batch mean would take it away again."""
    conv = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(after), relu=nn.ReLU()))
