"""Central limit theorem."""

from itertools import chain

import torch
from torch import nn

from batchbayes._common.progress import progress
from batchbayes.batches import Batches, Picker, chunks, input_stream, require_finite, require_size
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.collect import example_moments
from batchbayes.methods.batchnorm.fit import require_center
from batchbayes.methods.batchnorm.omega import running_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select, find_sites
from batchbayes.network import as_network


def clt_bn(
    model: nn.Module,
    batches: Batches,
    *,
    batch_size: int,
    center: Center = "batches",
    sites: Select = None,
    inputs: Picker = None,
    output: str | int | None = None,
) -> BatchNormPosterior:
    """A factorised Gaussian by the central limit theorem, for any batch size M, from one pass over the data.

    `batches` may have any size: only single examples count. The network runs as it is, with its running statistics.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> clt_bn(network, torch.randn(100, 2), batch_size=10)
    BatchNormPosterior(clt_bn on Sequential: 1 sites, 16 statistics, 1 rows, batch size 10, centred on batches)
    """
    require_size(float("inf"), batch_size)
    require_center(center)
    network, stream = as_network(model, output), input_stream(batches, inputs)
    first = next(stream, None)
    if first is None:
        raise BatchbayesError(expected="at least one batch of training data", got="none", fix="check the loader")
    found = find_sites(network, first[:2].to(network.device()), sites)
    blind = [site.name for site in found if not site.tracks]
    if blind:
        raise BatchbayesError(
            expected="running statistics at every site: clt_bn runs the network as it is",
            got=f"none (track_running_stats=False) in {', '.join(blind)}",
            fix="use stochastic_bn, which reads mini-batches",
        )
    running = running_omega(found)
    moments = example_moments(network, found, progress(chunks(chain([first], stream), None), "population moments"))
    middle, std = [], []
    for site, moment in zip(found, moments, strict=True):
        mean_var = moment.mean_var / batch_size
        divided = moment.variance + site.epsilon
        log_var = moment.square_var / (4 * divided.square() * batch_size)  # of the log of sqrt(var + epsilon)
        middle += [moment.mean, 0.5 * (divided - mean_var).log() - log_var]
        std += [mean_var.sqrt(), log_var.sqrt()]
    spread = require_finite(torch.cat(std).to(running.dtype), "the population moments")
    own = require_finite(torch.cat(middle).to(running.dtype), "the population moments")
    own = own if center == "batches" else running
    return BatchNormPosterior(network, found, own, spread[None], float(batch_size), "clt_bn", center, "factorised")
