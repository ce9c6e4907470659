"""The network normalised by the statistics of the whole training set: the baseline "BN" of the MCBN paper.

What is random: nothing.
q(omega): a point mass on the statistics of the training set, taken as one batch.
Cost: one pass over the data for each batch-norm layer, up to that layer.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.progress import progress
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import as_buffers, as_double, batch_statistics, pack
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import Select, Site, find_sites, refusing
from batchbayes.network.function import Network, Output, as_network
from batchbayes.network.inputs import Picker, require_finite
from batchbayes.network.source import Batches, Source, first_of
from batchbayes.network.tap import tap


def population(
    model: nn.Module,
    batches: Batches,
    *,
    sites: Select = None,
    inputs: Picker = None,
    output: Output = None,
) -> BatchNormPosterior:
    """Return the network normalised by the statistics of the whole training set, as if it were one batch.

    `batches` is a tensor, or an iterable that can be read several times: there is a pass for each batch-norm layer. The
    sizes of the batches do not matter.
    """
    network = as_network(model, output, inputs)
    source = Source(batches, inputs)
    if source.is_once:
        raise BatchbayesError("training data that can be read several times", "a generator", "pass a list or a loader")
    first = first_of(source.inputs())
    found, idle, *_ = find_sites(network, first, sites)
    passes = progress((source.chunks(4096) for _ in found), "population statistics", len(found))
    center = population_omega(network, found, passes, idle)
    noiseless = torch.zeros_like(center)[None]
    fixed = (network, found, center, noiseless, float("inf"), "population", "population")
    return BatchNormPosterior(*fixed, idle=idle)


class _ReachedError(Exception):
    """The layer in question has seen its input, so the rest of the network need not run."""


def population_omega(
    network: Network, sites: Sequence[Site], passes: Iterable[Iterable[Any]], idle: Sequence[str] = ()
) -> Tensor:
    """Return omega (D,) of the whole training set taken as one batch, in bounded memory.

    The statistics of a layer depend on those of all layers before it. So there is one pass over the data for each site,
    and it stops at that site.
    """
    known: list[tuple[Tensor, Tensor]] = []
    for site, batches in zip(sites, passes, strict=True):
        pooled = PooledMoments()

        def see(_: str, inputs: Tensor, pooled: PooledMoments = pooled) -> None:
            pooled.add(inputs)
            raise _ReachedError

        tensors = as_buffers(sites[: len(known)], known)
        for batch in batches:
            with torch.no_grad(), suppress(_ReachedError):
                tap(network, batch, [site.name], see, tensors=tensors, before=refusing(idle))
        known.append(pooled.statistics())
    return require_finite(pack(sites, known), "the population statistics")


class PooledMoments:
    """Mean and biased variance of each channel over many batches, merged in float64 by Chan's update."""

    def __init__(self) -> None:
        self._count, self._like = 0, torch.zeros(())
        self._mean = self._deviation = torch.zeros((), dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """Take in one batch (N, C, ...)."""
        mean, variance = batch_statistics(as_double(inputs))
        count = inputs.numel() // inputs.shape[1]
        total, shift = self._count + count, mean - self._mean
        self._deviation = self._deviation + variance * count + shift.square() * (self._count * count / total)
        self._mean, self._count, self._like = self._mean + shift * (count / total), total, inputs[:0]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return (mean, biased variance), in the dtype and on the device of the inputs."""
        return self._mean.to(self._like), (self._deviation / self._count).to(self._like)
