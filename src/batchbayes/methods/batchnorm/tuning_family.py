"""One posterior at every batch size: its outputs on labelled data, from Jacobians that are computed once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchbayes.engines.linear import plan_linear, tangents_along
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.network.inputs import Picker
from batchbayes.network.source import Source, cut, spread_evenly

LARGEST = 2**27
"""A family holds at most this many numbers (512 MiB in float32). If there are more examples, it uses a part."""
CHUNK = 3 * 2**16
"""Input numbers in one pass."""
KNOTS = 25
"""Number of batch sizes at which the move of the centre is computed. Between them it is interpolated."""


@dataclass(frozen=True, eq=False)
class LinearFamily:
    """Outputs of S draws as a function of log batch sizes, one for each of G groups of sites; linear in the noise."""

    log_size: float
    """log M of the posterior that the family was made from."""
    middle: Tensor
    """Outputs at the centre, (n, ...)."""
    spread: Tensor
    """What the deviations of each group do to them, (G, S, n, ...)."""
    knots: Tensor
    """Evenly spaced log batch sizes, (J,): the range of the family."""
    shifts: Tensor | None
    """What the move of the centre of each group does at each knot, (G, J, n, ...); None if the centre does not move."""
    inputs: Tensor
    targets: Tensor
    population: float
    """N of the posterior: batches are drawn from so many examples without replacement."""
    num_examples: int
    """How many labelled examples there were. If they were too many, inputs and targets are an even selection."""

    def outputs(self, log_sizes: Tensor) -> Tensor:
        """Return outputs of all draws, (S, n, ...), at these log batch sizes (G,). Gradients pass to the sizes."""
        moved = self.middle
        if self.shifts is not None:
            position = (log_sizes - self.knots[0]) / (self.knots[1] - self.knots[0])
            weights = cubic_weights(position, len(self.knots))
            moved = moved + torch.einsum("gj,gj...->...", weights.to(self.shifts), self.shifts)
        scale = (0.5 * (self.log_size - log_sizes)).exp()
        if self.population < math.inf:
            left = self.population - log_sizes.exp()
            scale = scale * (left / (self.population - math.exp(self.log_size))).sqrt()
        scale = scale.to(self.spread)
        return moved + torch.einsum("g,gs...->s...", scale, self.spread)


def cubic_weights(position: Tensor, count: int) -> Tensor:
    """Return weights (G, count) that interpolate values at 0, 1, ..., count - 1 to positions (G,) between them.

    This is cubic convolution. It is smooth, so that an optimum is not pulled to a knot, and exact for parabolas. Beyond
    the ends the values continue as the parabola through the last three.

    >>> values = torch.arange(5.0) ** 2
    >>> cubic_weights(torch.tensor([0.5, 2.2]), 5) @ values
    tensor([0.2500, 4.8400])
    """
    distance = (position[:, None] - torch.arange(-1, count + 1).to(position)).abs()  # (G, count + 2)
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
    parabola = torch.tensor([3.0, -3.0, 1.0]).to(weights)
    inner = weights[:, 1:-1].clone()
    inner[:, :3] += weights[:, :1] * parabola
    inner[:, -3:] += weights[:, -1:] * parabola.flip(0)
    return inner


def linear_family(
    posterior: BatchNormPosterior,
    batches: Iterable[Any],
    groups: Tensor,
    *,
    num_samples: int,
    seed: int,
    most: float = math.inf,
    inputs: Picker = None,
    targets: Picker = None,
) -> LinearFamily:
    """Compute the Jacobians on labelled batches (x, y), for batch sizes up to `most`.

    `groups` (D,) is the number of each statistic's group.
    """
    x, y = _labelled(batches, inputs, targets)
    device, count = posterior.device, int(groups.max()) + 1
    with torch.no_grad():
        outputs = posterior.function(posterior.center)(x[:1].to(device))
    plan = plan_linear(posterior, outputs.numel(), num_samples, seed)
    if count > 1 and plan.mode == "forward":
        raise BatchbayesError(
            expected="few enough outputs for one batch size a site",
            got=f"{outputs.numel()} outputs for each example",
            fix="tune one batch size for the whole network",
        )
    masks = (groups == torch.arange(count)[:, None]).to(plan.directions)  # (G, D)
    largest = min(max(4096.0, 4 * posterior.batch_size), max(2.5, most))
    knots = torch.linspace(math.log(2.0), math.log(largest), KNOTS)
    moves = torch.stack([posterior.center_shift(knot.exp().expand_as(posterior.center)) for knot in knots])  # (J, D)
    parts = [plan.directions, *([moves] if moves.any() else [])]
    directions = torch.cat([mask * part for part in parts for mask in masks])  # (G * Q + G * J, D)
    most = max(1, LARGEST // (outputs.numel() * max(len(directions), count * num_samples)))
    total, middle, rows = len(x), [], []
    if most < total:
        used = spread_evenly(total, most)
        x, y = x[used], y[used]
    for chunk in cut(x, None, CHUNK):
        value, along = tangents_along(posterior, chunk.to(device), directions, plan)
        middle.append(value.cpu())
        rows.append(along.cpu())
    tangents, moved = torch.cat(rows, dim=1), count * len(plan.directions)  # (G * Q + G * J, n, ...)
    shape = tangents.shape[1:]
    spread = tangents[:moved].view(count, -1, *shape)  # (G, Q, n, ...)
    weights, index = plan.combinations.weights, plan.combinations.index
    if weights is not None:
        spread = torch.einsum("uq,gq...->gu...", weights.to(tangents), spread)
    spread = spread[:, index]  # (G, S, n, ...)
    shifts = tangents[moved:].view(count, KNOTS, *shape) if len(parts) > 1 else None
    log_size = math.log(posterior.batch_size)
    return LinearFamily(log_size, torch.cat(middle), spread, knots, shifts, x, y.cpu(), posterior.population, total)


def _labelled(batches: Iterable[Any], inputs: Picker, targets: Picker) -> tuple[Tensor, Tensor]:
    """Return all inputs and all targets of pairs (x, y)."""
    pairs = list(Source(batches, inputs, targets).labelled())
    if not pairs:
        raise BatchbayesError(expected="at least one labelled batch", got="none", fix="pass [(x, y)]")
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
