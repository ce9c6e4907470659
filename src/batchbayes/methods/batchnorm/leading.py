r"""How the classes that matter move with omega, by a few backward passes for each example, however many there are.

Of a thousand logits only those of likely classes matter, and they do not move one by one: other statistics move them
together, along a few axes that training examples show. If an example has the probabilities p, a deviation d of its
logits matters by $d^\top F d$ with $F = \mathrm{diag}(p) - p p^\top$. On training examples $d = B z$: the columns of B
are the axes, and the coordinates z have unit covariance on average. The leading eigenvectors u of $B^\top F B$ are the
combinations $u^\top z$ that matter most for this example. A backward pass with the weights $B^+ u$ gives how one of
them moves, and $B u$ is what it does to the logits.

The other combinations are left out. The eigenvalues tell how much they matter on average, and a factor makes up for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes.engines.linear import LEADING_PASSES
from batchbayes.inputs import require_finite
from batchbayes.methods.batchnorm.jacobian import along_directions, graph_size, watched
from batchbayes.methods.batchnorm.sites import Site
from batchbayes.network import Network

MOST_AXES = 64
"""Axes of the outputs that a posterior keeps."""
LIKELY = 128
"""Of each example, only so many of its most likely classes decide which combinations matter."""


def find_output_axes(moved: Tensor) -> Tensor:
    """Return the axes along which logits move most, (r, K), each as long as the standard deviation along it.

    Args:
        moved: deviations of the logits of training examples, (..., K).

    >>> moved = torch.tensor([[3.0, -3.0, 0.0], [-3.0, 3.0, 0.0], [1.0, 1.0, -2.0], [-1.0, -1.0, 2.0]])
    >>> find_output_axes(moved).abs().round(decimals=2)
    tensor([[2.1200, 2.1200, 0.0000],
            [0.7100, 0.7100, 1.4100]])
    """
    rows = moved.flatten(0, -2).double()
    rows = rows - rows.mean(-1, keepdim=True)  # a shift of all logits changes nothing
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    kept = (values > 1e-9 * values[-1]).nonzero()[:, 0].flip(0)[:MOST_AXES]  # the largest first
    return (vectors[:, kept] * values[kept].sqrt()).T.contiguous().to(moved.dtype)


def leading_coordinates(logits: Tensor, axes: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k combinations of logits that matter most for each example.

    Args:
        logits: at the centre, (n, K).
        axes: along which logits move, orthogonal, (r, K).
        count: the number of combinations k.

    Returns:
        the weights that give the combinations, (n, k, K); what these do to the logits, (n, k, K); and how much all
        combinations matter, and the k leading ones, (2, n).
    """
    probs, likely = logits.softmax(1).topk(min(LIKELY, logits.shape[1]))
    moved = axes.T[likely] - axes.T[likely[:, :1]]  # (n, c, r): relative to the best class, so that no digits cancel
    weighted = moved * probs[:, :, None]
    mean = weighted.sum(1)  # (n, r)
    matter = weighted.mT @ moved - mean[:, :, None] * mean[:, None]  # (n, r, r)
    # The longest axes come first. So one step of subspace iteration finds the leading eigenvectors, for less time.
    near = torch.linalg.qr(matter[..., : 2 * count]).Q
    values, vectors = torch.linalg.eigh(near.mT @ matter @ near)
    total, kept = matter.diagonal(dim1=1, dim2=2).sum(1), values[:, -count:].clamp_min(0).sum(1)
    leading = (near @ vectors[..., -count:]).mT  # (n, k, r)
    factor = torch.where(kept > 0, total / kept, 1.0).clamp_min(1).sqrt()[:, None, None]
    return leading @ (axes / axes.square().sum(1, keepdim=True)), factor * (leading @ axes), torch.stack([total, kept])


def leading_tangents(
    network: Network,
    sites: Sequence[Site],
    statistics: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    directions: Tensor,
    axes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Compute what `Linearisable.leading_tangents` returns, at given statistics and for given axes of the outputs."""
    count, start = min(LEADING_PASSES, len(axes)), 0
    outputs, bases, matter = [], [], []
    slopes, along = torch.empty(0), []
    with watched(network, sites, statistics) as build:
        for part in inputs.split(graph_size(inputs)):
            graph = build(part)
            require_finite(graph.flat, "the network's output")
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
    total, kept = torch.cat(matter, 1).sum(1).tolist()
    return torch.cat(outputs), slopes.permute(2, 1, 0), torch.cat(bases), kept / total if total else 1.0
