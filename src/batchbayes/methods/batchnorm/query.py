r"""MCBN with the query inside its own batch: the exact predictive, for research.

What is random: the M - 1 training examples that share a batch with the query.
q(omega): for each query x, the statistics of the batch {x} and its companions, so omega depends on x.
Cost: fitting keeps R companion batches; a draw runs M examples for each query, M times the cost of plain MCBN.
Reference: the predictive of Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes._common.rng import dealt
from batchbayes.methods.batchnorm.sites import Site, layout, layout_hash
from batchbayes.network import Function, Network, statistics_in_place


@dataclass(frozen=True, eq=False)
class QueryInBatchPosterior:
    """Functions that differ in the training examples which each query is normalised with."""

    network: Network
    sites: tuple[Site, ...]
    companions: Tensor
    """Training inputs, (R, M - 1, ...)."""
    method: str = "mcbn-query"

    @property
    def batch_size(self) -> float:
        """M: the query and its companions."""
        return float(self.companions.shape[1] + 1)

    def draw(self, seed: int, index: int) -> Function:
        """The network as each query sees it among the companions of draw `index`; never two queries in one batch."""
        companions = self.companions[dealt(seed, index, len(self.companions))]
        layers = [site.layer for site in self.sites]

        def drawn(inputs: Tensor) -> Tensor:
            others = companions.to(inputs)
            with statistics_in_place(layers, [(None, None)] * len(layers)):
                return torch.stack([self.network(torch.cat([query[None], others]))[0] for query in inputs])

        return drawn

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Header and tensors for a file."""
        header: dict[str, object] = {
            "kind": "batchnorm-query",
            "method": self.method,
            "batch_size": self.batch_size,
            "output": self.network.output,
            "sites": [site.name for site in self.sites],
            "layout": layout(self.network.module),
            "layout_hash": layout_hash(self.network.module),
        }
        return header, {"companions": self.companions}
