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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common.checks import finite_number
from batchbayes._common.progress import progress
from batchbayes._common.rng import normals
from batchbayes._common.tune import tune
from batchbayes.engines.check import Linearity
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Gaussian, TargetLikelihood, require_likelihood
from batchbayes.methods.candidates import Candidate, Request
from batchbayes.methods.laplace.curvature import (
    MATRICES,
    FullCurvature,
    KroneckerCurvature,
    LastLayer,
    as_rows,
    curvature_of,
    find_last_layer,
)
from batchbayes.methods.table import Method
from batchbayes.network.function import Function, Network, Output, as_network, modules_by_name
from batchbayes.network.inputs import Picker
from batchbayes.network.source import Batches, Source
from batchbayes.posterior import Posterior
from batchbayes.state import Codec, File, coded

MOST_FULL = 4096
"""Up to this many weights the curvature is kept whole. Its eigendecomposition then takes less than a minute."""
HELD_OUT_DRAWS = 64
"""Draws by which classes are predicted when the prior precision is chosen on held-out data."""
LOW, HIGH = -10.0, 16.0
"""Limits for the natural logarithm of a prior precision that is searched for."""


def _layer_from_file(file: File) -> LastLayer:
    name, shape = file.header["layer"], file.header["shape"]
    layer = LastLayer(as_network(file.model, file.header["output"]), name)
    if name not in modules_by_name(layer.network.module, nn.Linear) or list(layer.mean.shape) != shape:
        raise BatchbayesError(
            expected=f"a network with a linear layer {name!r} of shape {shape}",
            got=f"{type(layer.network.module).__name__} without it",
            fix="build the same network, load its weights, and pass that",
        )
    return layer


_LAYER = Codec(
    lambda layer, _: ({"output": layer.network.output, "layer": layer.name, "shape": list(layer.mean.shape)}, {}),
    _layer_from_file,
)
_KINDS = {"full": FullCurvature, "kronecker": KroneckerCurvature}
_CURVATURE = Codec(
    lambda curvature, _: ({"curvature": curvature.kind.lower()}, dict(vars(curvature))),
    lambda file: _KINDS[file.header["curvature"]](**file.tensors),
)


