"""The Gaussian posterior of the last layer, with its predictive in closed form."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common.checks import finite_number
from batchbayes._common.rng import normals
from batchbayes.errors import BatchbayesError
from batchbayes.methods.laplace.curvature import FullCurvature, KroneckerCurvature
from batchbayes.methods.laplace.features import LastLayer, as_rows
from batchbayes.network import Function, Network, as_network, modules_by_name
from batchbayes.posterior import Header, Posterior


@dataclass(frozen=True, eq=False)
class LaplacePosterior(Posterior):
    """Functions that differ in the weights of the last layer of one network."""

    kind: ClassVar[str] = "laplace"

    layer: LastLayer
    curvature: FullCurvature | KroneckerCurvature
    prior_precision: float

    @property
    def network(self) -> Network:  # type: ignore[override]
        return self.layer.network

    @property
    def linear(self) -> Self:  # type: ignore[override]
        return self

    def __repr__(self) -> str:
        kind = "full" if isinstance(self.curvature, FullCurvature) else "Kronecker"
        outputs, features = self.layer.mean.shape
        return (
            f"{type(self).__name__}({self.network}: {features} x {outputs} weights of {self.layer.name!r}, "
            f"{kind} curvature, prior precision {self.prior_precision:.3g})"
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

    def draw(self, seed: int, index: int) -> Function:
        """Return the network with the last layer of draw `index`."""
        return self.function((self.layer.mean + self.deviations(seed, [index])[0]).flatten())

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
        mean, covariance = self.outputs(inputs)
        return (mean * (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).rsqrt()).softmax(-1)

    # What the linear engine asks for. Here it is exact, and all draws cost one pass.

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
        deviations = self.deviations(seed, indices).flatten(1)

        def drawn(inputs: Any) -> Tensor:
            outputs, moves = self.tangents(inputs, deviations)
            return outputs + moves

        return drawn

    def combinations(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        every = torch.arange(num_samples)
        return self.deviations(seed, range(num_samples)).flatten(1), torch.eye(num_samples, dtype=torch.float64), every

    @torch.no_grad()
    def tangents(self, inputs: Tensor, directions: Tensor, *, contrasts: bool = False) -> tuple[Tensor, Tensor]:
        features, outputs = self.layer.run(inputs)
        moves = features @ directions.unflatten(1, self.layer.mean.shape).mT.to(features)  # (Q, n, K)
        return outputs, moves.to(outputs).view(-1, *outputs.shape)

    def state(self) -> tuple[Header, dict[str, Tensor]]:
        header = {
            "output": self.network.output,
            "layer": self.layer.name,
            "shape": list(self.layer.mean.shape),
            "curvature": "full" if isinstance(self.curvature, FullCurvature) else "kronecker",
            "prior_precision": self.prior_precision,
        }
        return header, dict(vars(self.curvature))

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        network = as_network(model, header["output"])
        layer = LastLayer(network, header["layer"])
        if header["layer"] not in modules_by_name(network.module, nn.Linear) or (
            list(layer.mean.shape) != header["shape"]
        ):
            raise BatchbayesError(
                expected=f"a network with a linear layer {header['layer']!r} of shape {header['shape']}",
                got=f"{type(network.module).__name__} without it",
                fix="build the same network, load its weights, and pass that",
            )
        kind = {"full": FullCurvature, "kronecker": KroneckerCurvature}[header["curvature"]]
        return cls(layer, kind(**tensors), float(header["prior_precision"]))
