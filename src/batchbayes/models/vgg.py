"""A small relative of VGG-16 with batch normalisation, for grey images of 28 x 28."""

from collections import OrderedDict

from torch import Tensor, nn

HIDDEN = 128
"""Units of the dense layer."""


class SmallVGG(nn.Module):
    """Three convolutions and a dense layer, each with batch norm and ReLU; the first convolution halves the image.

    Unlike `ConvNet` it keeps positions to the end, so that it can learn a small training set by heart, as the large
    networks of the literature do.

    >>> import torch
    >>> SmallVGG(num_classes=10, width=8)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _block(1, width, stride=2),
            nn.MaxPool2d(2),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _block(2 * width, 4 * width),
        )
        self.dense = nn.Linear(4 * width * 3 * 3, HIDDEN, bias=False)
        self.dense_norm = nn.BatchNorm1d(HIDDEN)
        self.output = nn.Linear(HIDDEN, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) -> logits (N, num_classes)."""
        hidden = self.dense_norm(self.dense(self.features(images).flatten(1)))
        return self.output(hidden.relu())


def _block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    """A convolution before batch norm has no bias: the batch mean would take it away again."""
    conv = nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(after), relu=nn.ReLU()))
