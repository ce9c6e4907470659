r"""The linear engine: any number of draws for the price of a few passes.

Over the spread of batch statistics a network is almost linear in them, so draw s is, nearly,
$f(\bar\omega) + J (\omega_s - \bar\omega)$. All deviations are combinations of Q directions, so the tangents J d along
these (Q, n, ...) give every draw by a matrix product. They come from

- reverse mode: one backward pass for each output, exact; or
- forward mode: one forward pass for each of the r combinations of directions that move outputs most, by finite
  differences, where outputs are many, as in segmentation. The share of the variance that they keep on training inputs
  is known, and dividing by its root restores the scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError, warn
from batchbayes.functional import Function
from batchbayes.metrics.ranking import rank_correlation
from batchbayes.posterior import Posterior

Mode = Literal["reverse", "forward"]

SHARE = 0.95
"""Forward mode takes as many directions as keep this share of the variance of the outputs."""
STEP = 0.1
"""Of the finite differences, in standard deviations: small beside the curvature, large beside float32 rounding."""
BLOCK = 2**22
"""Numbers in one block of draws."""
BACKWARD_COST = 1.4
"""A backward pass, in forward passes."""
AFFORDABLE = 16
"""Reverse mode is exact: up to this cost, in forward passes, it is taken even where forward mode is cheaper."""


class Linearisable(Posterior, Protocol):
    """A posterior whose randomness is a vector omega = centre + deviation."""

    @property
    def center(self) -> Tensor: ...

    def function(self, omega: Tensor) -> Function: ...

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor]: ...

    def leading_axes(self, rank: int) -> tuple[Tensor, float]: ...

    def tangents(self, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """Which tangents to compute, and how draws are combined from them."""

    mode: Mode
    directions: Tensor
    """(Q, D)"""
    weights: Tensor
    """(S, Q)"""
    share: float = 1.0
    """Of the variance of the outputs that the directions keep."""

    def __str__(self) -> str:
        if self.mode == "reverse":
            return "linear, reverse mode: one backward pass an output"
        return f"linear, forward mode: {len(self.directions)} directions that keep {self.share:.0%} of the variance"


def plan_linear(posterior: Linearisable, num_outputs: int, num_samples: int, seed: int) -> LinearPlan:
    """Choose the cheaper mode for a network with so many outputs an example."""
    directions, weights = posterior.combinations(num_samples, seed)
    cost = num_outputs * BACKWARD_COST
    if cost > AFFORDABLE and getattr(posterior, "influence", None) is not None:
        rank = _rank(posterior, len(directions))
        if rank < cost:
            return forward_plan(posterior, rank, num_samples, seed)
    return LinearPlan("reverse", directions, weights)


def forward_plan(posterior: Linearisable, rank: int, num_samples: int, seed: int) -> LinearPlan:
    """Forward mode along the leading `rank` combinations of directions; each is one standard deviation long."""
    directions, weights = posterior.combinations(num_samples, seed)
    axes, share = posterior.leading_axes(rank)  # (Q, r)
    scale = len(directions) ** 0.5
    return LinearPlan("forward", axes.T @ directions / scale, weights @ axes * (scale / share**0.5), share)


def _rank(posterior: Linearisable, most: int) -> int:
    """The smallest number of leading axes that keeps the share."""
    return next((rank for rank in range(1, most) if posterior.leading_axes(rank)[1] >= SHARE), most)


def linear_outputs(posterior: Linearisable, inputs: Tensor, plan: LinearPlan) -> Iterator[Tensor]:
    """Outputs of all draws on one chunk of inputs, in blocks (s, n, ...), on the CPU."""
    outputs, tangents = (t.cpu() for t in tangents_along(posterior, inputs, plan.directions, plan.mode))
    flat = tangents.reshape(len(tangents), -1)  # (Q, n * K)
    for weights in plan.weights.to(flat).split(max(1, BLOCK // max(1, outputs.numel()))):
        yield outputs + (weights @ flat).view(len(weights), *outputs.shape)  # (s, n, ...)


def tangents_along(posterior: Linearisable, inputs: Tensor, directions: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """Outputs at the centre (n, ...), and their derivatives along directions, (Q, n, ...)."""
    if mode == "reverse":
        return posterior.tangents(inputs, directions)
    return tangents_by_differences(posterior, inputs, directions)


@torch.no_grad()
def tangents_by_differences(posterior: Linearisable, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs at the centre (n, ...), and their derivatives along directions, (Q, n, ...): a forward pass for each."""
    center = posterior.center
    outputs = posterior.function(center)(inputs)
    step = STEP if outputs.dtype in (torch.float32, torch.float64) else 1.0
    moved = [posterior.function(center + step * direction)(inputs) - outputs for direction in directions]
    return outputs, torch.stack(moved) / step


