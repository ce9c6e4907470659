r"""How few bits a weight needs, given how uncertain it is.

Rounding to a grid of step $\Delta$ adds an error of variance $\Delta^2/12$. As long as it is below the variance of the
posterior, rounding is noise that the network was trained to bear. So each layer gets the step
$\Delta = \sqrt{12\, mean_i(\sigma_i^2)}$ over the weights that are not zero, and as many bits as its range needs.

Reference: Louizos, Ullrich, Welling, "Bayesian Compression for Deep Learning", NIPS 2017.
"""

import math

import torch
from torch import Tensor

from batchbayes.copying import plain_name
from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.family import GaussianWeights
from batchbayes.methods.weights.posterior import WeightsPosterior

MOST_BITS = 24
"""The bits of the fraction of a float32, about."""


def bits_needed(posterior: WeightsPosterior) -> dict[str, int]:
    """Return the bits for each number of each random weight, by name."""
    return {name: _grid(given, name)[0] for name, given in posterior.distributions.items()}


def rounded_means(posterior: WeightsPosterior) -> dict[str, Tensor]:
    """Return a state dict for the user's network, with random weights rounded to as many bits as they need."""
    steps = {name: _grid(given, name)[1] for name, given in posterior.distributions.items()}
    state = posterior.means()
    for name in state:
        if step := steps.get(plain_name(name)):
            state[name] = torch.round(state[name] / step) * step
    return state


def _grid(given: object, name: str) -> tuple[int, float]:
    """Return the number of bits and the step of a weight."""
    if not isinstance(given, GaussianWeights):
        raise BatchbayesError("Gaussian weights", f"{name}, a {type(given).__name__}", "use a Gaussian family")
    kept = given.mean != 0
    if not bool(kept.any()):
        return 0, 1.0
    largest = float(given.mean.abs().max())
    step = math.sqrt(12 * float(given.variance[kept].mean()))
    levels = 2 * math.floor(largest / step + 0.5) + 1 if step > 0 else math.inf
    bits = math.ceil(math.log2(levels)) if levels < 2**MOST_BITS else MOST_BITS
    return bits, max(step, largest / 2 ** (MOST_BITS - 1))
