"""Collecting statistics: what a forward pass in training mode would normalise by, without its side effects."""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.inputs import require_finite
from batchbayes.methods.batchnorm.omega import as_buffers, batch_statistics, by_batch, pack
from batchbayes.methods.batchnorm.sites import Site, refusing
from batchbayes.network import Network


def collect_omegas(
    network: Network,
    sites: Sequence[Site],
    batches: Iterable[Any],
    *,
    idle: Sequence[str] = (),
    dropout: GlobalStream | None = None,
) -> Iterator[Tensor]:
    """Yield omega (D,) of each mini-batch: each layer sees inputs that are normalised by this batch's own statistics.

    With `dropout`, dropout modules are active, and draw their masks from that stream. `idle` layers must not run.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def see(name: str, inputs: Tensor) -> None:
        seen[name] = batch_statistics(inputs)

    for batch in batches:
        seen.clear()
        with torch.no_grad(), dropout or nullcontext():
            network(
                batch.to(network.device),
                tensors=by_batch(sites),
                before={**refusing(idle), **{site.name: partial(see, site.name) for site in sites}},
                dropout=dropout is not None,
            )
        _require_all(sites, seen)
        omega = pack(sites, [seen[site.name] for site in sites])
        yield require_finite(omega, "the batch statistics")


def _require_all(sites: Sequence[Site], seen: Container[str]) -> None:
    missing = [site.name for site in sites if site.name not in seen]
    if missing:
        raise BatchbayesError(
            expected="the same batch-norm layers to run for every batch",
            got=f"a batch for which these did not: {', '.join(missing)}",
            fix="leave these layers out with sites=",
        )


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

        def see(inputs: Tensor, pooled: PooledMoments = pooled) -> None:
            pooled.add(inputs)
            raise _ReachedError

        tensors = as_buffers(sites[: len(known)], known)
        for batch in batches:
            with torch.no_grad(), suppress(_ReachedError):
                network(batch.to(network.device), tensors=tensors, before={**refusing(idle), site.name: see})
        known.append(pooled.statistics())
    return require_finite(pack(sites, known), "the population statistics")


class PooledMoments:
    """Mean and biased variance of each channel over many batches, merged in float64 by Chan's update."""

    def __init__(self) -> None:
        self._count, self._like = 0, torch.zeros(())
        self._mean = self._deviation = torch.zeros((), dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """Take in one batch (N, C, ...)."""
        mean, variance = batch_statistics(_double(inputs))
        count = inputs.numel() // inputs.shape[1]
        total, shift = self._count + count, mean - self._mean
        self._deviation = self._deviation + variance * count + shift.square() * (self._count * count / total)
        self._mean, self._count, self._like = self._mean + shift * (count / total), total, inputs[:0]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return (mean, biased variance), in the dtype and on the device of the inputs."""
        return self._mean.to(self._like), (self._deviation / self._count).to(self._like)


@dataclass(frozen=True, eq=False)
class ExampleMoments:
    """What single examples contribute to the statistics of a site, (C,) each, in float64.

    The values of an example are those at all of its positions, and in all of its rows if a layer sees several rows.
    Example i contributes a_i, the mean of its values, and q_i, their mean squared distance from the population mean.
    The mean of a batch is the mean of M values a_i, and its variance is nearly the mean of M values q_i. For (N, C)
    inputs Var(q_i) is mu_4 - sigma^4. In convolutions it includes the correlation between the positions of an image.
    """

    mean: Tensor
    variance: Tensor
    """E[q_i]."""
    mean_var: Tensor
    """Var(a_i)."""
    square_var: Tensor
    """Var(q_i)."""


def example_moments(
    network: Network, sites: Sequence[Site], batches: Iterable[Any], idle: Sequence[str] = ()
) -> list[ExampleMoments]:
    """Return population moments up to the fourth of every site, from one pass of the network as it is."""
    layers = {site.name: site.layer for site in sites}
    count, size, seen = 0, 0, set()
    sums = {name: torch.zeros((), dtype=torch.float64) for name in layers}

    def see(name: str, inputs: Tensor) -> None:
        if len(inputs) % size:
            raise BatchbayesError(
                expected="the same number of rows for every example",
                got=f"{len(inputs)} rows at {name} for {size} examples",
                fix="use stochastic_bn, or leave this layer out with sites=",
            )
        seen.add(name)
        values = _double(inputs.detach())
        values = (values if values.ndim > 2 else values.unsqueeze(2)).flatten(2) - _origin(layers[name])
        values = values.unflatten(0, (size, -1)).transpose(1, 2).flatten(2)  # (n, C, P)
        a, b = values.mean(2), values.square().mean(2)  # (n, C)
        sums[name] = sums[name] + torch.stack([a, b, a * a, a * b, b * b]).sum(1)  # (5, C)

    for batch in batches:
        size = len(batch)
        count += size
        seen.clear()
        with torch.no_grad():
            before = {**refusing(idle), **{name: partial(see, name) for name in layers}}
            network(batch.to(network.device), before=before)
        _require_all(sites, seen)
    return [_moments(sums[name].cpu() / count, _origin(layer).cpu()) for name, layer in layers.items()]


def _origin(layer: _BatchNorm) -> Tensor:
    """Return the running mean, (C, 1): moments are taken about it, so that little is lost to rounding."""
    assert layer.running_mean is not None
    return _double(layer.running_mean.detach())[:, None]


def _double(values: Tensor) -> Tensor:
    """Return float64 on the device of the values, which may be large. Apple's GPUs have no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _moments(expected: Tensor, origin: Tensor) -> ExampleMoments:
    """Compute moments from E[a], E[b], E[a^2], E[ab], E[b^2] about `origin`: q = b - 2 m a + m^2 with m = E[a]."""
    a, b, aa, ab, bb = expected
    var_a, cov, var_b = aa - a * a, ab - a * b, bb - b * b
    square_var = (var_b - 4 * a * cov + 4 * a * a * var_a).clamp_min(0)
    return ExampleMoments(origin[:, 0] + a, b - a * a, var_a.clamp_min(0), square_var)
