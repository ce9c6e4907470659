r"""Omega: the one vector that holds all batch-norm noise.

For each site in turn, omega holds the means of the C channels and then their log standard deviations. The standard
deviation is what the layer divides by: $\sqrt{\mathrm{var} + \epsilon}$ with the biased variance. So a channel that is
always zero has a finite logarithm, and the output of the layer is exactly linear in exp(-log std).
"""

from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.sites import Site, refusing, require_running
from batchbayes.network.function import Network
from batchbayes.network.inputs import require_finite
from batchbayes.network.replicas import Changes
from batchbayes.network.tap import tapping

Statistics = tuple[Tensor | None, Tensor | None]
"""Mean and biased variance of a site, or None for those of the batch."""


def batch_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of (N, C, ...), as the layer computes them in training.

    >>> batch_statistics(torch.tensor([[0.0], [2.0]]))
    (tensor([1.]), tensor([1.]))
    """
    values = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    variance, mean = torch.var_mean(values, (0, *range(2, inputs.ndim)), correction=0)
    return mean, variance


def pack(sites: Sequence[Site], statistics: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Turn (mean, variance) of each site, (..., C) each, into omega (..., D) on the CPU, in float32 or better."""
    parts = []
    for site, pair in zip(sites, statistics, strict=True):
        mean, variance = (part.to("cpu", torch.promote_types(part.dtype, torch.float32)) for part in pair)
        parts += [mean, 0.5 * (variance + site.epsilon).log()]
    return torch.cat(parts, -1)


def by_site(sites: Sequence[Site], omega: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Turn omega (..., D) into (mean, log standard deviation) of each site, (..., C) each."""
    parts = omega.split([2 * site.channels for site in sites], -1)
    return [tuple(part.tensor_split(2, -1)) for part in parts]  # type: ignore[misc]


def unpack(sites: Sequence[Site], omega: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Turn omega (D,) into (mean, variance) of each site.

    A variance may be as low as -epsilon, because the layer adds epsilon.
    """
    pairs = zip(sites, by_site(sites, omega), strict=True)
    return [(mean, (2 * log_std).exp() - site.epsilon) for site, (mean, log_std) in pairs]


def size(sites: Sequence[Site]) -> int:
    """Return D, the length of omega: two numbers for each channel."""
    return 2 * sum(site.channels for site in sites)


def is_mean(sites: Sequence[Site]) -> Tensor:
    """Return a mask (D,) of the numbers in omega that are means. The others are log standard deviations."""
    parts = [torch.arange(2).repeat_interleave(site.channels) == 0 for site in sites]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def site_of(sites: Sequence[Site]) -> Tensor:
    """Return the number of the site that each number of omega belongs to, (D,)."""
    widths = torch.tensor([2 * site.channels for site in sites], dtype=torch.long)
    return torch.arange(len(sites)).repeat_interleave(widths)


def running_omega(sites: Sequence[Site]) -> Tensor:
    """Return omega of the network's own running statistics."""
    require_running(sites, 'for center="running"', fix='use center="batches"')
    return pack(sites, [site.running for site in sites])


def as_buffers(sites: Sequence[Site], statistics: Iterable[Statistics]) -> dict[str, Tensor | None]:
    """Return the buffers that let each site normalise by the given statistics, by their full names."""
    buffers: dict[str, Tensor | None] = {}
    for site, (mean, variance) in zip(sites, statistics, strict=True):
        buffers[f"{site.name}.running_mean"], buffers[f"{site.name}.running_var"] = mean, variance
    return buffers


def by_batch(sites: Sequence[Site]) -> dict[str, Tensor | None]:
    """Return the buffers that let each site normalise by the statistics of its batch.

    A batch-norm layer in evaluation mode that has no running statistics uses those of the batch, and writes nothing.
    """
    return as_buffers(sites, [(None, None)] * len(sites))


def collect_omegas(
    network: Network,
    sites: Sequence[Site],
    batches: Iterable[Any],
    *,
    idle: Sequence[str] = (),
    dropout: GlobalStream | None = None,
) -> tuple[Tensor, torch.Size]:
    """Return omega of each mini-batch, (R, D), and the shape of the outputs of the last one.

    Each layer sees inputs that are normalised by the batch's own statistics. With `dropout`, dropout modules are
    active, and draw their masks from that stream. `idle` layers must not run.
    """
    rows: list[list[tuple[Tensor, Tensor]]] = []
    shape, no_grad, random = torch.Size(), torch.no_grad(), dropout or nullcontext()
    names = [site.name for site in sites]
    changes: Changes = {"tensors": by_batch(sites), "before": refusing(idle), "dropout": dropout is not None}
    with tapping(network, names, lambda _, h: batch_statistics(h), **changes) as run:
        for batch in batches:
            with no_grad, random:
                seen, _, outputs = run(batch)
            if len(seen) < len(names):
                require_all(sites, seen)
            rows.append(list(map(seen.__getitem__, names)))
            shape = outputs.shape
    pairs = [tuple(map(torch.stack, zip(*of_site, strict=True))) for of_site in zip(*rows, strict=True)]
    return require_finite(pack(sites, pairs), "the batch statistics"), shape  # type: ignore[arg-type]


def require_all(sites: Sequence[Site], seen: Container[str]) -> None:
    """Raise an error if a batch has not reached one of the sites."""
    missing = [site.name for site in sites if site.name not in seen]
    if missing:
        got = f"a batch for which these did not: {', '.join(missing)}"
        fix = "leave these layers out with sites="
        raise BatchbayesError("the same batch-norm layers to run for every batch", got, fix)


def as_double(values: Tensor) -> Tensor:
    """Return float64 on the device of the values, which may be large. Apple's GPUs have no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()
