r"""MCBN with the query inside its own batch: the exact predictive, for research.

What is random: the M - 1 training examples that share a batch with the query.
q(omega): for each query x, the statistics of the batch {x} and its companions, so omega depends on x.
Cost: fitting keeps R companion batches; a draw runs M examples for each query, M times the cost of plain MCBN.
Reference: the predictive of Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common.rng import dealt
from batchbayes._common.text import count
from batchbayes.inputs import require_finite
from batchbayes.methods.batchnorm.omega import by_batch
from batchbayes.methods.batchnorm.sites import (
    Site,
    idle_of_header,
    refusing,
    require_present,
    site_header,
    sites_of_header,
)
from batchbayes.network import Function, Network, as_network
from batchbayes.posterior import Header, Posterior


@dataclass(frozen=True, eq=False)
class QueryInBatchPosterior(Posterior):
    """Functions that differ in the training examples that each query is normalised with."""

    kind: ClassVar[str] = "batchnorm-query"

    network: Network
    sites: tuple[Site, ...]
    companions: Tensor
    """Training inputs, (R, M - 1, ...)."""
    idle: tuple[str, ...] = ()
    """Layers without statistics, which no example may reach."""

    @property
    def batch_size(self) -> float:
        """M: the query and its companions."""
        return float(self.companions.shape[1] + 1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(mcbn on {self.network}: {count(len(self.sites), 'site')}, "
            f"{len(self.companions)} batches, batch size {self.batch_size:g}, the query inside)"
        )

    def draw(self, seed: int, index: int) -> Function:
        """Return the network as each query sees it among the companions of draw `index`."""
        require_present(self.network, self.sites)
        companions = self.companions[dealt(seed, index, len(self.companions))]
        tensors, before = by_batch(self.sites), refusing(self.idle)

        def drawn(inputs: Tensor) -> Tensor:
            others = companions.to(inputs)
            batches = (torch.cat([query[None], others]) for query in inputs)
            return torch.stack([self.network(batch, tensors=tensors, before=before)[0] for batch in batches])

        return drawn

    def state(self) -> tuple[Header, dict[str, Tensor]]:
        return site_header(self.network, self.sites, self.idle), {"companions": self.companions}

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        network = as_network(model, header["output"])
        companions = tensors["companions"]
        if companions.ndim < 3 or not companions.shape[0] or not companions.shape[1]:
            raise ValueError(f"companions of shape {tuple(companions.shape)}")
        require_finite(companions, "the companions")
        return cls(network, sites_of_header(header, network.module), companions, idle_of_header(header, network.module))
