r"""The linear engine: any number of draws for the price of a few passes.

Over the spread of batch statistics a network is almost linear in them. So draw s is nearly
$f(\bar\omega) + J (\omega_s - \bar\omega)$. All deviations are combinations of Q directions d. The tangents J d along
these directions, (Q, n, ...), give every draw by a matrix product. There are three ways to compute tangents:

- Reverse mode needs one backward pass for each output. It is exact.
- For many classes, a few backward passes give how the combinations of logits move that matter most for each example.
- Forward mode needs one or two forward passes for each of the r combinations of directions that move outputs most. It
  serves other networks with many outputs: one pass (a difference to one side) for up to a thousand real outputs, two
  passes for maps, as in segmentation, where the noise is larger. The share of the variance that these combinations
  keep is known from training inputs, and dividing by its root restores the scale.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from batchbayes.batches import require_finite
from batchbayes.engines.linear_draws import Combinations, LinearDraws
from batchbayes.errors import BatchbayesError
from batchbayes.posterior import Linearisable, Posterior

Mode = Literal["reverse", "leading", "forward"]

SHARE, MOST_DIRECTIONS = 0.85, 8
"""Forward mode takes as many directions as keep SHARE of the variance of the outputs. For a vector of outputs it takes
at most MOST_DIRECTIONS. With the sums over draws, a prediction then costs less than ten forward passes."""
STEP = 3**0.5
"""Step of the differences to both sides, in standard deviations. The three points are the nodes of a Gauss-Hermite
rule, so the slope is that of the best linear fit over a Gaussian spread, for all polynomials up to the third degree."""
BACKWARD_COST = 1.2
"""Cost of a backward pass, in forward passes."""
LEADING_PASSES = 6
"""Backward passes for many classes. With the sums over draws, a prediction costs about ten forward passes."""
AFFORDABLE = 16
"""Reverse mode is exact: up to this cost, in forward passes, it is used even where forward mode is cheaper."""
MOST_OUTPUTS = 1024
"""With more outputs for each example than this, reverse mode would take too long, and they are taken for a map."""


@dataclass(frozen=True, eq=False, repr=False)
class LinearPlan:
    """Which tangents to compute, and how draws are combined from them."""

    mode: Mode
    directions: Tensor
    """(Q, D)"""
    combinations: Combinations
    share: float = 1.0
    """Share of the variance of the outputs that the directions keep."""
    contrasts: bool = False
    """Whether only the differences between the outputs (n, K) of an example matter, which saves backward passes."""
    sides: int = 2
    """Forward mode: whether differences are taken to one side of the centre or to both."""

    def cost(self, num_outputs: int) -> float:
        """Return the cost in forward passes."""
        if not self.directions.any():
            return 1.0
        if self.mode == "forward":
            return float(len(self.directions) * self.sides)
        return (num_outputs if self.mode == "reverse" else LEADING_PASSES + 1) * BACKWARD_COST

    def __str__(self) -> str:
        if self.mode == "reverse":
            return "linear, reverse mode: one backward pass for each output"
        if self.mode == "leading":
            return f"linear, reverse mode: {LEADING_PASSES} backward passes for the classes that matter"
        return f"linear, forward mode: {len(self.directions)} directions that keep {self.share:.0%} of the variance"


def plan_linear(
    posterior: Linearisable, num_outputs: int, num_samples: int, seed: int, *, contrasts: bool = False
) -> LinearPlan:
    """Choose the cheaper mode for a network with `num_outputs` outputs for each example."""
    directions, weights, index = posterior.combinations(num_samples, seed)
    cost, mode = num_outputs * BACKWARD_COST, "reverse"
    if cost > AFFORDABLE and contrasts and posterior.knows_classes:
        mode = "leading"
    elif cost > AFFORDABLE and posterior.num_axes:
        rank, sides = _rank(posterior, len(directions)), 2
        if num_outputs <= MOST_OUTPUTS:
            rank, sides = min(rank, MOST_DIRECTIONS), 1
        if rank * sides < cost:
            return forward_plan(posterior, rank, num_samples, seed, sides=sides)
    if mode == "reverse" and num_outputs > MOST_OUTPUTS and directions.any():
        raise BatchbayesError(
            expected=f"at most {MOST_OUTPUTS} outputs for each example, for a posterior without observed rows",
            got=f"{num_outputs} outputs and {len(directions)} directions of {posterior}",
            fix='use engine="sample", or fit mcbn',
        )
    if len(weights) <= len(directions):
        directions, weights = weights @ directions, None
    return LinearPlan(mode, directions, Combinations.of(weights, index, len(directions)), contrasts=contrasts)


def forward_plan(posterior: Linearisable, rank: int, num_samples: int, seed: int, *, sides: int = 2) -> LinearPlan:
    """Plan forward mode along the leading `rank` combinations of directions, each one standard deviation long."""
    directions, weights, index = posterior.combinations(num_samples, seed)
    axes, share = posterior.leading_axes(rank)  # (Q, r)
    scale = len(directions) ** 0.5
    along, combined = axes.T @ directions / scale, weights @ axes * (scale / share**0.5)
    return LinearPlan("forward", along, Combinations.of(combined, index, rank), share, sides=sides)


def _rank(posterior: Linearisable, most: int) -> int:
    """Return the smallest number of leading axes that keeps the share."""
    return next((rank for rank in range(1, most) if posterior.leading_axes(rank)[1] >= SHARE), most)


def linear_draws(posterior: Linearisable, inputs: Tensor, plan: LinearPlan) -> LinearDraws:
    """Return all draws on inputs (n, ...), on the CPU."""
    basis, share = None, plan.share
    if plan.mode == "leading":
        *moves, basis, share = posterior.leading_tangents(inputs, plan.directions)
        basis = basis.cpu()
    else:
        moves = tangents_along(posterior, inputs, plan.directions, plan)
    outputs, tangents = (tensor.cpu() for tensor in moves)
    draws = LinearDraws(outputs, tangents, plan.combinations, basis, 2 - 2 * share**0.5)
    # Moments are fewer than tangents. They are finite only if all tangents are, but they may also overflow.
    if not all(math.isfinite(moment.sum().item()) for moment in draws.moments()):
        require_finite(outputs, "the network's output")
        if not tangents.isfinite().all():
            raise BatchbayesError(
                expected="finite derivatives of the network's output",
                got=f"{int((~tangents.isfinite()).sum())} of {tangents.numel()} that are NaN or infinite",
                fix='use engine="sample"',
            )
    return draws


def tangents_along(
    posterior: Linearisable, inputs: Tensor, directions: Tensor, plan: LinearPlan
) -> tuple[Tensor, Tensor]:
    """Return outputs at the centre (n, ...), and how they move along directions, (Q, n, ...), as the plan says."""
    if plan.mode == "reverse":
        return posterior.tangents(inputs, directions, contrasts=plan.contrasts)
    return tangents_by_differences(posterior, inputs, directions, sides=plan.sides)


@torch.no_grad()
def tangents_by_differences(
    posterior: Linearisable, inputs: Tensor, directions: Tensor, *, sides: int = 2
) -> tuple[Tensor, Tensor]:
    """Return outputs at the centre (n, ...), and their slopes (Q, n, ...) by a pass for each direction and side."""
    center = posterior.center
    outputs = posterior.function(center)(inputs).clone()  # a network may use its output tensor again
    tangents = outputs.new_empty(len(directions), *outputs.shape)
    for tangent, direction in zip(tangents, directions, strict=True):
        if sides == 1:
            torch.sub(posterior.function(center + direction)(inputs), outputs, out=tangent)
        else:
            tangent.copy_(posterior.function(center + STEP * direction)(inputs))
            tangent.sub_(posterior.function(center - STEP * direction)(inputs)).div_(2 * STEP)
    return outputs, tangents


def require_linearisable(posterior: Posterior) -> Linearisable:
    """Return what the linear engine needs, or raise an error that names the posterior."""
    if posterior.linear is None:
        raise BatchbayesError(
            expected='a posterior that is linear in its noise, for engine="linear"',
            got=type(posterior).__name__,
            fix='use engine="sample", or fit mcbn',
        )
    return posterior.linear
