"""Integrals over one variable in float64, by the trapezoid rule on a fine grid."""

from collections.abc import Callable

import torch
from torch import Tensor


def gaussian_expectation(function: Callable[[Tensor], Tensor], mean: float, std: float, points: int = 200_001) -> float:
    """E f(w) for w ~ N(mean, std^2), for smooth f."""
    z = torch.linspace(-12, 12, points, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / (2 * torch.pi) ** 0.5
    return float(torch.trapezoid(function(mean + std * z) * density, z))


def expected_log_magnitude(mean: float, std: float, points: int = 100_001) -> float:
    """E log|w| for w ~ N(mean, std^2). Near zero the grid is even in log|w|, because the integrand has a pole there."""
    s = torch.linspace(-60, torch.log(torch.tensor(abs(mean) + 15 * std)).item(), points, dtype=torch.float64)
    magnitude, total = s.exp(), 0.0
    for sign in (-1, 1):
        z = (sign * magnitude - mean) / std
        density = torch.exp(-0.5 * z.square()) / ((2 * torch.pi) ** 0.5 * std)
        total += float(torch.trapezoid(s * density * magnitude, s))
    return total