@dataclass(frozen=True, eq=False)
class LaplacePosterior(Posterior):
    """Functions that differ in the weights of the last layer of one network."""

    kind: ClassVar[str] = "laplace"

    layer: LastLayer = field(metadata=coded(_LAYER))
    curvature: FullCurvature | KroneckerCurvature = field(metadata=coded(_CURVATURE))
    prior_precision: float

    @property
    def network(self) -> Network:  # type: ignore[override]
        return self.layer.network

    @property
    def linear(self) -> Self:  # type: ignore[override]
        return self

    def __repr__(self) -> str:
        outputs, features = self.layer.mean.shape
        return (
            f"{type(self).__name__}({self.network}: {features} x {outputs} weights of {self.layer.name!r}, "
            f"{self.curvature.kind} curvature, prior precision {self.prior_precision:.3g})"
        )

    def at_prior_precision(self, prior_precision: float) -> Self:
        """Return the posterior under another prior N(0, 1 / precision) for each weight."""
        return replace(
            self, prior_precision=finite_number("a prior precision", prior_precision, above=0, fix="try 1.0")
        )

    def deviations(self, seed: int, indices: Sequence[int]) -> Tensor:
        """Return how the weights of these draws deviate from those of the network, (s, K, P)."""
        shape = self.layer.mean.shape
        drawn = normals(seed, indices, shape.numel()).unflatten(1, shape)
        return self.curvature.deviations(drawn, self.prior_precision)

    def moves(self, features: Tensor, draws: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield how the outputs at features (n, P) move in each draw, (n, K), without making its weights."""
        shape, move = self.layer.mean.shape, self.curvature.moves(features, self.prior_precision)
        return (move(normals(seed, [index], shape.numel()).view(shape)) for seed, index in draws)

    def draw(self, seed: int, index: int) -> Function:
        """Return the network with the last layer of draw `index`."""
        shape = self.layer.mean.shape
        if shape.numel() <= MATRICES // 8:
            return self.function((self.layer.mean + self.deviations(seed, [index])[0]).flatten())
        drawn = normals(seed, [index], shape.numel()).view(shape)

        def function(inputs: Any) -> Tensor:  # the weights of many classes would cost more than what they do to inputs
            features, outputs = self.layer.run(inputs)
            move = self.curvature.moves(features, self.prior_precision)(drawn).view_as(outputs)
            return (outputs.double() + move.to(outputs.device)).to(outputs)

        return function

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return mean (n, K) and covariance (n, K, K) of the outputs, in closed form, from one forward pass.

        Outputs are linear in the weights, so they are Gaussian: $f \sim N(W\phi, \Phi^\top\Sigma\Phi)$ with
        $\Phi = I_K \otimes \phi$. In a regression the predictive is Gaussian too, with the noise added to the variance.
        """
        features, outputs = self.layer.run(inputs.to(self.device))
        return as_rows(outputs), self.curvature.output_covariance(features, self.prior_precision).to(outputs)

    def probit_probs(self, inputs: Tensor) -> Tensor:
        r"""Return class probabilities (n, K) by the probit formula, from one forward pass.

        $\mathrm{softmax}(f_k / \sqrt{1 + \pi\,\mathrm{Var} f_k / 8})$; MacKay, Neural Computation 4 (1992). It
        counts variance that all logits share, which changes no probability: under a wide posterior draws are better.
        """
        features, outputs = self.layer.run(inputs.to(self.device))
        variance = self.curvature.output_variance(features, self.prior_precision).to(outputs)
        return (as_rows(outputs) * (1 + math.pi / 8 * variance).rsqrt()).softmax(-1)

    # What the linear engine asks for. Here it is exact, and all draws cost one pass.

    is_linear: ClassVar[bool] = True

    def linearity(self, *, contrasts: bool) -> Linearity:
        return Linearity(1.0, 1.0, 0.0, of_information=contrasts)

    @property
    def center(self) -> Tensor:
        return self.layer.mean.flatten()

    num_axes, knows_classes = 0, False

    def leading_axes(self, rank: int) -> tuple[Tensor, float]:
        raise BatchbayesError("a posterior with observed rows", repr(self), 'use engine="sample"')

    def leading_tangents(self, inputs: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        raise BatchbayesError("a posterior with observed rows", repr(self), 'use engine="sample"')

    def function(self, omega: Tensor) -> Function:
        return self.layer.with_weights(omega.view(self.layer.mean.shape))

    def draw_together(self, seed: int, indices: Sequence[int]) -> Function:
        directions = self._directions(seed, indices)

        def drawn(inputs: Any) -> Tensor:
            outputs, moves = self.tangents(inputs, directions)
            return outputs + moves

        return drawn

    def deviation(self, seed: int, index: int) -> Tensor:
        return self.deviations(seed, [index]).flatten()

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor | None, Tensor]:
        return self._directions(seed, range(num_samples)), None, torch.arange(num_samples)

    def _directions(self, seed: int, indices: Sequence[int]) -> Tensor:
        """Return the deviations of draws, (s, K P); if they are many numbers, rows (seed, index, 1) that name draws.

        For 1,000 classes a draw has a million numbers and more.
        """
        if len(indices) * self.layer.mean.numel() > MATRICES:
            return torch.tensor([[seed, index, 1] for index in indices])
        return self.deviations(seed, indices).flatten(1)

    @torch.no_grad()
    def tangents(self, inputs: Tensor, directions: Tensor, *, contrasts: bool = False) -> tuple[Tensor, Tensor]:
        features, outputs = self.layer.run(inputs)
        if directions.is_floating_point():
            moves = features @ directions.unflatten(1, self.layer.mean.shape).mT.to(features)  # (Q, n, K)
        else:
            moves = outputs.new_empty(len(directions), *as_rows(outputs).shape)
            for row, move in zip(moves, self.moves(features, directions[:, :2].tolist()), strict=True):
                row.copy_(move)
        return outputs, moves.to(outputs).view(-1, *outputs.shape)


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
    network = as_network(model, output, inputs)
    source = Source(batches, inputs)
    source.warn_if_dropping("do not count: the variance is too large")
    stream = (batch for batch in source.inputs() if len(batch))
    first = next(stream, None)
    if first is None:
        raise BatchbayesError(expected="at least one training example", got="none", fix="check the data")
    last = find_last_layer(network, first.to(network.device), layer)
    outputs, features = last.mean.shape
    full = outputs * features <= MOST_FULL and not isinstance(likelihood, Gaussian)  # for which Kronecker is exact
    runs = (last.run(batch.to(network.device)) for batch in progress(chain([first], stream), "curvature"))
    seen = ((found, as_rows(made).double().cpu()) for found, made in runs)
    posterior = LaplacePosterior(last, curvature_of(seen, likelihood, outputs, features, full=full), 1.0)
    if prior_precision is not None:
        return posterior.at_prior_precision(prior_precision)
    if held_out is not None:
        return _best(posterior, _held_out_loss(posterior, Source(held_out, inputs, targets).labelled(), likelihood))
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
    found = tune(lambda log_precision: loss(math.exp(log_precision)), LOW, HIGH)
    return posterior.at_prior_precision(found.value)


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
        variance = posterior.curvature.output_variance(features, prior_precision)
        total = (variance + likelihood(means[None]).variance[0]).sqrt()
        return float(-torch.distributions.Normal(means, total).log_prob(targets).mean())

    def by_draws(prior_precision: float) -> float:
        moves = posterior.at_prior_precision(prior_precision).moves(features, ((0, s) for s in range(HELD_OUT_DRAWS)))
        each = [likelihood((means + move)[None]).log_prob(targets)[0] for move in moves]
        return math.log(HELD_OUT_DRAWS) - float(torch.stack(each).logsumexp(0).mean())

    return exact if isinstance(likelihood, Gaussian) else by_draws


def laplace_candidates(method: Method, request: Request) -> list[Candidate]:
    """Return what an assessment compares: the last layer with a prior that suits calibration data."""
    posterior = method(request.model, request.train, request.likelihood, held_out=request.calibration)
    assert isinstance(posterior, LaplacePosterior)
    return [Candidate(method, posterior, rank=2, settings={"prior_precision": posterior.prior_precision})]