@dataclass(frozen=True)
class Linearity:
    """How well the linear engine repeats exact draws, on a sample of inputs."""

    rank_correlation: float
    """Between the exact and the linear variance of the examples."""
    scale_ratio: float
    """Mean linear variance over mean exact variance."""
    unexplained: float
    """Share of the exact deviations, draw by draw, that the linear ones miss."""

    @property
    def trusted(self) -> bool:
        """Whether the linear answer can stand for the exact one."""
        return self.unexplained < 0.15 and 0.7 < self.scale_ratio < 1.4

    def __str__(self) -> str:
        return (
            f"rank correlation of the variance {self.rank_correlation:.3f}, scale ratio {self.scale_ratio:.2f}, "
            f"unexplained {self.unexplained:.0%}"
        )


def check_linearity(
    posterior: Posterior, inputs: Tensor, *, num_draws: int = 16, max_examples: int = 64, seed: int = 0
) -> Linearity:
    """Compare a few exact draws with the linear ones on a sample of the inputs; warn where they differ too much.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).double()
    >>> posterior = bb.mcbn(network, torch.randn(4000, 3).double(), batch_size=400)
    >>> bb.check_linearity(posterior, torch.randn(50, 3).double()).trusted
    True
    """
    found = measure_linearity(require_linearisable(posterior), inputs, num_draws, max_examples, seed)
    warn_unless_trusted(found)
    return found


@torch.no_grad()
def measure_linearity(
    posterior: Linearisable, inputs: Tensor, num_draws: int, max_examples: int, seed: int
) -> Linearity:
    """The comparison itself, on examples spread evenly over the inputs."""
    sample = inputs[:: max(1, len(inputs) // max_examples)][:max_examples].to(posterior.network.device())
    middle = posterior.function(posterior.center)(sample).cpu()
    exact = torch.stack([posterior.draw(seed, s)(sample).cpu() for s in range(num_draws)])  # (S, n, ...)
    plan = plan_linear(posterior, middle[0].numel(), num_draws, seed)
    drawn = torch.cat(list(linear_outputs(posterior, sample, plan)))
    if torch.equal(exact, middle.expand_as(exact)):  # no noise
        return Linearity(1.0, 1.0, 0.0)
    spread, linear_spread = exact.flatten(2).var(0).mean(-1), drawn.flatten(2).var(0).mean(-1)  # (n,)
    correlation = rank_correlation(spread, linear_spread) if len(sample) > 2 else float("nan")
    missed = (exact - drawn).square().sum() / (exact - middle).square().sum()
    return Linearity(correlation, float(linear_spread.mean() / spread.mean()), float(missed))


def warn_unless_trusted(found: Linearity) -> None:
    """Say loudly that the linear answer differs from exact draws."""
    if not found.trusted:
        warn(
            f"the network is not linear enough in its batch statistics over their spread ({found}): do not trust the "
            'linear engine here. Use engine="sample", or engine="auto", which chooses.'
        )


def is_linearisable(posterior: Posterior) -> bool:
    """Whether the linear engine can work with a posterior."""
    return hasattr(posterior, "combinations") and hasattr(posterior, "tangents")


def require_linearisable(posterior: Posterior) -> Linearisable:
    """A posterior that the linear engine can work with, or an error that says which one it is not."""
    if not is_linearisable(posterior):
        raise BatchbayesError(
            expected='a batch-norm posterior for engine="linear"',
            got=type(posterior).__name__,
            fix='use engine="sample"',
        )
    return posterior  # type: ignore[return-value]
