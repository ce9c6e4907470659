"""Functions that differ in the weights of some layers."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common.checks import require_choice
from batchbayes._common.files import under
from batchbayes._common.rng import stream_seed
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.binary_dropout import BinaryDropout
from batchbayes.methods.weights.family import Family, WeightDistribution
from batchbayes.methods.weights.flow import MultiplicativeFlow
from batchbayes.methods.weights.mean_field import MeanField
from batchbayes.methods.weights.sites import Site, find_sites
from batchbayes.methods.weights.sparse import SparseVD
from batchbayes.methods.weights.structured import StructuredSparsity
from batchbayes.methods.weights.variance import Variance
from batchbayes.methods.weights.variational_dropout import GaussianDropout, VariationalDropout
from batchbayes.network.copies import plain_name
from batchbayes.network.function import Network, as_network, require_layout
from batchbayes.patch import Patch
from batchbayes.posterior import Header, Posterior
from batchbayes.training.checkpoint import require_tensors_only

_DROPOUT = (VariationalDropout, GaussianDropout, BinaryDropout)
_EVERY = (MeanField, SparseVD, StructuredSparsity, *_DROPOUT, Variance, MultiplicativeFlow)
FAMILIES: dict[str, type[Family]] = {family.kind: family for family in _EVERY}
"""All families by the kind that files name."""


@dataclass(frozen=True, eq=False)
class WeightsPosterior(Posterior):
    """A network with random weights. One draw is one set of weights for all inputs."""

    kind: ClassVar[str] = "weights"
    needs_weights: ClassVar[bool] = False

    network: Network
    """A network of its own, with the means and all parameters that are not random."""
    family: Family
    sites: tuple[Site, ...]
    own: Mapping[str, Mapping[str, Tensor]]
    """The family's own parameters of each random weight, by its name."""

    def __repr__(self) -> str:
        weights = sum(site.weight.numel() for site in self.sites)
        layers = count(len({site.module_name for site in self.sites}), "layer")
        return f"{type(self).__name__}({self.family.kind} on {self.network}: {weights} weights in {layers})"

    @cached_property
    def distributions(self) -> dict[str, WeightDistribution]:
        """The distribution of each random weight, by its name."""
        with torch.no_grad():
            return {site.name: self.family.given(site.weight, self.own[site.name], site) for site in self.sites}

    def draw(self, seed: int, index: int) -> Patch:
        """Return the network with the weights of draw `index`."""
        with torch.no_grad():
            return Patch(self.network, self.weights(seed, index))

    def weights(self, seed: int, index: int) -> dict[str, Tensor]:
        """Return the random weights of draw `index`, by name."""
        given, source, drawn = self.distributions, torch.Generator(), {}
        for site in self.sites:
            source.manual_seed(stream_seed(seed, "weights", index, site.name))
            drawn[site.name] = site.in_format(given[site.name].sample(source))
        return drawn

    def means(self) -> dict[str, Tensor]:
        """Return a state dict for the user's network, in which each random weight is its mean."""
        return self.state_dict_with({name: given.mean for name, given in self.distributions.items()})

    def state_dict_with(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict for the user's network with these random weights, by name."""
        module, given = self.network.module, {id(site.weight): weights[site.name] for site in self.sites}
        state = copy.deepcopy(module.state_dict())
        for name, own in module.state_dict(keep_vars=True).items():  # a layer may have several names
            if id(own) in given:
                state[name] = given[id(own)].clone()
        return state

    def state(self) -> tuple[Header, dict[str, Tensor]]:
        require_tensors_only(self.network.module)
        header = {
            "output": self.network.output,
            "family": {"kind": self.family.kind, **asdict(self.family)},  # pyright: ignore[reportArgumentType]
            "layers": list(dict.fromkeys(site.module_name for site in self.sites)),
            "layout": _layout(self.network.module),
        }
        tensors = {f"network {plain_name(name)}": t for name, t in self.network.module.state_dict().items()}
        own = {f"own {name} {key}": tensor for name, each in self.own.items() for key, tensor in each.items()}
        return header, tensors | own

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        network = as_network(model, header["output"])
        require_layout(network.module, header["layout"], _layout(network.module), "weighted", "tensor {} of shape {}")
        module = own_copy(network.module).eval().requires_grad_(False)
        device = network.device
        module.load_state_dict({name: tensors[f"network {plain_name(name)}"] for name in module.state_dict()})
        sites = find_sites(module, header["layers"])
        own: dict[str, dict[str, Tensor]] = {site.name: {} for site in sites}
        for key, tensor in under(tensors, "own ").items():
            name, _, parameter = key.rpartition(" ")
            own[name][parameter] = tensor.to(device, copy=True)  # aligned as usual, or the last bits differ
        return cls(Network(module, header["output"]), _family(header["family"]), sites, own)


def _family(values: Mapping[str, Any]) -> Family:
    """Return a family from the values that a file holds."""
    fields = dict(values)
    kind = fields.pop("kind")
    require_choice("a family of weights", kind, list(FAMILIES))
    return FAMILIES[kind](**fields)


def own_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a user's network with tensors of its own."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise BatchbayesError(
            expected="a network that copy.deepcopy can copy",
            got=f"{type(module).__name__}, and {type(error).__name__}: {error}"[:300],
            fix="pass a network of plain modules that has not been run with gradients kept in attributes",
        ) from error


def _layout(module: nn.Module) -> list[list[object]]:
    """Describe all tensors of a network, without the parts of names that torch.compile adds."""
    return [[plain_name(name), list(tensor.shape)] for name, tensor in module.state_dict().items()]
