"""ESPNet for segmentation: Mehta et al., "ESPNet: Efficient Spatial Pyramid of Dilated Convolutions", ECCV 2018.

Names of modules follow the public CamVid weights of sacmehta/ESPNet, so that these load strictly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DILATIONS = {"d1": 1, "d2": 2, "d4": 4, "d8": 8, "d16": 16}


class NormAct(nn.Module):
    """Batch norm, then a PReLU for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels, eps=1e-3)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x))


class ConvNormAct(NormAct):
    """A 3x3 or 1x1 convolution before them."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels)
        self.conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x))


class Conv(nn.Module):
    """A bare convolution that keeps the size at stride 1."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            channels_in, channels, kernel, stride, kernel // 2 * dilation, dilation=dilation, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Pyramid(nn.Module):
    """Reduce, then five dilated convolutions, the last four summed up cumulatively, concatenated."""

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
    """Halve the resolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(channels_in, channels, kernel=3, stride=2)
        self.bn = nn.BatchNorm2d(channels, eps=1e-3)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.pyramid(x)))


class PyramidBlock(Pyramid):
    """Keep the resolution, as a residual unless told otherwise."""

    def __init__(self, channels_in: int, channels: int, residual: bool = True) -> None:
        super().__init__(channels_in, channels, kernel=1, stride=1)
        self.bn = NormAct(channels)
        self._residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.pyramid(x)
        return self.bn(x + y if self._residual else y)


class Encoder(nn.Module):
    """The features at half, a quarter and an eighth of the resolution."""

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
    """Logits (N, classes, H, W) for images whose sides are multiples of eight."""

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
