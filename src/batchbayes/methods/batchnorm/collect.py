"""Collecting statistics: what a forward pass in training mode would normalise by, without its side effects."""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.inputs import require_finite
from batchbayes.methods.batchnorm.omega import batch_statistics, by_batch, pack
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
        require_all(sites, seen)
        omega = pack(sites, [seen[site.name] for site in sites])
        yield require_finite(omega, "the batch statistics")


def require_all(sites: Sequence[Site], seen: Container[str]) -> None:
    """Raise an error if a batch has not reached one of the sites."""
    missing = [site.name for site in sites if site.name not in seen]
    if missing:
        raise BatchbayesError(
            expected="the same batch-norm layers to run for every batch",
            got=f"a batch for which these did not: {', '.join(missing)}",
            fix="leave these layers out with sites=",
        )


def as_double(values: Tensor) -> Tensor:
    """Return float64 on the device of the values, which may be large. Apple's GPUs have no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()
