r"""Monte Carlo dropout.

What is random: the masks of the dropout layers. Each call of a layer draws one mask, of the shape of one example's
activation. All inputs of a draw share it, so that a draw is a function. Everything else is as in evaluation mode.
q(omega): independent Bernoulli variables, of which a share 1 - p is one, for each element (`Dropout`, `AlphaDropout`)
or each channel (`Dropout1d`, `Dropout2d`, `Dropout3d`, `FeatureAlphaDropout`). What is kept is scaled by 1 / (1 - p).
Cost: none for the fit; a draw is a forward pass and one mask for each layer.
Reference: Gal, Ghahramani, "Dropout as a Bayesian Approximation", ICML 2016.
Where we differ: the usual code draws a mask for each example, with the same marginals. Our masks depend on neither the
batch nor its size. Dropout that is not a module cannot be seen and stays off: `F.dropout`, and the dropout inside
torch's recurrent and attention layers.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from batchbayes._common.rng import generator
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.function import Network, Output, as_network, modules_by_name, require_layout
from batchbayes.network.inputs import Picker
from batchbayes.patch import Affine, Patch
from batchbayes.posterior import Posterior
from batchbayes.state import Codec, File, State, coded

if TYPE_CHECKING:
    from batchbayes.methods.candidates import Candidate, Request
    from batchbayes.methods.table import Method

RATE = re.compile("(attn_|attention_)?(drop|dropout)(_p|_prob|_rate)?")
"""Attributes in which layers keep the probability of dropout."""
CHANNELWISE = nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.FeatureAlphaDropout
ALPHA = nn.AlphaDropout | nn.FeatureAlphaDropout
SELU_FLOOR = -1.7580993408473766
"""The limit of SELU for very negative inputs. Alpha dropout puts it in the place of what it drops."""


class DropoutSite(NamedTuple):
    """One dropout layer, its name inside the network, and its probability when the posterior was made."""

    name: str
    layer: _DropoutNd
    probability: float

    def mask(self, inputs: Tensor, random: torch.Generator) -> Tensor:
        """Return ones and zeros in the shape of one example, or of its channels. The CPU draws them on every device."""
        shape = inputs.shape[1:]
        if isinstance(self.layer, CHANNELWISE):
            shape = [*shape[:1], *[1] * len(shape[1:])]
        return (torch.rand(shape, generator=random, dtype=torch.float32) >= self.probability).to(inputs)

    def affine(self, mask: Tensor) -> Affine:
        """Return the factor, and the offset if there is one, that a mask stands for: scaled as in training."""
        p = self.probability
        if p == 1:
            return (mask,)
        if not isinstance(self.layer, ALPHA):
            return (mask / (1 - p),)
        scale = ((1 + p * SELU_FLOOR**2) * (1 - p)) ** -0.5  # keeps mean zero and variance one
        return mask * scale, ((1 - mask) - p) * (SELU_FLOOR * scale)


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """The masks of one layer in one draw."""

    site: DropoutSite
    seed: int
    index: int

    def at(self, like: Tensor, call: int) -> Affine:
        random = generator(self.seed, "dropout", self.index, self.site.name, call)
        return self.site.affine(self.site.mask(like, random))


@dataclass(frozen=True, eq=False, repr=False)
class DropoutPosterior(Posterior):
    """Functions that differ in what the dropout layers of one network drop."""

    kind: ClassVar[str] = "dropout"

    network: Network
    sites: tuple[DropoutSite, ...] = field(
        metadata=coded(Codec(lambda _, own: _to_file(own), lambda file: _from_file(file)))
    )
    """The dropout layers that drop anything, in the order in which the modules were registered."""

    def __repr__(self) -> str:
        low, high = min(site.probability for site in self.sites), max(site.probability for site in self.sites)
        spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{type(self).__name__}(mc_dropout on {self.network}: {count(len(self.sites), 'site')}, p {spread})"

    def draw(self, seed: int, index: int) -> Patch:
        """Return the network with the masks of draw `index`."""
        present = modules_by_name(self.network.module, _DropoutNd)
        if replaced := [site.name for site in self.sites if present.get(site.name) is not site.layer]:
            got = f"others in the place of {', '.join(replaced[:6])}"
            fix = "make the posterior again after you change the network"
            raise BatchbayesError("the dropout layers that the posterior was made for", got, fix)
        masks = {site.name: DropoutMask(site, seed, index) for site in self.sites}
        return Patch(self.network, masks=masks, afterwards=self._look_for_functions)

    def _look_for_functions(self, inputs: Any) -> None:
        """Warn, once, of dropout that stays off: functions, and modules that do not run. One example tells.

        This is no part of a draw: under a mode of torch, attention and others take a path that rounds differently.
        """
        if "_was_looked_at" not in vars(self) and len(inputs):
            vars(self)["_was_looked_at"] = True
            idle = {site.name: site for site in self.sites}

            def same(name: str, activations: Tensor) -> Tensor:
                idle.pop(name, None)
                return activations

            layers = modules_by_name(self.network.module, _DropoutNd)
            with _FunctionalDropout() as seen:
                self.network(inputs[:1], instead={name: partial(same, name) for name in layers})
            seen.warn()
            if idle:
                warn(
                    f"{len(idle)} of {count(len(self.sites), 'dropout layer')} did not run, such as {min(idle)}: the "
                    "network hands their probability to a function, as attention does, and it is off in evaluation "
                    "mode. Draws vary less than the network did in training. Attention that calls the module (often "
                    'attn_implementation="eager") would switch it on.'
                )


_FUNCTIONS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class _FunctionalDropout(TorchFunctionMode):
    """Sees functions that would drop something in training. Our own masks are put on without them."""

    def __init__(self) -> None:
        super().__init__()
        self._largest = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _FUNCTIONS:
            self._largest = max(self._largest, float(given.get("p", args[1] if len(args) > 1 else 0.5)))
        return func(*args, **given)

    def warn(self) -> None:
        """Warn of what was seen, if anything."""
        if self._largest > 0:
            warn(
                f"the network calls F.dropout in its forward pass (p {self._largest:g}). This is no module, and stays "
                "off. Draws vary less than the network did in training. Use nn.Dropout modules."
            )


def mc_dropout(model: nn.Module, *, inputs: Picker = None, output: Output = None) -> DropoutPosterior:
    """Keep the dropout of a trained network on, with one mask for all inputs of a draw.

    Args:
        model: any network with dropout modules. It is not changed. A warning names recurrent and attention layers of
            torch whose own dropout cannot be switched on. At the first draw another one tells of calls of F.dropout.
        inputs: where the inputs are in a batch, for predictions that do not say it.
        output: which output counts, if the network returns a tuple or a dict.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    >>> mc_dropout(network)
    DropoutPosterior(mc_dropout on Sequential: 1 site, p 0.2)
    """
    network = as_network(model, output, inputs)
    sites = _sites(network.module)
    if all(site.probability == 1 for site in sites):
        every = modules_by_name(network.module, _DropoutNd)
        found = ", ".join(f"{name} with p={layer.p:g}" for name, layer in list(every.items())[:6])
        got = f"{type(network.module).__name__} with {found or 'none'}"
        fix = "use a network that was trained with nn.Dropout; F.dropout inside forward() cannot be seen"
        raise BatchbayesError("a network with dropout modules of a probability between 0 and 1", got, fix)
    if hidden := _hidden(network.module):
        warn(
            f"the dropout inside {', '.join(hidden[:6])} is no module of its own, and stays off. Draws vary less than "
            "the network did in training."
        )
    return DropoutPosterior(network, sites)


def _hidden(module: nn.Module) -> list[str]:
    """Return the layers that drop something inside a function: attention, and recurrent ones between their layers.

    Attention of others keeps its probability in an attribute, without a dropout module beside it.
    """
    found = []
    for name, layer in modules_by_name(module, nn.Module).items():
        if isinstance(layer, _DropoutNd) or any(isinstance(child, _DropoutNd) for child in layer.children()):
            continue
        rates = [value for key, value in vars(layer).items() if RATE.fullmatch(key) and type(value) is float]
        if max(rates, default=0) > 0 and getattr(layer, "num_layers", 2) > 1:
            found.append(f"{name or 'the network'} ({type(layer).__name__}, p {max(rates):g})")
    return found


def dropout_candidates(method: "Method", request: "Request") -> "list[Candidate]":
    """Return what an assessment compares: the network with its dropout on."""
    from batchbayes.methods.candidates import Candidate

    return [Candidate(method, mc_dropout(request.model), rank=1)]


def has_dropout(model: nn.Module) -> bool:
    """Return whether a network has dropout layers that drop something."""
    return any(site.probability < 1 for site in _sites(as_network(model).module))


def _sites(module: nn.Module) -> tuple[DropoutSite, ...]:
    layers = modules_by_name(module, _DropoutNd)
    return tuple(DropoutSite(name, layer, float(layer.p)) for name, layer in layers.items() if layer.p > 0)


def _to_file(posterior: DropoutPosterior) -> State:
    return {"layout": _layout(posterior.network.module)}, {}


def _from_file(file: File) -> tuple[DropoutSite, ...]:
    module, row = file.network.module, "layer {} of type {} with p {:g}"
    require_layout(module, file.header["layout"], _layout(module), "dropout", row)
    return _sites(module)


def _layout(module: nn.Module) -> list[list[object]]:
    """Return name, type and probability of each dropout layer."""
    layers = modules_by_name(module, _DropoutNd)
    return [[name, type(layer).__name__, float(layer.p)] for name, layer in layers.items()]
