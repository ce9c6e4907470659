r"""The linear engine: any number of draws for the price of a few passes.

Over the spread of batch statistics a network is almost linear in them, so draw s is, nearly,
$f(\bar\omega) + J (\omega_s - \bar\omega)$. All deviations are combinations of Q directions, so the tangents J d along
these (Q, n, ...) give every draw by a matrix product. They come from

- reverse mode: one backward pass for each output, exact; or
- forward mode: two forward passes for each of the r combinations of directions that move outputs most, where outputs
  are many, as in segmentation. The share of the variance that they keep on training inputs is known, and dividing by
  its root restores the scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from batchbayes.batches import require_finite
from batchbayes.engines.linear_draws import LinearDraws, LinearPieces
from batchbayes.errors import BatchbayesError, warn
from batchbayes.metrics.ranking import rank_correlation
from batchbayes.network import Function
from batchbayes.posterior import Posterior

Mode = Literal["reverse", "forward"]

SHARE = 0.85
"""Forward mode takes as many directions as keep this share of the variance of the outputs."""
STEP = 3**0.5
"""Of the differences to both sides, in standard deviations: these are the outer nodes of the three-point Gauss-Hermite
rule, so the slope is that of the best linear fit over a Gaussian spread, for all polynomials up to the third degree."""
BACKWARD_COST, DIRECTION_COST = 1.2, 2.0
"""A backward pass, and a direction of forward mode, in forward passes."""
AFFORDABLE = 16
"""Reverse mode is exact: up to this cost, in forward passes, it is taken even where forward mode is cheaper."""

MOST_OUTPUTS = 1024
"""Beyond so many outputs an example reverse mode would take for ever."""
TOGETHER = 2**18
"""Input numbers in one pass of several exact draws."""


class Linearisable(Posterior, Protocol):
    """A posterior whose randomness is a vector omega = centre + deviation."""

    @property
    def center(self) -> Tensor: ...

    def function(self, omega: Tensor) -> Function: ...

    def draw_together(self, seed: int, indices: Sequence[int]) -> Function: ...

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def leading_axes(self, rank: int) -> tuple[Tensor, float]: ...

    def tangents(self, inputs: Tensor, directions: Tensor, *, contrasts: bool = False) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """Which tangents to compute, and how draws are combined from them."""

    mode: Mode
    directions: Tensor
    """(Q, D)"""
    weights: Tensor | None
    """How distinct draws combine the tangents, (U, Q); None where each is a tangent."""
    index: Tensor
    """Which of the distinct draws draw s is, (S,)."""
    share: float = 1.0
    """Of the variance of the outputs that the directions keep."""
    contrasts: bool = False
    """Whether outputs (n, K) move relative to the last of them: one backward pass fewer."""

    @property
    def left_out(self) -> float:
        """Share of the deviations of a linear network that draws miss which keep a share s of it, scaled to match."""
        return 2 - 2 * self.share**0.5

    def cost(self, num_outputs: int) -> float:
        """In forward passes."""
        if not self.directions.any():
            return 1.0
        return num_outputs * BACKWARD_COST if self.mode == "reverse" else len(self.directions) * DIRECTION_COST

    def __str__(self) -> str:
        if self.mode == "reverse":
            return "linear, reverse mode: one backward pass an output"
        return f"linear, forward mode: {len(self.directions)} directions that keep {self.share:.0%} of the variance"


def plan_linear(
    posterior: Linearisable, num_outputs: int, num_samples: int, seed: int, *, contrasts: bool = False
) -> LinearPlan:
    """Choose the cheaper mode for a network with so many outputs an example."""
    directions, weights, index = posterior.combinations(num_samples, seed)
    cost = num_outputs * BACKWARD_COST
    if cost > AFFORDABLE and getattr(posterior, "influence", None) is not None:
        rank = _rank(posterior, len(directions))
        if rank * DIRECTION_COST < cost:
            return forward_plan(posterior, rank, num_samples, seed)
    if num_outputs > MOST_OUTPUTS and directions.any():
        raise BatchbayesError(
            expected=f"at most {MOST_OUTPUTS} outputs an example for a posterior without observed rows",
            got=f"{num_outputs} outputs and {len(directions)} directions of {posterior}",
            fix='use engine="sample", or fit mcbn',
        )
    if len(weights) <= len(directions):
        return LinearPlan("reverse", weights @ directions, None, index, contrasts=contrasts)
    return LinearPlan("reverse", directions, weights, index, contrasts=contrasts)


def forward_plan(posterior: Linearisable, rank: int, num_samples: int, seed: int) -> LinearPlan:
    """Forward mode along the leading `rank` combinations of directions; each is one standard deviation long."""
    directions, weights, index = posterior.combinations(num_samples, seed)
    axes, share = posterior.leading_axes(rank)  # (Q, r)
    scale = len(directions) ** 0.5
    return LinearPlan("forward", axes.T @ directions / scale, weights @ axes * (scale / share**0.5), index, share)


def _rank(posterior: Linearisable, most: int) -> int:
    """The smallest number of leading axes that keeps the share."""
    return next((rank for rank in range(1, most) if posterior.leading_axes(rank)[1] >= SHARE), most)


def linear_draws(posterior: Linearisable, inputs: Tensor, plan: LinearPlan) -> LinearDraws:
    """All draws on one chunk of inputs, on the CPU."""
    moves = tangents_along(posterior, inputs, plan.directions, plan.mode, contrasts=plan.contrasts)
    outputs, tangents = (require_finite(tensor.cpu(), "the network's output") for tensor in moves)
    return LinearDraws(outputs, tangents, plan.weights, plan.index)


def tangents_along(
    posterior: Linearisable, inputs: Tensor, directions: Tensor, mode: Mode, *, contrasts: bool = False
) -> tuple[Tensor, Tensor]:
    """Outputs at the centre (n, ...), and how they move along directions, (Q, n, ...)."""
    if mode == "reverse":
        return posterior.tangents(inputs, directions, contrasts=contrasts)
    return tangents_by_differences(posterior, inputs, directions)


@torch.no_grad()
def tangents_by_differences(posterior: Linearisable, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs at the centre (n, ...), and their slopes along directions, (Q, n, ...): two forward passes for each."""
    center = posterior.center
    outputs = posterior.function(center)(inputs)
    tangents = outputs.new_empty(len(directions), *outputs.shape)
    for tangent, direction in zip(tangents, directions, strict=True):
        ahead, behind = (posterior.function(center + side * STEP * direction)(inputs) for side in (1, -1))
        torch.sub(ahead, behind, out=tangent).div_(2 * STEP)
    return outputs, tangents


