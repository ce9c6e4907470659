r"""How many weights a posterior needs, and how few bits each of them.

Weights whose mean is zero can be left out. For the others, rounding to a grid of step $\Delta$ adds an error of
variance $\Delta^2/12$. As long as it is below the variance of the posterior, rounding is noise that the network was
trained to bear. So each layer gets the step $\Delta = \sqrt{12 / mean_i(\sigma_i^{-2})}$ over the weights that are not
zero, by which the error in units of each weight's own spread is 1 on average, and as many bits as its range needs. The
step is at most the root mean square of the means: a coarser one would not add noise to them, but wipe them out.

Reference: Louizos, Ullrich, Welling, "Bayesian Compression for Deep Learning", NIPS 2017.
"""

import math
import warnings

import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.family import GaussianWeights
from batchbayes.methods.weights.posterior import WeightsPosterior

MOST_BITS = 24
"""The bits of the fraction of a float32, about."""


def sparsity(posterior: WeightsPosterior) -> dict[str, float]:
    """Return the share of zeros among the means of each random weight, by its name."""
    means = {name: given.mean for name, given in posterior.distributions.items()}
    return {name: 1 - int(mean.count_nonzero()) / max(1, mean.numel()) for name, mean in means.items()}


def compression(posterior: WeightsPosterior) -> float:
    """Return how many weights there are for each one that is not zero, over all random weights."""
    means = [given.mean for given in posterior.distributions.values()]
    return sum(mean.numel() for mean in means) / max(1, sum(int(mean.count_nonzero()) for mean in means))


def sparse_weights(posterior: WeightsPosterior) -> dict[str, Tensor]:
    """Return the means of all random weights as sparse CSR matrices (outputs, inputs and kernel), by name.

    >>> from torch import nn
    >>> from batchbayes.methods.weights.noisy import noisy
    >>> from batchbayes.methods.weights.sparse import SparseVD
    >>> network = nn.Sequential(nn.Linear(4, 2))
    >>> sparse_weights(noisy(network, SparseVD()).posterior())["0.weight"].layout
    torch.sparse_csr
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return {name: given.mean.flatten(1).to_sparse_csr() for name, given in posterior.distributions.items()}


def silent_outputs(posterior: WeightsPosterior) -> dict[str, Tensor]:
    """Return for each random weight which neurons or filters have no weight left, bool (outputs,), by name.

    Such a neuron gives its bias for every input, so that it can be folded into the next layer and left out.
    """
    return {name: given.mean.flatten(1).count_nonzero(1) == 0 for name, given in posterior.distributions.items()}


def bits_needed(posterior: WeightsPosterior) -> dict[str, int]:
    """Return the bits for each number of each random weight, by name."""
    return {name: _grid(given, name)[0] for name, given in posterior.distributions.items()}


def rounded_means(posterior: WeightsPosterior) -> dict[str, Tensor]:
    """Return a state dict for the user's network, with random weights rounded to as many bits as they need."""
    given = posterior.distributions
    steps = {name: _grid(each, name)[1] for name, each in given.items()}
    return posterior.state_dict_with({n: torch.round(given[n].mean / step) * step for n, step in steps.items()})


def _grid(given: object, name: str) -> tuple[int, float]:
    """Return the number of bits and the step of a weight."""
    if not isinstance(given, GaussianWeights):
        raise BatchbayesError("Gaussian weights", f"{name}, a {type(given).__name__}", "use a Gaussian family")
    kept = given.mean != 0
    if not bool(kept.any()):
        return 0, 1.0
    largest = float(given.mean.abs().max())
    borne = 12 / float((1 / given.variance[kept]).mean())
    step = math.sqrt(min(borne, float(given.mean[kept].square().mean())))
    levels = 2 * math.floor(largest / step + 0.5) + 1 if step > 0 else math.inf
    bits = math.ceil(math.log2(levels)) if levels < 2**MOST_BITS else MOST_BITS
    return bits, max(step, largest / 2 ** (MOST_BITS - 1))
