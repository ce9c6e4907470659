"""Where a network has weights that can be random: its linear, convolutional and recurrent layers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError, unknown_name
from batchbayes.network.function import modules_by_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, nn.RNNBase)
METHODS = ("forward", "_conv_forward")
"""What a layer does with its input and its weight."""
PLAIN = [[getattr(kind, name, None) for name in METHODS] for kind in (nn.Linear, *CONVOLUTIONS)]
"""These methods, if nobody has changed them in a subclass."""


@dataclass(frozen=True, eq=False)
class Site:
    """A weight of one layer. Biases and all other parameters stay as they are."""

    name: str
    """The full name of the weight, such as "features.0.weight"."""
    module_name: str
    module: nn.Module
    is_plain: bool
    """Whether the layer only multiplies its input by this weight and adds its bias. Then noise can be put into its
    output instead of its weight."""

    @property
    def weight(self) -> Tensor:
        """The present value of the weight."""
        return getattr(self.module, self.name.rpartition(".")[2])

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.module, CONVOLUTIONS)

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias  # type: ignore[return-value]

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Do what the layer does, with another weight and bias."""
        if isinstance(self.module, CONVOLUTIONS):
            return self.module._conv_forward(inputs, self.in_format(weight), bias)  # which pads as the layer does
        return F.linear(inputs, weight, bias)

    def in_format(self, weight: Tensor) -> Tensor:
        """Return another weight with the strides of a convolution's own, if they differ only in axes of length one.

        Operations lose these strides, and convolutions choose their memory format by them.
        """
        if not self.is_convolution:
            return weight
        own = self.weight
        pairs = zip(own.shape, own.stride(), weight.stride(), strict=True)
        if own.stride() == weight.stride() or any(length > 1 and a != b for length, a, b in pairs):
            return weight
        return weight.as_strided(own.shape, own.stride())


def find_sites(module: nn.Module, layers: Iterable[str] | None = None) -> tuple[Site, ...]:
    """Return the weights of the named layers, or of all linear, convolutional and recurrent ones."""
    every = modules_by_name(module, LAYERS)
    names = list(every if layers is None else [layers] if isinstance(layers, str) else layers)
    for name in names:
        if name not in every:
            raise unknown_name("a linear, convolutional or recurrent layer", name, every)
    if not names:
        got = f"{type(module).__name__} without any" if layers is None else "an empty list of layers"
        fix = "pass a network that has some, and name them by layers="
        raise BatchbayesError("a network with linear, convolutional or recurrent layers", got, fix)
    inside = {f"{name}.out_proj" for name in modules_by_name(module, nn.MultiheadAttention)}
    users = Counter(id(parameter) for m in module.modules() for parameter in m._parameters.values())
    return tuple(site for name in names for site in _sites(name, every[name], users, name not in inside))


def _sites(name: str, layer: nn.Module, users: Counter[int], runs: bool) -> list[Site]:
    """Return the weights of one layer. `runs` says whether the network calls the layer itself."""
    if isinstance(layer, nn.RNNBase):
        keys = [key for key in layer._flat_weights_names if key.startswith("weight")]
    else:
        keys = ["weight"]
    is_plain = runs and [getattr(type(layer), method, None) for method in METHODS] in PLAIN
    is_plain = is_plain and not any(method in vars(layer) for method in METHODS)  # nor in this one layer
    sites = []
    for key in keys:
        own = layer._parameters.get(key)
        if own is None:
            raise BatchbayesError(
                expected="layers whose weight is a parameter of its own",
                got=f"{name}, whose {key} is computed from other parameters (a parametrisation or weight norm)",
                fix="remove the parametrisation with torch.nn.utils.parametrize.remove_parametrizations, or name the "
                "other layers by layers=",
            )
        if users[id(own)] > 1:
            got = f"{name}, whose {key} belongs to another layer too"
            fix = "name the other layers by layers=, because one draw cannot be two weights"
            raise BatchbayesError("layers that do not share their weight", got, fix)
        full = f"{name}.{key}" if name else key
        sites.append(Site(full, name, layer, is_plain))
    return sites