@dataclass(frozen=True)
class Linearity:
    """How well the linear engine repeats exact draws, on a sample of inputs."""

    rank_correlation: float
    """Between the exact and the linear variance of the examples."""
    scale_ratio: float
    """Mean linear variance over mean exact variance."""
    unexplained: float
    """Share of the exact deviations, draw by draw, that the linear ones miss."""
    left_out: float = 0.0
    """How much of that the directions which forward mode leaves out would explain, were all else linear."""

    @property
    def trusted(self) -> bool:
        """Whether the linear answer can stand for the exact one."""
        return self.unexplained - self.left_out < 0.15 and 0.7 < self.scale_ratio < 1.4

    def __str__(self) -> str:
        return (
            f"rank correlation of the variance {self.rank_correlation:.3f}, scale ratio {self.scale_ratio:.2f}, "
            f"unexplained {self.unexplained:.0%}"
            + (f", about {self.left_out:.0%} by directions left out" if self.left_out else "")
        )


def check_linearity(
    posterior: Posterior, inputs: Tensor, *, num_draws: int = 16, max_examples: int = 64, seed: int = 0
) -> Linearity:
    """Compare a few exact draws with the linear ones on a sample of inputs (N, ...); warn where they differ too much.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).double()
    >>> posterior = bb.mcbn(network, torch.randn(4000, 3).double(), batch_size=400)
    >>> bb.check_linearity(posterior, torch.randn(50, 3).double()).trusted
    True
    """
    if not isinstance(inputs, Tensor) or not len(inputs) or num_draws < 2 or max_examples < 1:
        raise BatchbayesError(
            expected="a tensor of inputs (N, ...), two draws or more and at least one example",
            got=f"{type(inputs).__name__}, num_draws={num_draws}, max_examples={max_examples}",
            fix="pass some inputs, as in check_linearity(posterior, images[:100])",
        )
    found = measure_linearity(require_linearisable(posterior), inputs, num_draws, max_examples, seed)
    warn_unless_trusted(found)
    return found


