"""The network normalised by the statistics of the whole training set: the baseline "BN" of the MCBN paper.

What is random: nothing.
q(omega): a point mass on the statistics of the training set, taken as one batch.
Cost: one pass over the data for each batch-norm layer, up to that layer.
"""

import torch
from torch import nn

from batchbayes._common.progress import progress
from batchbayes.batches import Batches, as_batches, chunks, first_of, input_stream
from batchbayes.errors import BatchbayesError
from batchbayes.inputs import Picker
from batchbayes.methods.batchnorm.collect import population_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import Select, find_sites
from batchbayes.network import Output, as_network


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
    network = as_network(model, output)
    batches = as_batches(batches)
    if iter(batches) is batches:
        raise BatchbayesError(
            expected="training data that can be read several times",
            got="a generator",
            fix="pass a list or a loader",
        )
    first = first_of(input_stream(batches, inputs))
    found, idle = find_sites(network, first, sites)
    passes = progress((chunks(batches, 4096, inputs) for _ in found), "population statistics", len(found))
    center = population_omega(network, found, passes, idle)
    noiseless = torch.zeros_like(center)[None]
    fixed = (network, found, center, noiseless, float("inf"), "population", "population")
    return BatchNormPosterior(*fixed, idle=idle)
