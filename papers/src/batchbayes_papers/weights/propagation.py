r"""Which random weights may be replaced by their means, which are not needed, and how few bits the others need.

Mean propagation: the loss at a draw $w = \mu + \sigma\epsilon$ is, to second order in one weight, larger than at its
mean by $\kappa/2 \cdot \epsilon^2$, with $\kappa = \sigma^2 |d^2 NLL / dw^2|$ at the means, summed over the training
set. Where kappa is small, noise or no noise is nearly the same, as far as the expansion holds. It does not hold behind
a ReLU that is off at the means: all derivatives are zero there, and kappa with them, although a draw may switch the
unit on. So the curvature can also be averaged over draws of the weights. Where kappa is large, the network is far from
linear within the spread of this weight, and needs its noise.

Few bits: weights whose mean is zero can be left out. For the others, rounding to a grid of step $\Delta$ adds an error
of variance $\Delta^2/12$. As long as it is below the variance of the posterior, rounding is noise that the network was
trained to bear. So each layer gets the step $\Delta = \sqrt{12 / mean_i(\sigma_i^{-2})}$ over the weights that are not
zero, by which the error in units of each weight's own spread is 1 on average, and as many bits as its range needs. The
step is at most the root mean square of the means: a coarser one would not add noise to them, but wipe them out.

References: Neklyudov et al., "Variance Networks: When Expectation Does Not Meet Your Expectations", ICLR 2019; Louizos,
Ullrich, Welling, "Bayesian Compression for Deep Learning", NIPS 2017.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from batchbayes import BatchbayesError, WeightsPosterior
from batchbayes.methods.weights.family import GaussianWeights
from batchbayes.methods.weights.sites import Site
from batchbayes.methods.weights.variational import negative_log_probability, targets_of
from batchbayes.tools import GlobalStream, TargetLikelihood, generator, pick_inputs, unknown_name, whole_number

Method = Literal["exact", "gauss-newton", "hutchinson"]
LARGEST_EXACT = 5000
"""Weights of a layer up to which an exact diagonal is computed: it takes one backward pass for each of them."""
MOST_BITS = 24
"""The bits of the fraction of a float32, about."""


def curvatures(
    posterior: WeightsPosterior,
    batches: Iterable[Any],
    likelihood: TargetLikelihood[Any],
    *,
    method: Method = "hutchinson",
    num_probes: int = 10,
    num_draws: int = 0,
    seed: int = 0,
) -> dict[str, Tensor]:
    r"""Return the diagonal of the Hessian of the NLL, summed over all batches, by name of the weight.

    Args:
        posterior: the random weights.
        batches: labelled batches (x, y).
        likelihood: p(y | f).
        method: "exact" for layers of at most 5,000 weights. "gauss-newton" for linear layers of a network whose other
            layers are piecewise linear (ReLU, max-pooling): there it is the Hessian's diagonal. It costs `num_probes`
            backward passes for each batch, or one for each class, and is the one to use for large layers.
            "hutchinson" for all others: $E[v \circ Hv]$ with random signs v costs `num_probes` double backward passes
            and is unbiased. But with few probes its noise hides small curvatures.
        num_probes: drawn targets of the Gauss-Newton matrix, or probes of Hutchinson's estimate. With 0 the former is
            exact: the sum over all classes. A network that is sure of its answers rarely draws another class, so few
            drawn targets miss what matters most.
        num_draws: draws of the weights, over which the diagonal is averaged. Without them it is that at the means.
        seed: sets the draws or signs.
    """
    if method not in get_args(Method):
        raise unknown_name("a method", method, get_args(Method))
    whole_number("num_probes", num_probes, 0 if method == "gauss-newton" else 1)
    whole_number("num_draws", num_draws, 0)
    means = {name: given.mean for name, given in posterior.distributions.items()}
    large = [name for name, mean in means.items() if mean.numel() > LARGEST_EXACT]
    if method == "exact" and large:
        raise BatchbayesError(
            expected=f"at most {LARGEST_EXACT} weights in each layer, for exact diagonals",
            got=f"{means[large[0]].numel()} in {large[0]}",
            fix='use method="hutchinson"',
        )
    batches, total = list(batches), {name: torch.zeros_like(mean) for name, mean in means.items()}
    for weights in [posterior.weights(seed, index) for index in range(num_draws)] or [means]:
        if method == "gauss-newton":
            found = _gauss_newton(posterior, weights, batches, likelihood, num_probes, seed)
        else:
            found = _hessian(posterior, weights, batches, likelihood, num_probes if method == "hutchinson" else 0, seed)
        for name, values in found.items():
            total[name] += values / max(1, num_draws)
    return total


def _hessian(
    posterior: WeightsPosterior,
    weights: Mapping[str, Tensor],
    batches: Iterable[Any],
    likelihood: TargetLikelihood[Any],
    num_probes: int,
    seed: int,
) -> dict[str, Tensor]:
    """Return the diagonal of the Hessian at some weights by double backward passes: exact without probes."""
    own = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    found = {name: torch.zeros_like(weight) for name, weight in own.items()}
    source = generator(seed, "probes")
    for batch in batches:
        outputs = posterior.network(pick_inputs(batch).to(posterior.device), tensors=own)
        loss = negative_log_probability(likelihood, outputs, targets_of(batch))
        gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        for (name, weight), gradient in zip(own.items(), gradients, strict=True):
            if num_probes:
                found[name] += _hutchinson(weight, gradient, num_probes, source)
            else:
                found[name] += _exact_diagonal(weight, gradient)
    return {name: values.detach() for name, values in found.items()}


def _exact_diagonal(mean: Tensor, gradient: Tensor) -> Tensor:
    rows = [torch.autograd.grad(g, mean, retain_graph=True)[0].flatten()[i] for i, g in enumerate(gradient.flatten())]
    return torch.stack(rows).view_as(mean)


def _hutchinson(mean: Tensor, gradient: Tensor, num_probes: int, source: torch.Generator) -> Tensor:
    total = torch.zeros_like(mean)
    for _ in range(num_probes):
        signs = torch.randn(mean.shape, generator=source).sign().to(mean)
        total += signs * torch.autograd.grad(gradient, mean, signs, retain_graph=True)[0]
    return total / num_probes


def _gauss_newton(
    posterior: WeightsPosterior,
    weights: Mapping[str, Tensor],
    batches: Iterable[Any],
    likelihood: TargetLikelihood[Any],
    num_targets: int,
    seed: int,
) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher matrix: for each example the expected square of x_i times the gradient of the
    output j of the layer, over targets that the network itself draws, or over all classes."""
    if odd := [site.name for site in posterior.sites if site.is_convolution or not site.is_plain]:
        raise _not_linear(odd[0])
    found = {name: torch.zeros_like(given.mean) for name, given in posterior.distributions.items()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watched(site: Site, inputs: Tensor) -> Tensor:
        if inputs.ndim != 2:
            raise _not_linear(f"{site.name} with inputs of shape {tuple(inputs.shape)}")
        if site.name in seen:
            raise _not_linear(f"{site.name}, which is used twice")
        outputs = site.product(inputs, weights[site.name], site.bias).requires_grad_()
        seen[site.name] = inputs.detach(), outputs
        return outputs

    instead = {site.module_name: partial(watched, site) for site in posterior.sites}
    with GlobalStream(seed):
        for batch in batches:
            seen.clear()
            outputs = posterior.network(pick_inputs(batch).to(posterior.device), instead=instead)
            targets = likelihood(outputs[None])
            for drawn, share in _weighted_targets(targets, num_targets):
                loss = -(share.sqrt() * targets.log_prob(drawn)).sum()
                gradients = torch.autograd.grad(loss, [own for _, own in seen.values()], retain_graph=True)
                for (name, (inputs, _)), gradient in zip(seen.items(), gradients, strict=True):
                    found[name].addmm_(gradient.square().T, inputs.square())
    return found


def _weighted_targets(targets: Any, num_targets: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield targets of all examples with their weights in an expectation: draws, or all classes."""
    for _ in range(num_targets):
        drawn = targets.sample().detach()
        yield drawn, torch.full((), 1 / num_targets)
    if not num_targets:
        for label in targets.enumerate_support():
            yield label, targets.log_prob(label).exp().detach()


def _not_linear(got: str) -> BatchbayesError:
    expected = "plain linear layers that run once with inputs (N, features), for the Gauss-Newton diagonal"
    return BatchbayesError(expected, got, 'use method="hutchinson"')


def kappas(posterior: WeightsPosterior, curvature: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return kappa of each random weight, by name, from its curvature. Weights must have a variance."""
    found = {}
    for name, given in posterior.distributions.items():
        variance = getattr(given, "variance", None)
        if variance is None:
            raise BatchbayesError("weights with a variance", type(given).__name__, "use a Gaussian family")
        found[name] = variance * curvature[name].abs()
    return found


def partly_drawn(posterior: WeightsPosterior, noisy: Mapping[str, Tensor], seed: int, index: int) -> dict[str, Tensor]:
    """Return the weights of draw `index`, by name, of which only some are drawn, and the others are their means.

    Args:
        posterior: the random weights.
        noisy: which weights are drawn, bool in the shape of each weight, by name.
        seed: the seed of the draw.
        index: the number of the draw.
    """
    drawn = posterior.weights(seed, index)
    means = {name: given.mean for name, given in posterior.distributions.items()}
    return {name: torch.where(noisy[name], drawn[name], mean) for name, mean in means.items()}


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
