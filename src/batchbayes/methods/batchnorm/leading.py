r"""How the classes that matter move with omega, by a few backward passes for each example, however many there are.

Of a thousand logits only those of likely classes matter, and they do not move one by one: other statistics move them
together, along a few axes that training examples show. If an example has the probabilities p, a deviation d of its
logits matters by $d^\top F d$ with $F = \mathrm{diag}(p) - p p^\top$. On training examples $d = B z$: the columns of B
are the axes, and the coordinates z have unit covariance on average over all training examples.

For one example, the covariance C of z is estimated from the training examples whose logits are near its own. With
$C = L L^\top$, the leading eigenvectors u of $L^\top B^\top F B L$ are the combinations $u^\top L^{-1} z$ that matter
most for this example. A backward pass with the weights $B^+ L^{-\top} u$ gives how one of them moves, and $B L u$ is
what it does to the logits.

The other combinations are left out. The eigenvalues tell how much they matter on average, and a factor makes up for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes.engines.linear import LEADING_PASSES
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.jacobian import along_directions, graph_size, watched
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network.function import Network
from batchbayes.network.inputs import require_finite

MOST_AXES = 64
"""Axes of the outputs that a posterior keeps."""
LIKELY = 128
"""Number of the most likely classes of each example that decide which combinations matter."""
NEAR = 0.5
"""Training examples count as near up to about this part of the median distance between two of them."""
OF_ALL = 0.1
"""The part of the covariance that is taken from all training examples, near or not."""


@dataclass(frozen=True, eq=False, repr=False)
class OutputAxes:
    """Along which axes logits move, and what they do along these on single training examples."""

    axes: Tensor
    """Orthogonal, (r, K). Each is as long as the standard deviation along it."""
    positions: Tensor
    """Logits of the n training examples along the axes, (n, r)."""
    covariances: Tensor
    """Of each training example: the covariance of its logits along the axes, (n, r, r), in lengths of the axes."""

    def __post_init__(self) -> None:
        examples, axes = len(self.positions), len(self.axes)
        wanted = (axes, self.axes.shape[-1]), (examples, axes), (examples, axes, axes)
        found = tuple(tuple(tensor.shape) for tensor in self.tensors())
        if found != wanted or not self.axes.numel():
            raise ValueError(f"axes of outputs of shapes {found}")

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.axes, self.positions, self.covariances

    def to(self, like: Tensor) -> "OutputAxes":
        """Return the same on the device and in the precision of a tensor."""
        return OutputAxes(*(tensor.to(like) for tensor in self.tensors()))

    def roots(self, logits: Tensor) -> Tensor:
        """Return L for logits (n, K): a triangular root of the covariance along the axes, (n, r, r)."""
        middle = self.positions.mean(0)  # distances from it have more digits than those from the origin
        known, places = self.positions - middle, logits @ (self.axes / self.axes.norm(dim=1, keepdim=True)).T - middle
        squared = torch.cdist(places, known).square()
        scale = (NEAR * torch.cdist(known, known).median()).square()
        further = squared - squared.amin(1, keepdim=True)  # than the nearest, whose weight is not zero
        further = further.nan_to_num()  # squares of very large logits overflow: then no example is nearer than others
        near = (-further / scale.clamp_min(torch.finfo(scale.dtype).tiny)).softmax(1)
        covariances = (1 - OF_ALL) * torch.tensordot(near, self.covariances, 1)
        covariances.diagonal(dim1=1, dim2=2).add_(OF_ALL)
        return torch.linalg.cholesky(covariances)


def find_output_axes(logits: Tensor, middle: Tensor | None = None) -> OutputAxes | None:
    """Return the axes along which logits move most, or None if they do not move.

    Args:
        logits: those of n training examples in each draw, (S, n, K).
        middle: those at the centre, (n, K); else the mean over draws is taken.

    >>> logits = torch.tensor([[3.0, -3.0, 0.0], [-3.0, 3.0, 0.0], [1.0, 1.0, -2.0], [-1.0, -1.0, 2.0]])
    >>> find_output_axes(torch.stack([logits, -logits])).axes.abs().float().round(decimals=2)
    tensor([[2.1200, 2.1200, 0.0000],
            [0.7100, 0.7100, 1.4100]])
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.mean(-1, keepdim=True)  # a shift of all logits changes nothing
    middle = logits.mean(0) if middle is None else (middle - middle.mean(-1, keepdim=True)).to(logits)
    moved = logits.sub_(middle)
    gram = sum(one.double().T @ one.double() for one in moved) / moved[..., 0].numel()
    values, vectors = torch.linalg.eigh(gram)
    kept = (values > 1e-9 * values[-1]).nonzero()[:, 0].flip(0)[:MOST_AXES]  # the largest first
    if not len(kept):
        return None
    lengths, vectors = values[kept].sqrt(), vectors[:, kept]
    along = (moved @ (vectors / lengths).to(moved)).transpose(0, 1)  # (n, S, r)
    return OutputAxes((vectors * lengths).T.contiguous(), middle.double() @ vectors, along.mT @ along / len(moved))


