r"""Batch-norm noise by the central limit theorem.

What is random: the mean and the log standard deviation by which every batch-norm layer normalises.
q(omega): independent Gaussians, from population moments up to the fourth: $\mathrm{Var}(\mu_B) = \sigma^2/M$ and
$\mathrm{Var}(\sigma_B) = (\mu_4 - \sigma^4)/(4\sigma^2 M)$, so that $\mathrm{Var}(\log\sigma_B) = (\mu_4/\sigma^4 -
1)/(4M)$. In convolutions the values within an example are not independent. There the moments are those of a whole
example's contribution (see `ExampleMoments`).
Cost: one pass over the data; no mini-batches are needed.
Reference: the appendix of Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks",
ICML 2018.
Limits: the theorem takes the examples of a batch as independent. But a deeper layer sees examples that were normalised
together, which holds its batch means in place. There `clt_bn` is too wide: on a CIFAR-10 ResNet-20 at M = 32 by factors
of 2.6 to 5 in the means of deeper layers, and 1.1 in the first layer.
"""

from itertools import chain

import torch
from torch import nn

from batchbayes._common.checks import whole_number
from batchbayes._common.progress import progress
from batchbayes.batches import Batches, chunks, first_of, input_stream, require_size
from batchbayes.inputs import Picker, require_finite
from batchbayes.methods.batchnorm.collect import example_moments
from batchbayes.methods.batchnorm.condition import warn_of_condition
from batchbayes.methods.batchnorm.fit import require_center
from batchbayes.methods.batchnorm.omega import running_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select, find_sites, require_running
from batchbayes.network import Output, as_network


def clt_bn(
    model: nn.Module,
    batches: Batches,
    *,
    batch_size: int,
    center: Center = "batches",
    sites: Select = None,
    inputs: Picker = None,
    output: Output = None,
) -> BatchNormPosterior:
    """Fit a factorised Gaussian by the central limit theorem, for any batch size M, from one pass over the data.

    Batches may have any size, because only single examples count. The network runs as it is, with its running
    statistics. The other arguments are those of `mcbn`.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> clt_bn(network, torch.randn(100, 2), batch_size=10)
    BatchNormPosterior(clt_bn on Sequential: 1 site, 16 statistics, 1 row, batch size 10, centred on batches)
    """
    require_size(float("inf"), whole_number("batch_size", batch_size, least=None))
    require_center(center)
    network, stream = as_network(model, output), input_stream(batches, inputs)
    first = first_of(stream)
    found, idle = find_sites(network, first, sites)
    where = "at every site: clt_bn runs the network as it is"
    require_running(found, where, fix="use stochastic_bn, which reads mini-batches")
    warn_of_condition(network.module, found)
    running, data = running_omega(found), progress(chunks(chain([first], stream), None), "population moments")
    moments = example_moments(network, found, data, idle)
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
    fixed = (network, found, own, spread[None], float(batch_size), "clt_bn", center, "factorised")
    return BatchNormPosterior(*fixed, idle=idle)