@torch.no_grad()
def measure_linearity(
    posterior: Linearisable, inputs: Tensor, num_draws: int, max_examples: int, seed: int
) -> Linearity:
    """The comparison on examples spread evenly over the inputs."""
    sample = inputs[spread_evenly(len(inputs), max_examples)].to(posterior.network.device())
    pieces = sample.split(max(1, TOGETHER // max(1, sample[0].numel())))
    exact = [exact_draws(posterior, piece, num_draws, seed) for piece in pieces]
    plan = plan_linear(posterior, exact[0][0, 0].numel(), num_draws, seed)
    linear = LinearPieces(tuple(linear_draws(posterior, piece, plan) for piece in pieces))
    return compare_with_exact(linear, torch.cat(exact, dim=1), left_out=plan.left_out)


def spread_evenly(length: int, count: int) -> Tensor:
    """Which of so many examples to take, at most `count`, evenly spread.

    >>> spread_evenly(10, 4)
    tensor([0, 3, 6, 9])
    """
    return torch.linspace(0, length - 1, min(length, count), dtype=torch.float64).round().long()


def exact_draws(posterior: Linearisable, inputs: Tensor, num_draws: int, seed: int) -> Tensor:
    """The first draws, made exactly, (S, n, ...), on the CPU: as many in one pass as inputs are few.

    A layer that does more with its input than to normalise it shows in the first draw: then all are made one by one.
    """
    size = max(1, TOGETHER // max(1, inputs.numel()))
    parts = [range(num_draws)[start : start + size] for start in range(0, num_draws, size)]
    first = posterior.draw(seed, 0)(inputs).cpu()
    together = torch.cat([posterior.draw_together(seed, part)(inputs).cpu() for part in parts])
    if (together[0] - first).abs().max() <= _rounding(first):
        return together
    return torch.stack([first, *(posterior.draw(seed, s)(inputs).cpu() for s in range(1, num_draws))])


def _rounding(outputs: Tensor) -> Tensor:
    """How far outputs of one function may differ when it is computed in two ways."""
    return 1000 * torch.finfo(outputs.dtype).eps * outputs.abs().max()


def compare_with_exact(
    draws: LinearDraws | LinearPieces, exact: Tensor, *, contrasts: bool = False, left_out: float = 0.0
) -> Linearity:
    """Compare linear draws with the same draws made exactly, (S, n, ...); contrasts leave their mean logit aside."""
    middle, drawn = draws.middle, draws.outputs()
    middle, drawn, exact = (part.reshape(-1, exact.shape[1], exact[0, 0].numel()) for part in (middle, drawn, exact))
    if contrasts:
        middle, drawn, exact = (logits - logits.mean(-1, keepdim=True) for logits in (middle, drawn, exact))
    if torch.equal(drawn, middle.expand_as(drawn)) and (exact - exact[0]).abs().max() <= _rounding(exact):  # no noise
        return Linearity(1.0, 1.0, 0.0)
    spread, linear_spread = exact.var(0).mean(-1), drawn.var(0).mean(-1)  # (n,)
    ranked = min(len(spread.unique()), len(linear_spread.unique())) > 2
    correlation = rank_correlation(spread, linear_spread) if ranked else float("nan")
    missed = (exact - drawn).square().sum() / (exact - middle).square().sum()
    return Linearity(correlation, float(linear_spread.mean() / spread.mean()), float(missed), left_out)


def warn_unless_trusted(
    found: Linearity,
    advice: str = 'do not trust the linear engine here. Use engine="sample", or engine="auto", which chooses',
) -> None:
    """Say loudly that the linear answer differs from exact draws."""
    if not found.trusted:
        warn(f"the network is not linear enough in its batch statistics over their spread ({found}): {advice}.")


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
