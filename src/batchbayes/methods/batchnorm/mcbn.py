r"""Monte Carlo batch normalisation.

What is random: the statistics by which every batch-norm layer normalises, all layers jointly.
q(omega): the empirical distribution of the statistics of R training mini-batches of M examples.
Cost: fitting is R forward passes of M examples; a draw is a copy of one row.
Reference: Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018.
Where we differ: a draw is shared by all test inputs (the same marginals, far cheaper); the centre may be the
network's own running statistics, which keeps its answer and takes only the spread from the batches.
"""

from itertools import chain, islice
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from batchbayes.batches import Batches, Picker, mini_batches, require_finite
from batchbayes.errors import BatchbayesError, warn
from batchbayes.functional import Network, as_network
from batchbayes.methods.batchnorm.collect import collect_omegas
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.query import QueryInBatchPosterior
from batchbayes.methods.batchnorm.sites import Select, Site, find_sites
from batchbayes.methods.batchnorm.statistics import is_mean, running_omega
from batchbayes.progress import progress
from batchbayes.rng import seeded_globals

DRIFT_LIMIT = 1.0
"""How many standard deviations of a draw the mean prediction may lie from the network's own, unremarked."""
DRIFT_EXAMPLES, DRIFT_DRAWS = 64, 16
"""The comparison costs this many forward passes of this many examples."""


@overload
def mcbn(
    model: nn.Module, batches: Batches, *, include_query: Literal[True], **options: Any
) -> QueryInBatchPosterior: ...


@overload
def mcbn(
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    center: Center = "batches",
    batch_size: int | None = None,
    training_batch_size: int | None = None,
    sites: Select = None,
    dropout: bool = False,
    include_query: Literal[False] = False,
    inputs: Picker = None,
    output: str | int | None = None,
) -> BatchNormPosterior: ...


def mcbn(  # pyright: ignore[reportInconsistentOverload]
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    center: Center = "batches",
    batch_size: int | None = None,
    training_batch_size: int | None = None,
    sites: Select = None,
    dropout: bool = False,
    include_query: bool = False,
    inputs: Picker = None,
    output: str | int | None = None,
) -> BatchNormPosterior | QueryInBatchPosterior:
    """Fit MCBN to a trained network: gather the statistics of training mini-batches.

    Args:
        model: any network with batch normalisation. It is not changed.
        batches: training data **with the training-time transforms**: a DataLoader, an iterable of x or (x, y), or a
            tensor of inputs, from which batches are drawn. A list or generator is read once, a loader repeatedly.
        num_samples: the number of mini-batches R. Prediction may draw more: the rows then come round again.
        seed: for the order of the data, and for augmentations that use the global generators.
        center: "batches" scatters around the mean of the batch statistics (the paper); "running" scatters around the
            network's own running statistics, which keeps its mean answer.
        batch_size: M, by default that of the loader. Batches of another size are cut and joined to M.
        training_batch_size: what the network was trained with: warns if M differs.
        sites: which batch-norm layers are random: the first k, names or patterns such as "layer1.*", or a function
            of (name, layer). The others keep their running statistics.
        dropout: gather the statistics with dropout active, as it was in training. Prediction never drops.
        include_query: predict each input inside its own batch of M - 1 training examples: the exact predictive,
            M times as slow, for research.
        inputs: where the inputs are in a batch, if not first: a key, a position or a function.
        output: which output counts, if the network returns a tuple or a dict.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> posterior = mcbn(network, torch.randn(100, 2), batch_size=10, num_samples=32)
    >>> posterior
    BatchNormPosterior(mcbn on Sequential: 1 sites, 16 statistics, 32 rows, batch size 10, centred on batches)
    """
    if num_samples < 1:
        raise BatchbayesError(expected="at least one draw", got=f"num_samples={num_samples}", fix="pass 1 or more")
    if center not in ("batches", "running"):
        raise BatchbayesError(expected='center="batches" or "running"', got=repr(center), fix="choose one of them")
    network = as_network(model, output)
    require_finite_weights(network)
    with seeded_globals(seed):
        size, stream = mini_batches(batches, batch_size, picker=inputs, seed=seed)
        if training_batch_size is not None and training_batch_size != size:
            warn(
                f"the statistics are those of batches of {size}, but the network was trained with batches of "
                f"{training_batch_size}: the spread is off by a factor of {(training_batch_size / size) ** 0.5:.2f}. "
                f"Pass batch_size={training_batch_size}."
            )
        first = next(stream)
        found = find_sites(network, first[:2].to(network.device()), sites)
        stream = islice(chain([first], stream), num_samples)
        if include_query:
            companions = torch.stack([batch[1:] for batch in stream])  # (R, M - 1, ...)
            return QueryInBatchPosterior(network, found, companions)
        omegas = collect_omegas(network, found, stream, dropout=dropout)
        rows = torch.stack(list(progress(omegas, "batch statistics", num_samples)))  # (R, D)
    mean = rows.mean(0)
    middle = mean if center == "batches" else running_omega(found)
    posterior = BatchNormPosterior(network, found, middle, rows - mean, float(size), "mcbn", center)
    require_spread(posterior, num_samples)
    if message := drift_message(posterior, first):
        warn(message)
    return posterior


