r"""All layers of a perceptron go on learning, and a Gaussian over their weights remembers the former parts.

A part is learned at the maximum of its log-likelihood plus the log density of the former Gaussian. Then its curvature
there is added to the precision (the Laplace approximation). The precision of the last layer is complete, as in
`OnlineLastLayer`. That of a hidden layer with inputs $a_n$ and outputs $z_n$ is

$\delta I + \frac1N \sum_n G_n \otimes \sum_n a_n a_n^\top$ with
$G_n = \left(\frac{\partial f_n}{\partial z_n}\right)^\top \Lambda_n \frac{\partial f_n}{\partial z_n}$ and
$\Lambda_n = -\nabla_f^2\log p(y_n\mid f_n)$,

with the precision $\delta$ of the prior, and sums over the N examples of all parts so far. Correlations between layers
are left out. Predictions draw the last layer only, on the features of the maximum.

Reference: Ritter, Botev, Barber, "Online Structured Laplace Approximations", NeurIPS 2018. There all layers have
Kronecker factors, and predictions come from the maximum alone.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes import BatchbayesError, TrainingConfig
from batchbayes.methods.laplace.curvature import joined, output_hessians
from batchbayes.tools import Function, Network, TargetLikelihood, as_network, finite_number, modules_by_name, under
from batchbayes_papers.online.last_layer import OnlineLastLayer
from batchbayes_papers.online.parts import (
    DataPart,
    read_state,
    require_finite_weights,
    require_plain,
    training_steps,
    write_state,
)


@dataclass(frozen=True, eq=False)
class StructuredLaplace:
    """A Gaussian over the weights of all linear layers. The last column of a layer is its bias."""

    network: Network
    last: OnlineLastLayer
    hidden: Mapping[str, Tensor]
    """The means (H, P) of the hidden layers, by name."""
    of_inputs: Mapping[str, Tensor]
    r"""$\sum_n a_n a_n^\top$, (P, P)"""
    of_outputs: Mapping[str, Tensor]
    r"""$\sum_n G_n$, (H, H)"""
    prior_std: float
    num_examples: int = 0

    @property
    def num_parts(self) -> int:
        """How many parts have been learned. Before the first one the prior is N(0, prior_std^2)."""
        return self.last.num_parts

    @classmethod
    def start(cls, model: nn.Module, likelihood: TargetLikelihood[Any], prior_std: float = 1.0) -> Self:
        """Return what is known before the first part. Learning starts at the present weights of the network.

        Its linear layers must hold all weights, and the last of them must return the outputs.
        """
        finite_number("prior_std", prior_std, above=0, fix="pass 1, for example")
        network = as_network(model)
        layers = modules_by_name(network.module, nn.Linear)
        held = [id(p) for layer in layers.values() for p in layer.parameters()]
        learned = [id(p) for p in network.module.parameters() if p.requires_grad]
        if not layers or sorted(held) != sorted(learned):
            raise BatchbayesError(
                expected="a network that learns the weights of linear layers, each in one layer, and nothing else",
                got=f"{network!r} with other layers, or with weights that are fixed or shared",
                fix="use OnlineMeanField, or OnlineLastLayer on the features of the network",
            )
        *hidden, last = (joined(layer) for layer in layers.values())
        own = dict(zip(layers, hidden, strict=False))
        return cls(
            network,
            OnlineLastLayer.start(last.shape[0], last.shape[1], likelihood, prior_std**-2),
            own,
            {name: weights.new_zeros(weights.shape[1], weights.shape[1]) for name, weights in own.items()},
            {name: weights.new_zeros(weights.shape[0], weights.shape[0]) for name, weights in own.items()},
            float(prior_std),
        )

    def update(self, part: DataPart, config: TrainingConfig) -> Self:
        """Return the posterior after one more part, of which the former one is the prior.

        `config` has the epochs, the batch size, the learning rate of Adam, which falls to zero, and the seed.
        """
        inputs, targets = require_plain(part, config)
        weights = {name: tensor.clone().requires_grad_() for name, tensor in self._present().items()}
        optimiser = torch.optim.Adam(weights.values(), lr=config.learning_rate)
        with torch.enable_grad(), self._running(weights) as (run, _):
            for rows in training_steps(optimiser, len(inputs), config):
                outputs = run(inputs[rows])
                fitting = self.last.likelihood.fitting(outputs[None], targets[rows]).to(outputs.device)
                fit = -self.last.likelihood(outputs[None]).log_prob(fitting).sum() / len(rows)
                loss = fit + 0.5 * self._squared_distance(weights) / len(inputs)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                require_finite_weights([loss.detach()], self.num_parts)
        require_finite_weights(weights.values(), self.num_parts)
        return self._at({name: tensor.detach() for name, tensor in weights.items()}, inputs, targets)

    def _present(self) -> dict[str, Tensor]:
        """Return the weights of all layers, the last one at the end."""
        name, layer = list(modules_by_name(self.network.module, nn.Linear).items())[-1]
        own = joined(layer)
        return {**self.hidden, name: self.last.mean.to(own) if self.num_parts else own}

    def _squared_distance(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the squared distance from the mean of the former Gaussian, measured by its precision."""
        *hidden, last = weights.items()
        away = (last[1] - self.last.mean.to(last[1])).flatten()
        total = away @ (self.last.precision.to(away) @ away)
        for name, present in hidden:
            moved = present - self.hidden[name] if self.num_parts else present
            total = total + (moved / self.prior_std).square().sum()
            if self.num_parts:
                curved = self.of_outputs[name] @ moved @ self.of_inputs[name]
                total = total + (curved * moved).sum() / self.num_examples
        return total

    def _at(self, weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Self:
        """Return the Gaussian around these weights. Its precision is the former one plus the curvature of a part."""
        *hidden, output = weights
        with torch.enable_grad(), self._running({n: w.requires_grad_() for n, w in weights.items()}) as (run, seen):
            outputs = run(inputs)
            root = _roots(output_hessians(self.last.likelihood, outputs.detach()))
            of_outputs = dict(self.of_outputs)
            for k in range(outputs.shape[1] if hidden else 0):
                total = (root[:, :, k] * outputs).sum()
                slopes = torch.autograd.grad(total, [seen[name][1] for name in hidden], retain_graph=True)
                for name, slope in zip(hidden, slopes, strict=True):
                    of_outputs[name] = of_outputs[name] + slope.T @ slope
        received = {name: seen[name][0].detach() for name in weights}
        return replace(
            self,
            last=replace(self.last, mean=weights[output].detach().double().cpu()).update(
                (received[output], targets), steps=0
            ),
            hidden={name: weights[name].detach() for name in hidden},
            of_inputs={name: self.of_inputs[name] + received[name].T @ received[name] for name in hidden},
            of_outputs=of_outputs,
            num_examples=self.num_examples + len(inputs),
        )

    @contextmanager
    def _running(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[Function, dict[str, tuple[Tensor, Tensor]]]]:
        """Run the network with these weights, and keep what each layer got and returned in the last pass."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def layer(name: str, inputs: Tensor) -> Tensor:
            if name in seen or inputs.ndim != 2:
                raise self._unfit(f"layer {name!r} with inputs of shape {tuple(inputs.shape)}, or twice in a pass")
            got = F.pad(inputs, (0, weights[name].shape[1] - inputs.shape[1]), value=1.0)
            seen[name] = got, got @ weights[name].T
            return seen[name][1]

        def checked(inputs: Any) -> Tensor:
            seen.clear()
            outputs = run(inputs.to(self.network.device))
            if len(seen) != len(weights) or not torch.equal(outputs, seen[list(weights)[-1]][1]):
                raise self._unfit("a network with other layers, or with a function of its last linear layer")
            return outputs

        with self.network.prepared(instead={name: partial(layer, name) for name in weights}) as run:
            yield checked, seen

    def _unfit(self, got: str) -> BatchbayesError:
        return BatchbayesError(
            expected=f"that each linear layer of {self.network!r} runs once, and that the last one returns the outputs",
            got=got,
            fix="use OnlineMeanField, or OnlineLastLayer on the features of the network",
        )

    @torch.no_grad()
    def features(self, inputs: Tensor) -> Tensor:
        """Return what the last layer gets (N, P), with a column of ones if it has a bias."""
        weights = self._present()
        with self._running(weights) as (run, seen):
            run(inputs)
        return seen[list(weights)[-1]][0]

    def outputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the outputs, in closed form."""
        return self.last.outputs(self.features(inputs))

    def log_prob(self, inputs: Tensor, targets: Tensor, num_samples: int = 64, seed: int = 0) -> Tensor:
        r"""Return $\log\frac1S\sum_s p(y\mid f_s)$ over draws of the outputs, (N, ...)."""
        return self.last.log_prob(self.features(inputs), targets, num_samples, seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        header = {"num_parts": self.num_parts, "prior_std": self.prior_std, "num_examples": self.num_examples}
        write_state(path, header, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        groups = {"hidden": self.hidden, "of_inputs": self.of_inputs, "of_outputs": self.of_outputs}
        named = {f"{group}.{name}": tensor for group, found in groups.items() for name, tensor in found.items()}
        return {"last.mean": self.last.mean, "last.precision": self.last.precision, **named}

    def restored(self, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote, for the same network and likelihood."""
        header, tensors = read_state(path, self._tensors())
        last = replace(self.last, num_parts=header.pop("num_parts"), **under(tensors, "last."))
        found = {name: under(tensors, f"{name}.") for name in ("hidden", "of_inputs", "of_outputs")}
        return replace(self, last=last, **found, **header)


def _roots(hessians: Tensor) -> Tensor:
    r"""Return R (n, K, K) with $R R^\top$ the given matrices."""
    values, vectors = torch.linalg.eigh(hessians.double())
    return (vectors * values.clamp_min(0).sqrt()[:, None, :]).to(hessians)
