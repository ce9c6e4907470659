"""The batch-norm posterior: a centre in omega, deviations from it, and the batch size they belong to."""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.functional import Function, Network, reference_tensor, statistics_in_place
from batchbayes.methods.batchnorm.sites import Site, layout, layout_hash
from batchbayes.methods.batchnorm.statistics import is_mean, unpack
from batchbayes.rng import dealt

Center = Literal["batches", "running"]


@dataclass(frozen=True, eq=False)
class BatchNormPosterior:
    """Functions that differ in the statistics by which the batch-norm sites normalise.

    `deviations` holds one row for each observed mini-batch, all sites jointly, as a difference from the mean row. A
    draw is `center` plus a deviation; what kind of deviation is what tells the methods apart.
    """

    network: Network
    sites: tuple[Site, ...]
    center: Tensor
    """Omega that the draws scatter around, (D,)."""
    deviations: Tensor
    """Observed deviations, (R, D); a single row of zeros for a posterior without noise."""
    batch_size: float
    """M: the deviations scale as 1 / sqrt(M)."""
    method: str
    centered_on: str
    """Where the centre came from: the mean over "batches", the "running" statistics or the "population"."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.method} on {type(self.network.module).__name__}: {len(self.sites)} sites, "
            f"{self.center.numel()} statistics, {len(self.deviations)} rows, batch size {self.batch_size:g}, "
            f"centred on {self.centered_on})"
        )

    def omega(self, seed: int, index: int) -> Tensor:
        """The statistics of draw `index`, (D,): every row is drawn once before any is drawn again."""
        return self.center + self.deviations[dealt(seed, index, len(self.deviations))]

    def draw(self, seed: int, index: int) -> Function:
        """One network: the user's own, normalised by the statistics of draw `index`."""
        return self.function(self.omega(seed, index))

    def function(self, omega: Tensor) -> Function:
        """The network that normalises by these statistics."""
        layers = [site.layer for site in self.sites]
        statistics = []
        for layer, (mean, variance) in zip(layers, unpack(self.sites, omega), strict=True):
            like = reference_tensor(layer)
            like = like if like.numel() else reference_tensor(self.network.module)
            statistics.append((mean.to(like), variance.to(like)))

        def drawn(inputs: Tensor) -> Tensor:
            with statistics_in_place(layers, statistics):
                return self.network(inputs)

        return drawn

    def at_batch_size(self, batch_size: float) -> Self:
        r"""The posterior as if it had been fitted on mini-batches of another size m.

        Deviations scale as $1/\sqrt m$. A centre taken from batches moves too, because the statistics of a batch are
        biased by their own noise: $E[\mathrm{var}_m] = \mathrm{var} - \mathrm{Var}(\mathrm{mean}_m)$ (for independent
        values $\frac{m-1}{m}\mathrm{var}$), and the mean of a logarithm lies below the logarithm of the mean.
        """
        if not 1 < batch_size < float("inf"):
            raise BatchbayesError(expected="a finite batch size above 1", got=str(batch_size), fix="pass 2 or more")
        ratio = self.batch_size / batch_size
        return replace(
            self,
            center=self.center + self._center_shift(ratio),
            deviations=self.deviations * ratio**0.5,
            batch_size=float(batch_size),
        )

    def _center_shift(self, ratio: float) -> Tensor:
        """How the mean of omega moves, (D,), when the variance of the deviations grows by `ratio`."""
        shift = torch.zeros_like(self.center)
        if self.centered_on != "batches" or len(self.deviations) < 2:
            return shift
        mean = is_mean(self.sites)
        noise = self.deviations.var(0)
        mean_noise, log_noise = noise[mean], noise[~mean]  # variances of a batch mean and of a batch log std
        log_std = self.center[~mean]
        variance = (2 * log_std + 2 * log_noise).exp()  # of a log-normal: E[var_M], epsilon included
        moved = torch.maximum(variance + mean_noise * (1 - ratio), 0.01 * variance)  # it cannot fall below zero
        shift[~mean] = 0.5 * moved.log() - ratio * log_noise - log_std
        return shift

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Header and tensors for a file."""
        module = self.network.module
        header: dict[str, object] = {
            "kind": "batchnorm",
            "method": self.method,
            "centered_on": self.centered_on,
            "batch_size": self.batch_size,
            "output": self.network.output,
            "sites": [site.name for site in self.sites],
            "layout": layout(module),
            "layout_hash": layout_hash(module),
        }
        return header, {"center": self.center, "deviations": self.deviations}
