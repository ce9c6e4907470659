r"""Monte Carlo dropout.

What is random: the masks of the dropout layers. One mask is drawn for each call of a layer, of the shape of one
example's activation, and shared by all inputs of a draw, so that a draw is a function. Batch norm and everything else
is as in evaluation mode.
q(omega): independent Bernoulli variables, of which a share 1 - p is one, in each element (`Dropout`, `AlphaDropout`) or
each channel (`Dropout1d`, `Dropout2d`, `Dropout3d`, `FeatureAlphaDropout`); what is kept is scaled by 1 / (1 - p).
Cost: fitting nothing; a draw is a forward pass and one mask a layer.
Reference: Gal, Ghahramani, "Dropout as a Bayesian Approximation", ICML 2016.
Where we differ: the usual code draws a mask for each example, of the same marginals; ours depends on neither the batch
nor its size. Dropout that is not a module cannot be seen and stays off: `F.dropout`, and what torch's recurrent and
attention layers do inside.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError
from batchbayes.network import Function, Network, as_network, outputs_replaced

CHANNELWISE = nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.FeatureAlphaDropout
ALPHA = nn.AlphaDropout | nn.FeatureAlphaDropout
SELU_FLOOR = -1.7580993408473766
"""What SELU tends to for very negative inputs: alpha dropout puts it in the place of what it drops."""


@dataclass(frozen=True, eq=False)
class DropoutSite:
    """One dropout layer, its name inside the network, and its probability when the posterior was made."""

    name: str
    layer: _DropoutNd
    probability: float

    def mask(self, inputs: Tensor, seed: int, index: int, call: int) -> Tensor:
        """Ones and zeros in the shape of one example, channels apart; the CPU draws them, whatever the device."""
        shape = inputs.shape[1:]
        if isinstance(self.layer, CHANNELWISE):
            shape = [*shape[:1], *[1] * len(shape[1:])]
        random = generator(seed, "dropout", index, self.name, call)
        return (torch.rand(shape, generator=random) >= self.probability).to(inputs)

    def drop(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Inputs (N, ...) under a mask (...), scaled as the layer scales them in training."""
        p = self.probability
        if p == 1:
            return inputs * mask
        if not isinstance(self.layer, ALPHA):
            return inputs * (mask / (1 - p))
        scale = ((1 + p * SELU_FLOOR**2) * (1 - p)) ** -0.5  # keeps mean zero and variance one
        return inputs * (mask * scale) + ((1 - mask) - p) * (SELU_FLOOR * scale)


@dataclass(frozen=True, eq=False)
class DropoutPosterior:
    """Functions that differ in what the dropout layers of one network drop."""

    network: Network
    sites: tuple[DropoutSite, ...]
    """The dropout layers that drop anything, in the order in which the modules were registered."""

    def __repr__(self) -> str:
        low, high = min(site.probability for site in self.sites), max(site.probability for site in self.sites)
        spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return (
            f"{type(self).__name__}(mc_dropout on {type(self.network.module).__name__}: {len(self.sites)} sites, "
            f"p {spread})"
        )

    def draw(self, seed: int, index: int) -> Function:
        """One network: the user's own, with the masks of draw `index`."""
        sites = {site.name: site for site in self.sites}

        def drawn(inputs: Tensor) -> Tensor:
            calls: Counter[str] = Counter()

            def dropped(name: str, activations: Tensor) -> Tensor:
                _require_batch_first(name, activations, len(inputs))
                calls[name] += 1
                site = sites[name]
                return site.drop(activations, site.mask(activations, seed, index, calls[name]))

            with outputs_replaced({name: site.layer for name, site in sites.items()}, dropped):
                outputs = self.network(inputs)
            if not calls:
                raise BatchbayesError(
                    expected="dropout layers that run in a forward pass",
                    got=f"{len(sites)} in {type(self.network.module).__name__} that did not, so no noise",
                    fix="call the layers in forward(), not functions with their weights",
                )
            return outputs

        return drawn

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Header and tensors for a file: masks are drawn from the seed, so there are no tensors."""
        header = {"kind": "dropout", "output": self.network.output, "layout": dropout_layout(self.network.module)}
        return header, {}


def mc_dropout(model: nn.Module, *, output: str | int | None = None) -> DropoutPosterior:
    """Keep the dropout of a trained network switched on, one mask for all inputs of a draw.

    Args:
        model: any network with dropout modules. It is not changed.
        output: which output counts, if the network returns a tuple or a dict.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    >>> mc_dropout(network)
    DropoutPosterior(mc_dropout on Sequential: 1 sites, p 0.2)
    """
    network = as_network(model, output)
    every = _dropout_layers(network.module)
    if not any(0 < layer.p < 1 for layer in every.values()):
        found = ", ".join(f"{name} with p={layer.p:g}" for name, layer in list(every.items())[:6])
        raise BatchbayesError(
            expected="a network with dropout modules of a probability between 0 and 1",
            got=f"{type(network.module).__name__} with {found or 'none'}",
            fix="use a network that was trained with nn.Dropout; F.dropout inside forward() cannot be seen",
        )
    return DropoutPosterior(
        network, tuple(DropoutSite(name, layer, float(layer.p)) for name, layer in every.items() if layer.p > 0)
    )


def dropout_layout(module: nn.Module) -> list[list[object]]:
    """What a file must agree on with a network: name, type and probability of each dropout layer."""
    return [[name, type(layer).__name__, float(layer.p)] for name, layer in _dropout_layers(module).items()]


def _dropout_layers(module: nn.Module) -> dict[str, _DropoutNd]:
    """Every dropout layer, subclasses included, by name; a compiled part keeps the name it had."""
    return {
        name.replace("_orig_mod.", ""): layer for name, layer in module.named_modules() if isinstance(layer, _DropoutNd)
    }


def _require_batch_first(name: str, activations: Tensor, count: int) -> None:
    """Examples can share a mask only where their axis is known."""
    if activations.shape[:1] != (count,):
        raise BatchbayesError(
            expected=f"one row an example, {count} in all, at the dropout layer {name}",
            got=f"an activation of shape {tuple(activations.shape)}",
            fix="let the network keep the batch as the first axis (batch_first=True)",
        )
