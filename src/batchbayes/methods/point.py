"""The network as it is: one function, drawn every time. It is the baseline that every method is compared with."""

import torch
from torch import nn

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.network import as_network


def deterministic(model: nn.Module, *, output: str | int | None = None) -> BatchNormPosterior:
    """The network as it predicts by itself, with its running statistics; any network will do.

    >>> network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    >>> x = torch.randn(4, 2)
    >>> bool((deterministic(network).draw(seed=0, index=0)(x) == network(x)).all())
    True
    """
    network = as_network(model, output)
    blind = [site.name for site in all_sites(network.module) if not site.tracks]
    if blind:
        raise BatchbayesError(
            expected="batch-norm layers with running statistics",
            got=f"none (track_running_stats=False) in {', '.join(blind)}",
            fix="use population(model, batches), which computes them from the training data",
        )
    empty = torch.zeros(0)
    return BatchNormPosterior(network, (), empty, empty[None], float("inf"), "deterministic", "running")
