"""ESPNet for segmentation: Mehta et al., "ESPNet: Efficient Spatial Pyramid of Dilated Convolutions", ECCV 2018.

The names of the modules are those of the public CamVid weights of sacmehta/ESPNet, so these can be loaded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DILATIONS = {"d1": 1, "d2": 2, "d4": 4, "d8": 8, "d16": 16}


class NormAct(nn.Module):
    """Batch norm, then a PReLU with one slope for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels, eps=1e-3)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x))


class ConvNormAct(NormAct):
    """A 3x3 or 1x1 convolution, then batch norm and PReLU."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels)
        self.conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x))


class Conv(nn.Module):
    """A convolution alone. With stride 1 it keeps the image size."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            channels_in, channels, kernel, stride, kernel // 2 * dilation, dilation=dilation, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Pyramid(nn.Module):
    """A convolution that reduces the channels, then five dilated convolutions.

    The outputs of the last four are added up one after the other, and all five are concatenated.
    """

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        narrow = channels // 5
        self.c1 = Conv(channels_in, narrow, kernel, stride)
        for name, dilation in DILATIONS.items():
            self.add_module(name, Conv(narrow, channels - 4 * narrow if name == "d1" else narrow, 3, 1, dilation))

    def pyramid(self, x: Tensor) -> Tensor:
        reduced = self.c1(x)
        first, *rest = (self.get_submodule(name)(reduced) for name in DILATIONS)
        sums = [rest[0]]
        for branch in rest[1:]:
            sums.append(sums[-1] + branch)
        return torch.cat([first, *sums], 1)


class DownBlock(Pyramid):
    """A pyramid that halves the resolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(channels_in, channels, kernel=3, stride=2)
        self.bn = nn.BatchNorm2d(channels, eps=1e-3)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.pyramid(x)))


class PyramidBlock(Pyramid):
    """A pyramid that keeps the resolution. By default it adds its input to its output."""

    def __init__(self, channels_in: int, channels: int, residual: bool = True) -> None:
        super().__init__(channels_in, channels, kernel=1, stride=1)
        self.bn = NormAct(channels)
        self._residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.pyramid(x)
        return self.bn(x + y if self._residual else y)


class Encoder(nn.Module):
    """A network that returns features at a half, a quarter and an eighth of the resolution."""

    def __init__(self, classes: int, p: int, q: int) -> None:
        super().__init__()
        self.level1 = ConvNormAct(3, 16, 3, 2)
        self.b1 = NormAct(19)
        self.level2_0 = DownBlock(19, 64)
        self.level2 = nn.ModuleList(PyramidBlock(64, 64) for _ in range(p))
        self.b2 = NormAct(131)
        self.level3_0 = DownBlock(131, 128)
        self.level3 = nn.ModuleList(PyramidBlock(128, 128) for _ in range(q))
        self.b3 = NormAct(256)
        self.classifier = Conv(256, classes, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half = F.avg_pool2d(x, 3, 2, 1)
        quarter = F.avg_pool2d(half, 3, 2, 1)
        a = self.b1(torch.cat([self.level1(x), half], 1))
        b = b0 = self.level2_0(a)
        for block in self.level2:
            b = block(b)
        b = self.b2(torch.cat([b, b0, quarter], 1))
        c = c0 = self.level3_0(b)
        for block in self.level3:
            c = block(c)
        return a, b, self.classifier(self.b3(torch.cat([c0, c], 1)))


class ESPNet(nn.Module):
    """A network that returns logits (N, classes, H, W). The sides of the images must be multiples of eight."""

    def __init__(self, classes: int = 12, p: int = 2, q: int = 8) -> None:
        super().__init__()
        self.encoder = Encoder(classes, p, q)
        self.br = nn.BatchNorm2d(classes, eps=1e-3)
        self.up_l3 = nn.Sequential(nn.ConvTranspose2d(classes, classes, 2, 2, bias=False))
        self.level3_C = Conv(131, classes, 1)
        self.combine_l2_l3 = nn.Sequential(NormAct(2 * classes), PyramidBlock(2 * classes, classes, residual=False))
        self.up_l2 = nn.Sequential(nn.ConvTranspose2d(classes, classes, 2, 2, bias=False), NormAct(classes))
        self.conv = ConvNormAct(19 + classes, classes, 3)
        self.classifier = nn.ConvTranspose2d(classes, classes, 2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.encoder(x)
        e = self.combine_l2_l3(torch.cat([self.level3_C(b), self.up_l3(self.br(c))], 1))
        return self.classifier(self.conv(torch.cat([self.up_l2(e), a], 1)))
