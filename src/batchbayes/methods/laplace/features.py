"""The last layer of a network, and the features that it gets."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError
from batchbayes.network import Function, Network, modules_by_name


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The linear layer that makes the outputs of a network."""

    network: Network
    name: str

    @property
    def module(self) -> nn.Linear:
        return modules_by_name(self.network.module, nn.Linear)[self.name]

    @property
    def mean(self) -> Tensor:
        """The present weights (K, P) in float64; if there is a bias, it is the last column."""
        return joined(self.module).double().cpu()

    def with_weights(self, weights: Tensor) -> Function:
        """Return the network with other weights (K, P) in this layer alone, also if an embedding shares its weights."""
        self.network.warn_if_changed()
        weight, bias = weights.to(self.module.weight), None
        if self.module.bias is not None:
            weight, bias = weight[:, :-1].contiguous(), weight[:, -1].contiguous()
        return partial(self.network, instead={self.name: lambda features: F.linear(features, weight, bias)})

    @torch.no_grad()
    def run(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return features (n, P), with a one for the bias, in float64, and the outputs of the network.

        The outputs are (n, K), or (n,) if the network takes the axis of a single output away.
        """
        self.network.warn_if_changed()
        seen: list[Tensor] = []
        outputs = self.network(inputs, before={self.name: seen.append})
        if len(seen) != 1 or seen[0].ndim != 2:
            raise BatchbayesError(
                expected=f"one row of features for each example at the last layer {self.name!r}",
                got=f"{len(seen)} calls of it" if len(seen) != 1 else f"features of shape {tuple(seen[0].shape)}",
                fix="name another layer with layer=, or use a network with one output row for each example",
            )
        features = seen[0].double().cpu()
        if self.module.bias is not None:
            features = F.pad(features, (0, 1), value=1.0)
        return features, outputs


def joined(layer: nn.Linear) -> Tensor:
    """Return a copy of the weights (K, P) of a layer, its bias in the last column."""
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias[:, None]]
    return torch.cat(parts, 1).detach()


def as_rows(outputs: Tensor) -> Tensor:
    """Return outputs (n, K) or (n,) as (n, K)."""
    return outputs[:, None] if outputs.ndim == 1 else outputs


@torch.no_grad()
def find_last_layer(network: Network, inputs: Any, name: str | None) -> LastLayer:
    """Return the linear layer whose result is the output of the network, or refuse the network."""
    layers = modules_by_name(network.module, nn.Linear)
    seen: dict[str, Tensor] = {}
    before = {found: partial(seen.__setitem__, found) for found in layers}
    outputs = network(inputs, before=before)
    if not bool(torch.isfinite(outputs).all()):
        raise BatchbayesError(
            expected="finite outputs of the network",
            got="NaN or infinity for the first training batch",
            fix="look for NaN in the weights and in the data",
        )
    for found in [name] if name is not None else reversed(layers):
        if found in seen and _makes(layers[found], seen[found], outputs):
            return LastLayer(network, found)
    raise BatchbayesError(
        expected=f"a linear layer {'' if name is None else repr(name) + ' '}whose result is the output of the network",
        got=f"{type(network.module).__name__}, whose linear layers are {', '.join(list(layers)[-6:]) or 'none'}",
        fix="name the right one with layer=, and let the network return logits or means, without a softmax after it",
    )


def _makes(layer: nn.Linear, features: Tensor, outputs: Tensor) -> bool:
    """Whether a layer turns these features into these outputs. Outputs (N,) are those of a layer with one output."""
    made, outputs = F.linear(features, layer.weight, layer.bias), as_rows(outputs)
    return made.shape == outputs.shape and torch.allclose(made, outputs, rtol=1e-3, atol=1e-4)
