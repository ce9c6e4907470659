"""The fifteen corruptions of Hendrycks & Dietterich (ICLR 2019) for images of 32x32, in plain code.

The settings are those of CIFAR-10-C at severities 1 to 5. The photographs of frost are not ours to use, so its ice is a
fractal with ridges. Snow and fog differ in details. Images are bytes (N, 3, 32, 32).
"""

import io
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from batchbayes.tools import generator


def _gaussian_noise(x: Tensor, s: int, random: Generator) -> Tensor:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[s] * torch.randn(x.shape, generator=random)


def _shot_noise(x: Tensor, s: int, random: Generator) -> Tensor:
    photons = (500, 250, 100, 75, 50)[s]
    return torch.poisson(x * photons, generator=random) / photons


def _impulse_noise(x: Tensor, s: int, random: Generator) -> Tensor:
    share, chance = (0.01, 0.02, 0.03, 0.05, 0.07)[s], torch.rand(x.shape, generator=random)
    return torch.where(chance < share / 2, 0.0, torch.where(chance > 1 - share / 2, 1.0, x))


def _convolved(x: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each image with a kernel (1, k, k), or with its own of (N, k, k)."""
    n, pad = len(x), kernels.shape[-1] // 2
    weights = kernels.expand(n, -1, -1).repeat_interleave(3, 0)[:, None]
    flat = F.pad(x, [pad] * 4, mode="reflect").flatten(0, 1)[None]
    return F.conv2d(flat, weights, groups=3 * n).view_as(x)


def _gaussian_kernel(std: float, radius: int) -> Tensor:
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1.0) / max(std, 1e-3)).square())
    return (line[:, None] * line / line.sum().square())[None]


def _defocus_blur(x: Tensor, s: int, random: Generator) -> Tensor:
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[s]
    grid = torch.arange(-8, 9.0)
    disk = ((grid[:, None].square() + grid.square()) <= radius**2).float()[None, None]
    soft = F.conv2d(disk, _gaussian_kernel(alias, 1)[None], padding=1)[0]  # a disk with a soft edge
    return _convolved(x, soft / soft.sum())


def _glass_blur(x: Tensor, s: int, random: Generator) -> Tensor:
    std, reach, times = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))[s]
    x = _convolved(x, _gaussian_kernel(std, 4)).clone()
    every = torch.arange(len(x))
    for _ in range(times):
        for row in range(31 - reach, reach, -1):
            for column in range(31 - reach, reach, -1):
                dy, dx = torch.randint(-reach, reach, (2, len(x)), generator=random)
                here, there = x[:, :, row, column].clone(), x[every, :, row + dy, column + dx]
                x[:, :, row, column] = there
                x[every, :, row + dy, column + dx] = here
    return _convolved(x, _gaussian_kernel(std, 4))


def _streaks(radius: int, std: float, angles: Tensor) -> Tensor:
    """Return kernels (n, k, k) of motion along the angles (n,), which fades behind."""
    grid = torch.arange(-radius, radius + 1.0)
    steps = torch.linspace(0, radius, 4 * radius + 1)
    weights = torch.exp(-0.5 * (steps / std).square())
    at_x, at_y = (steps * turn(angles)[:, None] for turn in (torch.cos, torch.sin))  # (n, steps)
    near_x, near_y = ((1 - (grid - at[..., None]).abs()).clamp_min(0) for at in (at_x, at_y))  # (n, steps, k)
    kernels = torch.einsum("t,nty,ntx->nyx", weights, near_y, near_x)
    return kernels / kernels.sum((1, 2), keepdim=True)


def _motion_blur(x: Tensor, s: int, random: Generator) -> Tensor:
    radius, std = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[s]
    return _convolved(x, _streaks(radius, std, (torch.rand(len(x), generator=random) - 0.5) * math.pi / 2))


def _zoomed(x: Tensor, factor: float) -> Tensor:
    line = torch.linspace(-1, 1, 32) / factor
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def _zoom_blur(x: Tensor, s: int, random: Generator) -> Tensor:
    factors = [1 + 0.01 * step for step in range((6, 11, 16, 21, 26)[s])]
    return (x + sum(_zoomed(x, factor) for factor in factors)) / (len(factors) + 1)


def _snow(x: Tensor, s: int, random: Generator) -> Tensor:
    mean, std, zoom, least, radius, blur, kept = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[s]  # fmt: skip
    flakes = _zoomed(mean + std * torch.randn(len(x), 1, 32, 32, generator=random), zoom).expand(-1, 3, -1, -1)
    flakes = torch.where(flakes < least, 0.0, flakes).clamp(0, 1)
    falling = -math.pi * (0.25 + 0.5 * torch.rand(len(x), generator=random))
    flakes = _convolved(flakes, _streaks(radius, blur, falling))
    grey = (x * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    return kept * x + (1 - kept) * torch.maximum(x, grey * 1.5 + 0.5) + flakes + flakes.flip(2, 3)


def _fractal(count: int, decay: float, random: Generator) -> Tensor:
    """Return clouds (N, 1, 32, 32) from 0 to 1: noise at doubling frequencies, each weaker by the factor `decay`."""
    total = torch.zeros(count, 1, 32, 32)
    for octave in range(6):
        size = min(32, 2**octave + 1)
        noise = torch.rand(count, 1, size, size, generator=random) - 0.5
        total += decay**-octave * F.interpolate(noise, size=(32, 32), mode="bilinear", align_corners=True)
    low = total.amin((2, 3), keepdim=True)
    return (total - low) / (total.amax((2, 3), keepdim=True) - low)


def _fog(x: Tensor, s: int, random: Generator) -> Tensor:
    amount, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[s]
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * _fractal(len(x), decay, random)) * top / (top + amount)


def _frost(x: Tensor, s: int, random: Generator) -> Tensor:
    kept, amount = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[s]
    ridges = 1 - 2 * (_fractal(len(x), 1.6, random) - 0.5).abs()  # ice grows along lines
    tint = torch.tensor([0.80, 0.92, 1.0]).view(3, 1, 1)
    return kept * x + amount * (ridges**3 * _fractal(len(x), 2.0, random).sqrt() * 1.4).clamp(0, 1) * tint


def _hsv_value(x: Tensor) -> Tensor:
    return x.amax(1, keepdim=True)


def _brightness(x: Tensor, s: int, random: Generator) -> Tensor:
    value = _hsv_value(x)  # hue and saturation stay: all channels grow by one factor
    raised = (value + (0.05, 0.1, 0.15, 0.2, 0.3)[s]).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp_min(1e-6), raised)


def _contrast(x: Tensor, s: int, random: Generator) -> Tensor:
    middle = x.mean((2, 3), keepdim=True)
    return middle + (0.75, 0.5, 0.4, 0.3, 0.15)[s] * (x - middle)


def _elastic(x: Tensor, s: int, random: Generator) -> Tensor:
    alpha, std, warp = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))[s]
    n = len(x)
    matrix = torch.eye(2, 3) + warp * 1.5 * (2 * torch.rand(n, 2, 3, generator=random) - 1)  # three corners move
    grid = F.affine_grid(matrix, list(x.shape), align_corners=True)
    if alpha:
        moves = 2 * torch.rand(n, 3, 32, 32, generator=random) - 1
        smooth = _convolved(moves, _gaussian_kernel(32 * std, min(15, int(3 * 32 * std) + 1)))[:, :2]
        grid = grid + (smooth * alpha * 32 * 2 / 31).permute(0, 2, 3, 1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def _with_pictures(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    pictures = (x * 255).round().byte().permute(0, 2, 3, 1).numpy()
    made = np.stack([np.asarray(change(Image.fromarray(picture))) for picture in pictures])
    return torch.from_numpy(made).permute(0, 3, 1, 2).float() / 255


def _pixelate(x: Tensor, s: int, random: Generator) -> Tensor:
    size = int(32 * (0.95, 0.9, 0.85, 0.75, 0.65)[s])
    box = Image.Resampling.BOX
    return _with_pictures(x, lambda picture: picture.resize((size, size), box).resize((32, 32), box))


def _jpeg(x: Tensor, s: int, random: Generator) -> Tensor:
    def compressed(picture: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=(80, 65, 58, 50, 40)[s])
        return Image.open(buffer)

    return _with_pictures(x, compressed)


CORRUPTIONS: dict[str, Callable[[Tensor, int, Generator], Tensor]] = {
    "gaussian noise": _gaussian_noise, "shot noise": _shot_noise, "impulse noise": _impulse_noise,
    "defocus blur": _defocus_blur, "glass blur": _glass_blur, "motion blur": _motion_blur, "zoom blur": _zoom_blur,
    "snow": _snow, "frost": _frost, "fog": _fog, "brightness": _brightness, "contrast": _contrast,
    "elastic": _elastic, "pixelate": _pixelate, "jpeg": _jpeg,
}  # fmt: skip


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Return the images with a corruption of severity 1 to 5. Severity 0 leaves them as they are."""
    if severity == 0:
        return images
    random = generator(seed, "corruption", name, severity)
    made = CORRUPTIONS[name](images.float() / 255, severity - 1, random)
    return (made * 255).round().clamp(0, 255).byte()
