r"""Wide fixed features of tables: $\cos$ and $\sin$ of random directions, the inputs themselves, and a one.

With Gaussian weights on them, the cosines and sines are a Gaussian process with the kernel
$\exp(-\frac12\sum_j (x_j - x'_j)^2 / \ell_j^2)$, up to the error of a finite number of directions. Each column has its
own length scale $\ell_j$, found by the marginal likelihood of the first part.

Reference: Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
"""

import math
import os
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes.tools import generator, require_data, require_finite, shaped_like, whole_number
from batchbayes_papers.online.conjugate import VARIANCE, negative_log_evidence
from batchbayes_papers.online.parts import read_features, write_features

STEPS = 150
"""Of Adam, for the length scales."""
MOST_EXAMPLES = 600
"""Largest number of examples that the length scales are fitted to. A step costs its cube."""


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Inputs (N, D) to features (N, P) in float64."""

    centre: Tensor
    """(D,)"""
    scale: Tensor
    """(D,)"""
    directions: Tensor
    """(M, D), divided by the length scales"""

    @property
    def groups(self) -> tuple[int, ...]:
        """How many features share a variance of their weights: the waves, the inputs, and the one."""
        return 2 * len(self.directions), len(self.centre), 1

    @property
    def num_features(self) -> int:
        """P"""
        return sum(self.groups)

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.ndim != 2 or inputs.shape[1] != len(self.centre):
            raise BatchbayesError(
                expected=f"inputs of shape (N, {len(self.centre)}), as in the first part",
                got=f"shape {tuple(inputs.shape)}",
                fix="pass the same columns",
            )
        rest = (require_finite(inputs, "the inputs").double() - self.centre) / self.scale
        return torch.cat([_waves(rest @ self.directions.T), rest, torch.ones_like(rest[:, :1])], 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a file, whole or not at all."""
        write_features(path, "random features", vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote."""
        return cls(**read_features(path, "random features"))


def random_features(inputs: Tensor, targets: Tensor, num_directions: int = 400, *, seed: int = 0) -> RandomFeatures:
    """Fit features to the first part: inputs (N, D), and targets (N,) or (N, 1) of about unit variance.

    The other parts must have the same columns, and need not be there yet.

    >>> from batchbayes_papers.online import ConjugateRegression, learn_parts
    >>> x = torch.linspace(-3, 3, 60, dtype=torch.float64)[:, None]
    >>> parts = [(x[start::3], x[start::3].sin()) for start in range(3)]
    >>> features = random_features(*parts[0], num_directions=50)
    >>> state = learn_parts(ConjugateRegression.start(features.groups), ((features(x), y) for x, y in parts))
    >>> bool((state.predictive(features(x)).mean - x.sin()).abs().max() < 0.01)
    True
    """
    whole_number("num_directions", num_directions)
    require_data(inputs, targets)
    if inputs.ndim != 2:
        raise BatchbayesError("inputs of shape (N, D)", f"shape {tuple(inputs.shape)}", "flatten them")
    inputs, targets = inputs.double(), shaped_like(targets, inputs[:, :1].shape)[:, 0].double()
    spread = inputs.std(0, correction=0)
    scale = torch.where(spread > 1e-9 * inputs.abs().amax(0), spread, 1.0)  # constant columns stay as they are
    bare = torch.randn(num_directions, inputs.shape[1], generator=generator(seed, "directions"), dtype=torch.float64)
    rows = torch.randperm(len(inputs), generator=generator(seed, "rows"))[:MOST_EXAMPLES]
    lengths = _length_scales((inputs[rows] - inputs.mean(0)) / scale, targets[rows], bare)
    return RandomFeatures(inputs.mean(0), scale, bare / lengths)


def _waves(angles: Tensor) -> Tensor:
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(angles.shape[1])


@torch.enable_grad()
def _length_scales(inputs: Tensor, targets: Tensor, bare: Tensor) -> Tensor:
    """Return the length scale of each column of highest marginal likelihood, held near wide ones by a weak prior."""
    usual = math.sqrt(2) + 0.5 * math.log(inputs.shape[1])
    logs = torch.full(inputs.shape[1:], 0.5 * math.log(inputs.shape[1]), dtype=torch.float64, requires_grad=True)
    log_variances = torch.full((3,), math.log(VARIANCE), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([logs, log_variances], lr=0.1)
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / STEPS)
        waves, line, one = (0.5 * log_variances).exp()
        angles = inputs @ (bare / logs.exp()).T
        scaled = torch.cat([waves * _waves(angles), line * inputs, one * torch.ones_like(inputs[:, :1])], 1)
        prior = (logs - usual).square().sum() / 6 + (log_variances - math.log(VARIANCE)).square().sum() / 18
        loss = negative_log_evidence(scaled, targets) + prior
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return logs.detach().exp()