def leading_coordinates(logits: Tensor, given: OutputAxes, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k combinations of logits that matter most for each example.

    Args:
        logits: at the centre, (n, K).
        given: the axes along which logits move.
        count: the number of combinations k.

    Returns:
        the weights that give the combinations, (n, k, K); what these do to the logits, (n, k, K); and how much all
        combinations matter, and the k leading ones, (2, n).
    """
    axes, roots = given.axes, given.roots(logits)
    probs, likely = logits.softmax(1).topk(min(LIKELY, logits.shape[1]))
    moved = (axes.T[likely] - axes.T[likely[:, :1]]) @ roots  # (n, c, r): relative to the best class: no digits cancel
    weighted = moved * probs[:, :, None]
    mean = weighted.sum(1)  # (n, r)
    matter = weighted.mT @ moved - mean[:, :, None] * mean[:, None]  # (n, r, r)
    # The longest axes come first. So one step of subspace iteration finds the leading eigenvectors, for less time.
    near = torch.linalg.qr(matter[..., : 2 * count]).Q
    values, vectors = torch.linalg.eigh(near.mT @ matter @ near)
    total, kept = matter.diagonal(dim1=1, dim2=2).sum(1), values[:, -count:].clamp_min(0).sum(1)
    leading = near @ vectors[..., -count:]  # (n, r, k)
    factor = torch.where(kept > 0, total / kept, 1.0).clamp_min(1).sqrt()[:, None, None]
    weights = torch.linalg.solve_triangular(roots.mT, leading, upper=True).mT @ (axes / axes.square().sum(1)[:, None])
    return weights, factor * ((roots @ leading).mT @ axes), torch.stack([total, kept])


def leading_tangents(
    network: Network,
    sites: Sequence[Site],
    statistics: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    directions: Tensor,
    axes: OutputAxes,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Compute what `Linearisable.leading_tangents` returns, at given statistics and for given axes of the outputs."""
    count, start = min(LEADING_PASSES, len(axes.axes)), 0
    outputs, bases, matter = [], [], []
    slopes, along = torch.empty(0), []
    with watched(network, sites, statistics) as build:
        for part in inputs.split(graph_size(inputs)):
            graph = build(part)
            require_finite(graph.flat, "the network's output")
            if (found := graph.flat.shape[1]) != (known := axes.axes.shape[1]):
                fix = "fit again after you change the network"
                raise BatchbayesError(expected=f"{known} classes, as at the fit", got=f"{found}", fix=fix)
            if not outputs:
                axes, along = axes.to(graph.flat), along_directions(sites, statistics, directions.to(graph.flat))
                slopes = graph.flat.new_empty(count, len(inputs), len(directions))
            weights, basis, parts = leading_coordinates(graph.flat, axes, count)
            for found, weight in zip(slopes[:, start : start + len(part)], weights.unbind(1), strict=True):
                graph.slopes(weight, along, out=found)
            outputs.append(graph.outputs)
            bases.append(basis)
            matter.append(parts)
            start += len(part)
    total, kept = torch.cat(matter, 1).sum(1).cpu().tolist()
    return torch.cat(outputs), slopes.permute(2, 1, 0), torch.cat(bases), kept / total if total else 1.0
