"""A small network in the style of VGG-16, for grey images of 28 x 28 pixels."""

from torch import Tensor, nn

from batchbayes.models import conv_blocks

HIDDEN = 128
"""The number of units in the dense layer of `SmallVGG`."""


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
