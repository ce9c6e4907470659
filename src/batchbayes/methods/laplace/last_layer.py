r"""The Laplace approximation of the last layer.

What is random: the weights W (K, P) of the last linear layer, with its bias.
q(W): $N(W^*, (H + \delta I)^{-1})$, where $W^*$ are the trained weights, H is the curvature of the log-likelihood of
the training data (see `curvature.py`) and $\delta$ the precision of a Gaussian prior.
Cost: fitting is one pass over the training data and one eigendecomposition, of a (K P, K P) matrix, or of a (K, K) and
a (P, P) matrix where the former is too large. A prediction in closed form, or any number of draws with
`engine="linear"`, costs one forward pass.
Reference: MacKay, "The Evidence Framework Applied to Classification Networks", Neural Computation 4, 1992; Daxberger et
al., "Laplace Redux", NeurIPS 2021.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.minimise import minimise
from batchbayes._common.progress import progress
from batchbayes.batches import Batches, Picker, input_stream, labelled_stream
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Gaussian, TargetLikelihood, require_likelihood
from batchbayes.methods.candidates import Candidate, Setting
from batchbayes.methods.laplace.curvature import curvature_of, output_hessians
from batchbayes.methods.laplace.features import as_rows, find_last_layer
from batchbayes.methods.laplace.posterior import LaplacePosterior
from batchbayes.methods.table import Method
from batchbayes.network import Output, as_network

MOST_FULL = 4096
"""Up to this many weights the curvature is kept whole. Its eigendecomposition then takes less than a minute."""
HELD_OUT_DRAWS = 64
"""Draws by which classes are predicted when the prior precision is chosen on held-out data."""
LOW, HIGH = -10.0, 16.0
"""Limits for the natural logarithm of a prior precision that is searched for."""


def last_layer_laplace(
    model: nn.Module,
    batches: Batches,
    likelihood: TargetLikelihood[Any],
    *,
    prior_precision: float | None = None,
    held_out: Batches | None = None,
    layer: str | None = None,
    inputs: Picker = None,
    targets: Picker = None,
    output: Output = None,
) -> LaplacePosterior:
    """Fit a Gaussian to the posterior of the last layer.

    Args:
        model: any network that ends in a linear layer. It is not changed.
        batches: training inputs, as they look at prediction time. Targets are not needed.
        likelihood: `gaussian(precision=...)`, `categorical()` or `bernoulli()`.
        prior_precision: delta. By default it is chosen on `held_out`, or by the marginal likelihood if there is none.
        held_out: labelled batches (x, y) on which the prior precision is chosen, by the log-likelihood.
        layer: the name of the last layer, if it is not found by itself.
        inputs: where the inputs are in a batch, if they are not first.
        targets: where the targets are in a batch of `held_out`, if they are not last.
        output: which output counts, if the network returns several.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> from batchbayes.likelihoods import gaussian
    >>> last_layer_laplace(network, torch.randn(100, 2), gaussian(precision=10.0), prior_precision=1.0)
    LaplacePosterior(Sequential: 9 x 1 weights of '2', Kronecker curvature, prior precision 1)
    """
    require_likelihood(likelihood)
    network = as_network(model, output)
    stream = (batch for batch in input_stream(batches, inputs) if len(batch))
    first = next(stream, None)
    if first is None:
        raise BatchbayesError(expected="at least one training example", got="none", fix="check the data")
    last = find_last_layer(network, first.to(network.device), layer)
    outputs, features = last.mean.shape
    full = outputs * features <= MOST_FULL and not isinstance(likelihood, Gaussian)  # for which Kronecker is exact
    runs = (last.run(batch.to(network.device)) for batch in progress(chain([first], stream), "curvature"))
    seen = ((found, output_hessians(likelihood, as_rows(made).double().cpu())) for found, made in runs)
    posterior = LaplacePosterior(last, curvature_of(seen, outputs, features, full=full), 1.0)
    if prior_precision is not None:
        return posterior.at_prior_precision(prior_precision)
    if held_out is not None:
        return _best(posterior, _held_out_loss(posterior, labelled_stream(held_out, inputs, targets), likelihood))
    return _best(posterior, lambda precision: -log_evidence(posterior, precision))


def log_evidence(posterior: LaplacePosterior, prior_precision: float) -> float:
    r"""Return the part of the log marginal likelihood that depends on the prior precision.

    $\frac12\left(D\log\delta - \delta\|W^*\|^2 - \log\det(H + \delta I)\right)$. The log-likelihood of the training
    data at $W^*$ is left out.
    """
    values, weights = posterior.curvature.eigenvalues, posterior.layer.mean
    delta = torch.tensor(prior_precision, dtype=torch.float64)
    return float(0.5 * (delta.log() - (values + delta).log()).sum() - 0.5 * delta * weights.square().sum())


def _best(posterior: LaplacePosterior, loss: Callable[[float], float]) -> LaplacePosterior:
    """Return the posterior under the prior precision with the lowest loss."""
    found, _ = minimise(lambda log_precision: loss(math.exp(log_precision)), LOW, HIGH)
    return posterior.at_prior_precision(math.exp(found))


def _held_out_loss(
    posterior: LaplacePosterior, held_out: Iterable[tuple[Any, Tensor]], likelihood: TargetLikelihood[Any]
) -> Callable[[float], float]:
    """Return the negative log-likelihood of held-out inputs and targets as a function of the prior precision.

    It is exact for real targets. Classes are predicted by some draws, of the same random numbers for all precisions.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for inputs, labels in held_out:
        features, outputs = posterior.layer.run(inputs.to(posterior.device))
        outputs = as_rows(outputs).double().cpu()
        parts.append((features, outputs, likelihood.fitting(outputs[None], labels)))
    if not parts:
        raise BatchbayesError(expected="at least one batch as held_out=", got="none", fix="check the data")
    features, means, targets = (torch.cat(column) for column in zip(*parts, strict=True))

    def exact(prior_precision: float) -> float:
        variance = posterior.curvature.output_covariance(features, prior_precision).diagonal(dim1=1, dim2=2)
        total = (variance + likelihood(means[None]).variance[0]).sqrt()
        return float(-torch.distributions.Normal(means, total).log_prob(targets).mean())

    def by_draws(prior_precision: float) -> float:
        deviations = posterior.at_prior_precision(prior_precision).deviations(0, range(HELD_OUT_DRAWS))
        each = likelihood(means + features @ deviations.mT).log_prob(targets)  # (S, n, ...)
        return float(math.log(HELD_OUT_DRAWS) - each.logsumexp(0).mean())

    return exact if isinstance(likelihood, Gaussian) else by_draws


def laplace_candidates(method: Method, setting: Setting) -> list[Candidate]:
    """Return what an assessment compares: the last layer with a prior that suits calibration data."""
    posterior = method(setting.model, setting.train, setting.likelihood, held_out=setting.calibration)
    assert isinstance(posterior, LaplacePosterior)
    return [
        Candidate(
            name=method.label,
            about=f"mean of {setting.num_samples} draws of the last layer, from a Gaussian around the trained weights",
            posterior=posterior,
            advice=f"Average {setting.num_samples} draws of the last layer",
            rank=2,
            settings={"prior_precision": posterior.prior_precision},
        )
    ]
