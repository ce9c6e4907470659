"""The CIFAR-10 residual networks of He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.

The names of the modules are those of the public weights of akamaster/pytorch_resnet_cifar10, so these can be loaded.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters.

    If the block has more channels than its input, the shortcut takes every second pixel and adds channels of zeros.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self._stride, self._new = stride, (channels - channels_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self._new:
            x = F.pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, self._new, self._new))
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """A network of 6 n + 2 layers: three stages of n blocks with 16, 32 and 64 channels. It returns logits.

    With another `width` the stages have that many channels, twice and four times as many. `channels` are those of the
    images.
    """

    def __init__(self, depth: int = 20, classes: int = 10, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, blocks)
        self.layer2 = self._stage(width, 2 * width, blocks)
        self.layer3 = self._stage(2 * width, 4 * width, blocks)
        self.linear = nn.Linear(4 * width, classes)

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(
            ResidualBlock(channels_in, channels), *(ResidualBlock(channels, channels) for _ in range(blocks - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))
