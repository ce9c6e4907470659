"""The VGG-like network of the literature on variational dropout, for 32 x 32 colour images."""

from torch import Tensor, nn

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions, block by block, at a width of 1."""


class VGGLike(nn.Module):
    """Thirteen 3 x 3 convolutions and two dense layers, each but the last with batch norm and ReLU.

    Args:
        width: scales the channels and the units of the hidden dense layer.
        dropout: scales the rates of dropout: that of convolutions (0.3 after the first, 0.4 after the others that no
            pooling follows), and that before the dense layers (0.5).

    >>> import torch
    >>> VGGLike(width=0.0625)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in VGGLike().parameters() if p.ndim > 1)
    14977728
    """

    def __init__(self, width: float = 1.0, dropout: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for block in BLOCKS:
            for number, full in enumerate(block):
                out = round(width * full)
                layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out, 1e-3), nn.ReLU()]
                if number < len(block) - 1:
                    layers.append(nn.Dropout(dropout[0] * (0.3 if channels == 3 else 0.4)))
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.dense = nn.Linear(channels, channels, bias=False)
        self.dense_norm = nn.BatchNorm1d(channels, 1e-3)
        self.dropout1, self.dropout2 = nn.Dropout(0.5 * dropout[1]), nn.Dropout(0.5 * dropout[1])
        self.output = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, 10) of images (N, 3, 32, 32)."""
        hidden = self.dropout1(self.features(images).flatten(1))
        hidden = self.dropout2(self.dense_norm(self.dense(hidden)).relu())
        return self.output(hidden)
