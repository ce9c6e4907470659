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

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes._common.checks import whole_number
from batchbayes._common.progress import progress
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.facts import with_facts
from batchbayes.methods.batchnorm.like_training import warn_of_condition
from batchbayes.methods.batchnorm.omega import as_double, require_all, running_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select, Site, find_sites, refusing, require_running
from batchbayes.methods.batchnorm.statistics import noting
from batchbayes.network.function import Network, Output, as_network
from batchbayes.network.inputs import Picker, require_finite
from batchbayes.network.source import Batches, Source, cut, first_of, require_size
from batchbayes.network.tap import tapping


@checked
def clt_bn(
    model: nn.Module,
    batches: Batches,
    *,
    batch_size: int,
    center: Center | None = None,
    sites: Select = None,
    inputs: Picker = None,
    output: Output = None,
) -> BatchNormPosterior:
    """Fit a factorised Gaussian by the central limit theorem, for any batch size M, from one pass over the data.

    Batches may have any size, because only single examples count. The network runs as it is, with its running
    statistics. The other arguments are those of `mcbn`.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> clt_bn(network, torch.randn(100, 2), batch_size=10)
    BatchNormPosterior(clt_bn on Sequential: 1 site, 16 statistics, 1 row, batch size 10, centred on running)
    """
    require_size(float("inf"), whole_number("batch_size", batch_size, least=None))
    network, stream = as_network(model, output, inputs), Source(batches, inputs).inputs()
    first = first_of(stream)
    found, idle, outputs, *_ = find_sites(network, first, sites)
    where = "at every site: clt_bn runs the network as it is"
    require_running(found, where, fix="use stochastic_bn, which reads mini-batches")
    warn_of_condition(network.module, found)
    pieces = (piece for examples in chain([first], stream) for piece in cut(examples, None, 2**21))
    running, data = running_omega(found), progress(noting(copied := [], pieces), "population moments")
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
    fixed = (network, found, own, spread[None], float(batch_size), "clt_bn", center or "running", "factorised")
    posterior = BatchNormPosterior(*fixed, idle=idle, num_examples=moments[0].num_examples)
    return with_facts(posterior, copied, outputs.ndim > 2)


class ExampleMoments(NamedTuple):
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
    num_examples: int
    """How many examples there were."""


def example_moments(
    network: Network, sites: Sequence[Site], batches: Iterable[Any], idle: Sequence[str] = ()
) -> list[ExampleMoments]:
    """Return population moments up to the fourth of every site, from one pass of the network as it is."""
    layers = {site.name: site.layer for site in sites}
    count, size = 0, 0
    sums = {name: torch.zeros((), dtype=torch.float64) for name in layers}

    def see(name: str, inputs: Tensor) -> None:
        if len(inputs) % size:
            raise BatchbayesError(
                expected="the same number of rows for every example",
                got=f"{len(inputs)} rows at {name} for {size} examples",
                fix="use stochastic_bn, or leave this layer out with sites=",
            )
        values = as_double(inputs.detach())
        values = (values if values.ndim > 2 else values.unsqueeze(2)).flatten(2) - _origin(layers[name])
        values = values.unflatten(0, (size, -1)).transpose(1, 2).flatten(2)  # (n, C, P)
        a, b = values.mean(2), values.square().mean(2)  # (n, C)
        sums[name] = sums[name] + torch.stack([a, b, a * a, a * b, b * b]).sum(1)  # (5, C)

    with torch.no_grad(), tapping(network, layers, see, before=refusing(idle)) as run:
        for batch in batches:
            size = len(batch)
            count += size
            require_all(sites, run(batch).seen)
    return [_moments(sums[name].cpu() / count, _origin(layer).cpu(), count) for name, layer in layers.items()]


def _origin(layer: _BatchNorm) -> Tensor:
    """Return the running mean, (C, 1): moments are taken about it, so that little is lost to rounding."""
    assert layer.running_mean is not None
    return as_double(layer.running_mean.detach())[:, None]


def _moments(expected: Tensor, origin: Tensor, count: int) -> ExampleMoments:
    """Compute moments from E[a], E[b], E[a^2], E[ab], E[b^2] about `origin`: q = b - 2 m a + m^2 with m = E[a]."""
    a, b, aa, ab, bb = expected
    var_a, cov, var_b = aa - a * a, ab - a * b, bb - b * b
    square_var = (var_b - 4 * a * cov + 4 * a * a * var_a).clamp_min(0)
    return ExampleMoments(origin[:, 0] + a, b - a * a, var_a.clamp_min(0), square_var, count)