def require_finite_weights(network: Network) -> None:
    """Refuse a network whose weights hold NaN or infinity, by the name of the first such."""
    for name, parameter in network.module.named_parameters():
        require_finite(parameter.detach(), f"the weights ({name})")


def require_spread(posterior: BatchNormPosterior, asked: int) -> None:
    """Refuse deviations that are all zero up to rounding, unless a single draw was asked for."""
    mean = is_mean(posterior.sites)
    relative = posterior.deviations.clone()
    relative[:, mean] /= posterior.center[~mean].exp()  # shifts of the mean, in standard deviations
    if asked > 1 and relative.abs().max() < 100 * torch.finfo(relative.dtype).eps:
        raise BatchbayesError(
            expected="mini-batches with different statistics",
            got=f"zero spread at every site over {len(relative)} mini-batches of {posterior.batch_size:g}",
            fix="pass several batches of different examples: when one batch is the whole training set, "
            "every draw is the same network",
        )


@torch.no_grad()
def drift_message(posterior: BatchNormPosterior, batch: Tensor) -> str | None:
    """What to say when the mean prediction lies beside the network's own by more than the noise; else None.

    Batches that the network was not trained on (as a rule: without the training-time transforms) shift the statistics
    of every draw the same way. Networks that never saw training data have nothing to compare with.
    """
    if posterior.centered_on == "running" or not all(is_settled(site) for site in posterior.sites):
        return None
    network, sample = posterior.network, batch[:DRIFT_EXAMPLES].to(posterior.network.device())
    own = network(sample)
    draws = torch.stack([posterior.draw(0, s)(sample) for s in range(min(DRIFT_DRAWS, len(posterior.deviations)))])
    if len(draws) < 8:  # too few to tell the noise
        return None
    spread = draws.var(0).mean()  # mean over examples and outputs, as below
    shift = (draws.mean(0) - own).square().mean() - spread / len(draws)  # less what the mean's own noise explains
    ratio = float((shift.clamp_min(0) / spread).sqrt())
    if ratio <= DRIFT_LIMIT:
        return None
    return (
        f"the mean prediction lies {ratio:.1f} standard deviations of a draw from the network's own: the batches do "
        "not look like those it was trained on. Do they pass through the same transforms as in training (crops, flips, "
        'scaling)? If so, or if they cannot be had, use center="running", which keeps the network\'s own answer and '
        "takes only the spread from the batches."
    )


def is_settled(site: Site) -> bool:
    """Whether a site's running statistics tell of its training data.

    They do not while they are those that it was made with, nor in the first few batches of a moving average. A counter
    at zero beside other statistics is one that a file of weights left out.
    """
    mean, variance, seen = site.layer.running_mean, site.layer.running_var, site.layer.num_batches_tracked
    if mean is None or variance is None or not (mean.any() or (variance != 1).any()):
        return False
    return seen is None or int(seen) == 0 or int(seen) * (site.layer.momentum or 1.0) >= 5
