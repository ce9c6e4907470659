"""All draws of the linear engine on some examples, kept as what they are combined from.

Draws that are linear in a few tangents need not be formed. Their moments have a closed form, and the draws themselves
are formed only when they are asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

BLOCK = 2**20
"""Numbers in one block of draws, so that it stays in a processor's cache."""
CACHED = 2**18
"""Numbers that are squared at once: new memory costs more time than arithmetic."""


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
    left_out: float = 0.0
    """Share of the deviations of a linear network that these draws are expected to miss."""

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
