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

All draws of the linear engine on some examples, kept as what they are combined from.

Draws that are linear in a few tangents need not be formed. Their moments have a closed form, and the draws themselves
are formed only when they are asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, Self

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.network.inputs import require_finite
from batchbayes.posterior import Linearisable, Posterior

Mode = Literal["reverse", "leading", "forward"]


class Drawn(Enum):
    """How draws were made."""

    EXACT = "exact"
    LINEAR = "linear"
    BOTH = "both"
    """By the linear engine, but exact for inputs where it does not hold."""


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
class Combinations:
    """How S draws combine tangents. Several draws may be the same combination."""

    weights: Tensor | None
    """How the U distinct draws combine Q tangents, (U, Q); None if distinct draw u moves by tangent u."""
    index: Tensor
    """Which of the distinct draws draw s is, (S,)."""
    counts: Tensor
    """How many of the S draws each distinct draw stands for, (U,), in float64."""

    @classmethod
    def of(cls, weights: Tensor | None, index: Tensor, num_tangents: int) -> Self:
        """Count the draws that are the same."""
        distinct = num_tangents if weights is None else len(weights)
        return cls(weights, index, torch.bincount(index, minlength=distinct).double())

    @cached_property
    def shares(self) -> Tensor:
        """What share of the draws each distinct draw stands for, (U,), in float64."""
        return self.counts / len(self.index)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (Q,) and covariance (Q, Q) over draws of what multiplies each tangent, in float64."""
        assert self.weights is not None
        mean = self.shares @ self.weights.double()
        deviations = self.weights.double() - mean
        return mean, (self.shares[:, None] * deviations).T @ deviations


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
    if weights is not None and len(weights) <= len(directions):
        directions, weights = weights @ directions, None
    return LinearPlan(mode, directions, Combinations.of(weights, index, len(directions)), contrasts=contrasts)


def forward_plan(posterior: Linearisable, rank: int, num_samples: int, seed: int, *, sides: int = 2) -> LinearPlan:
    """Plan forward mode along the leading `rank` combinations of directions, each one standard deviation long."""
    directions, weights, index = posterior.combinations(num_samples, seed)
    assert weights is not None  # for axes are known
    axes, share = posterior.leading_axes(rank)  # (Q, r)
    scale = len(directions) ** 0.5
    along, combined = axes.T @ directions / scale, weights @ axes * (scale / share**0.5)
    return LinearPlan("forward", along, Combinations.of(combined, index, rank), share, sides=sides)


def _rank(posterior: Linearisable, most: int) -> int:
    """Return the smallest number of leading axes that keeps the share."""
    return next((rank for rank in range(1, most) if posterior.leading_axes(rank)[1] >= SHARE), most)


@dataclass(frozen=True, eq=False, repr=False)
class LinearDraws:
    """S draws of n examples: an output, how it moves along Q tangents, and how each draw combines these.

    >>> combinations = Combinations.of(None, torch.tensor([0, 1, 1]), num_tangents=2)
    >>> draws = LinearDraws(torch.zeros(1), torch.tensor([[1.0], [3.0]]), combinations)
    >>> draws.outputs().T, draws.moments()[0]
    (tensor([[1., 3., 3.]]), tensor([2.3333]))
    """

    middle: Tensor
    """Outputs at the centre, (n, ...)."""
    tangents: Tensor
    """(Q, n, ...), or (Q, n, k) if there is a basis"""
    combinations: Combinations
    basis: Tensor | None = None
    """What each of k coordinates does to the outputs (n, K), (n, k, K); None if tangents are those of the outputs."""

    def __len__(self) -> int:
        return len(self.combinations.index)

    def numel(self) -> int:
        """Return how many numbers are kept."""
        return self.tangents.numel() + (0 if self.basis is None else self.basis.numel())

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of distinct draws, (u, n, ...), with how many of the S draws each of them stands for, (u,)."""
        flat = self.tangents.reshape(len(self.tangents), -1)  # (Q, n * K)
        weights, size = self.combinations.weights, max(1, BLOCK // max(1, self.middle.numel()))
        each = flat if weights is None else weights.to(flat)
        for part, counts in zip(each.split(size), self.combinations.counts.split(size), strict=True):
            moved = part if weights is None else part @ flat  # (u, n * K), or (u, n * k)
            if self.basis is not None:
                moved = torch.einsum("unk,nkc->unc", moved.view(len(part), len(self.basis), -1), self.basis)
            yield self.middle + moved.reshape(len(part), *self.middle.shape), counts

    def outputs(self) -> Tensor:
        """Form every draw, (S, n, ...)."""
        return torch.cat([block for block, _ in self.blocks()])[self.combinations.index]

    def moments(self) -> tuple[Tensor, Tensor]:
        r"""Return mean and variance over draws, (n, ...) each: $f + \bar w T$ and $T^\top \mathrm{Cov}(w)\, T$."""
        return self._moments

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        flat = self.tangents.reshape(len(self.tangents), -1)  # (Q, n * K)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))  # squares of float16 overflow
        weights, shares = self.combinations.weights, self.combinations.shares
        if self.basis is not None:
            each = flat if weights is None else weights.to(flat) @ flat
            each = each.view(len(each), len(self.basis), -1)  # (U, n, k)
            mean = torch.einsum("u,unk->nk", shares.to(flat), each)
            covariance = torch.einsum("u,unk,unl->nkl", shares.to(flat), each - mean, each - mean)
            shift = torch.einsum("nk,nkc->nc", mean, self.basis)
            variance = (covariance @ self.basis).mul_(self.basis).sum(1).clamp_min_(0)
        elif weights is None:
            shares = shares.to(flat)
            shift = torch.mv(flat.T, shares)
            variance = torch.addcmul(_mean_squares(flat.T, shares), shift, shift, value=-1).clamp_min_(0)
        else:
            mean, covariance = (moment.to(flat) for moment in self.combinations.moments)
            shift = mean @ flat
            variance = (flat.T @ covariance).mul_(flat.T).sum(1).clamp_min_(0)
        return self.middle + shift.view_as(self.middle), variance.view_as(self.middle)


def linear_draws(posterior: Linearisable, inputs: Tensor, plan: LinearPlan) -> LinearDraws:
    """Return all draws on inputs (n, ...), on the CPU."""
    basis = None
    if plan.mode == "leading":
        *moves, basis, _ = posterior.leading_tangents(inputs, plan.directions)
        basis = basis.cpu()
    else:
        moves = tangents_along(posterior, inputs, plan.directions, plan)
    outputs, tangents = (tensor.cpu() for tensor in moves)
    draws = LinearDraws(outputs, tangents, plan.combinations, basis)
    # Moments are fewer than tangents. They are finite only if all tangents are, but they may also overflow.
    if not math.isfinite(sum(moment.sum() for moment in draws.moments())):
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
    outputs = posterior.function(center)(inputs)
    tangents = outputs.new_empty(len(directions), *outputs.shape)
    for tangent, direction in zip(tangents, directions, strict=True):
        if sides == 1:
            torch.sub(posterior.function(center + direction)(inputs), outputs, out=tangent)
        else:
            ahead, behind = (posterior.function(center + side * STEP * direction)(inputs) for side in (1, -1))
            torch.sub(ahead, behind, out=tangent).div_(2 * STEP)
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


BLOCK = 2**20
"""Numbers in one block of draws, so that it stays in a processor's cache."""
CACHED = 2**18
"""Numbers that are squared at once: new memory costs more time than arithmetic."""


def _mean_squares(rows: Tensor, shares: Tensor) -> Tensor:
    """Return the means of the squares of each row."""
    if rows.numel() <= CACHED:
        return torch.mv(rows * rows, shares)
    return torch.cat([torch.mv(part * part, shares) for part in rows.split(max(1, CACHED // rows.shape[1]))])


@dataclass(frozen=True, eq=False, repr=False)
class LinearPieces:
    """The same draws of consecutive examples, left in pieces until they are asked for."""

    pieces: tuple[LinearDraws, ...]

    @property
    def middle(self) -> Tensor:
        """Outputs at the centre, (N, ...)."""
        return torch.cat([piece.middle for piece in self.pieces])

    def outputs(self) -> Tensor:
        """Form every draw, (S, N, ...)."""
        return torch.cat([piece.outputs() for piece in self.pieces], dim=1)


Block = Tensor | LinearDraws
"""Some draws of some examples, (s, n, ...), or all draws at once as the linear engine has them."""
Kept = Block | LinearPieces
"""All draws of some examples, in any form."""


def distinct_draws(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the draws of a block, (u, n, ...), with the number of times that each counts, (u,)."""
    if isinstance(block, LinearDraws):
        yield from block.blocks()
    else:
        yield block, torch.ones(len(block), dtype=torch.float64)


def formed(kept: Kept) -> Tensor:
    """Return draws as a tensor (S, N, ...)."""
    return kept if isinstance(kept, Tensor) else kept.outputs()


def join_draws(parts: Sequence[Kept | None]) -> Kept | None:
    """Join the draws of consecutive examples, or return None if the draws of some examples were not kept."""
    kept = [part for part in parts if part is not None]
    if len(kept) < len(parts):
        return None
    pieces = [piece for part in kept for piece in (part.pieces if isinstance(part, LinearPieces) else (part,))]
    linear = [piece for piece in pieces if isinstance(piece, LinearDraws)]
    return LinearPieces(tuple(linear)) if len(linear) == len(pieces) else torch.cat([formed(p) for p in kept], dim=1)
