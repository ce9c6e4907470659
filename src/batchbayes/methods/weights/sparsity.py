"""How many weights a posterior needs: sparsity, the compression ratio, and sparse weights to export."""

import warnings

from torch import Tensor

from batchbayes.methods.weights.posterior import WeightsPosterior


def sparsity(posterior: WeightsPosterior) -> dict[str, float]:
    """Return the share of zeros among the means of each random weight, by its name."""
    means = {name: given.mean for name, given in posterior.distributions.items()}
    return {name: 1 - int(mean.count_nonzero()) / mean.numel() for name, mean in means.items()}


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
