"""Any network with random weights: a module that is trained by the ELBO and then becomes a posterior."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream
from batchbayes._common.signatures import checked
from batchbayes.errors import BatchbayesError
from batchbayes.methods.weights.family import Family, WeightDistribution
from batchbayes.methods.weights.posterior import WeightsPosterior, own_copy
from batchbayes.methods.weights.sites import Site, find_sites
from batchbayes.network.function import Network, Output, as_network
from batchbayes.network.inputs import Inputs

Estimator = Literal["local", "weights"]
"""Where a training step draws its noise: "local" for each example in the outputs of a layer where that is possible, or
"weights", one draw of the weights for the whole batch."""

NOT_REENTRANT = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
"""What to do if a backward pass runs inside of the backward pass."""


class Noisy(nn.Module):
    """A copy of a user's network in which the weights of some layers are random.

    Its parameters are those of the network, in which a random weight mostly is a mean, and those of the family. Each
    call draws new noise from torch's global generator.
    """

    kl_weight: Tensor

    def __init__(
        self, module: nn.Module, family: Family, sites: tuple[Site, ...], estimator: Estimator, output: Output
    ) -> None:
        super().__init__()
        self.module, self.family, self.sites, self.estimator, self.output = module, family, sites, estimator, output
        self.own = nn.ParameterDict()
        self._is_checked = False
        """Whether a pass has shown that the network uses no weight with local noise outside of its layer."""
        self._keys: dict[str, dict[str, str]] = {}
        """For each random weight the names of the family's own parameters, and their keys in `own`."""
        for site in sites:
            if not family.has_means:
                nn.init.zeros_(site.weight)
                site.weight.requires_grad_(False)
            start = family.start(site.weight.detach(), site)
            self._keys[site.name] = {name: _key(site, name) for name in start}
            for name, value in start.items():
                self.own[_key(site, name)] = nn.Parameter(value)
        self.register_buffer("kl_weight", torch.ones((), device=sites[0].weight.device))

    @property
    def network(self) -> Network:
        """The network itself, with the present means."""
        return Network(self.module, self.output)

    def forward(self, inputs: Tensor | Inputs) -> Tensor:
        """Return outputs (N, ...) with noise."""
        return self._outputs(inputs, self.distributions())

    def outputs_and_divergence(self, inputs: Tensor | Inputs) -> tuple[Tensor, Tensor]:
        """Return outputs (N, ...) with noise, and KL(q || prior) of all weights."""
        given = self.distributions()
        return self._outputs(inputs, given), _divergence(given)

    def divergence(self) -> Tensor:
        """Return KL(q || prior) of all weights, in nats."""
        return _divergence(self.distributions())

    def distributions(self) -> dict[str, WeightDistribution]:
        """Return the present distribution of each random weight, by its name."""
        return {site.name: self.family.given(site.weight, self.parameters_of(site), site) for site in self.sites}

    def parameters_of(self, site: Site) -> dict[str, Tensor]:
        """Return the family's own parameters of one weight, by name."""
        own = self.own._parameters
        return {name: own[key] for name, key in self._keys[site.name].items()}  # type: ignore[misc]

    def _outputs(self, inputs: Tensor | Inputs, given: dict[str, WeightDistribution]) -> Tensor:
        local = [site for site in self.sites if self.is_local(site)]
        waiting, trains = {site.module_name for site in local}, torch.is_grad_enabled()

        def require_gradients(site: Site, *_: object) -> None:
            """Refuse a checkpoint whose backward pass would run the layer again, without its noise."""
            if trains and not torch.is_grad_enabled():
                raise _unfit_layer(site, "runs in an activation checkpoint with use_reentrant=True", NOT_REENTRANT)

        def drawn(site: Site, activations: Tensor) -> Tensor:
            if site.module_name not in waiting:
                raise _unfit_layer(site, "runs more than once")
            require_gradients(site)
            waiting.remove(site.module_name)
            if activations.ndim < site.weight.ndim:  # one example, without an axis of examples
                return given[site.name].outputs(site, activations[None])[0]
            return given[site.name].outputs(site, activations)

        others = [site for site in self.sites if site not in local]
        drawn_weights = {site.name: given[site.name].sample() for site in others}
        probes = {site.name: site.weight.detach().requires_grad_() for site in local if trains and not self._is_checked}
        outputs = self.network(
            inputs,
            tensors={**drawn_weights, **probes},
            before={site.module_name: partial(require_gradients, site) for site in others},
            instead={site.module_name: partial(drawn, site) for site in local},
            own_modes=True,
        )
        if waiting:
            raise _unfit_layer(next(site for site in local if site.module_name in waiting), "does not run")
        if probes and outputs.requires_grad:
            uses = torch.autograd.grad(outputs.sum(), list(probes.values()), retain_graph=True, allow_unused=True)
            for site, use in zip(local, uses, strict=True):
                if use is not None:
                    raise _unfit_layer(site, "shares its weight with another part of the forward pass")
            self._is_checked = True
        return outputs

    def is_local(self, site: Site) -> bool:
        """Whether the noise of a weight is drawn in the outputs of its layer."""
        return site.is_plain and self.family.is_local and self.estimator == "local"

    def posterior(self) -> WeightsPosterior:
        """Return the distribution over functions as it is now. Later training does not change it."""
        module = copy.deepcopy(self.module).eval().requires_grad_(False)
        sites = find_sites(module, dict.fromkeys(site.module_name for site in self.sites))
        own = {site.name: {n: t.detach().clone() for n, t in self.parameters_of(site).items()} for site in self.sites}
        return WeightsPosterior(Network(module, self.output), self.family, sites, own)


def _divergence(given: dict[str, WeightDistribution]) -> Tensor:
    first, *others = [each.divergence() for each in given.values()]
    return sum(others, first)  # gradients of a sum of two need no operation


def _key(site: Site, name: str) -> str:
    """Return the name of a parameter of the family. Names of parameters have no dots.

    >>> _key(Site("hidden.0.weight", "hidden.0", nn.Linear(1, 1), True), "log_std")
    'hidden:0:weight:log_std'
    """
    return f"{site.name}.{name}".replace(".", ":")


def _unfit_layer(site: Site, how: str, before: str = "") -> BatchbayesError:
    return unfit_for_local_noise(f"{site.module_name}, which {how}", before)


def unfit_for_local_noise(got: str, before: str = "") -> BatchbayesError:
    """Return the error for a network that local noise cannot serve. `before` is what to do first."""
    other = 'pass estimator="weights", which draws the weights themselves, or name the other layers by layers='
    return BatchbayesError(
        expected="layers that run once in a training step, to draw their noise",
        got=got,
        fix=f"{before}, and {other}" if before else other,
    )


@checked
def noisy(
    model: nn.Module,
    family: Family,
    *,
    layers: Iterable[str] | None = None,
    start: Literal["means", "fresh"] = "means",
    estimator: Estimator = "local",
    output: Output = None,
    seed: int = 0,
) -> Noisy:
    """Make the weights of a network random, to be trained with `fit_noisy`.

    The network is copied and not changed. Biases and all parameters of other layers stay ordinary parameters.

    Args:
        model: any network, trained or not.
        family: how the weights are distributed, for example `MeanField()` or `SparseVD()`.
        layers: the names of the layers; all linear, convolutional and recurrent ones by default.
        start: where training starts: "means" at the weights of the network, "fresh" at new ones that the layers draw.
        estimator: where a training step draws its noise (see `Estimator`).
        output: which output counts, if the network returns several.
        seed: sets the start.

    >>> from batchbayes.methods.weights.mean_field import MeanField
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> noisy(network, MeanField()).posterior()
    WeightsPosterior(mean-field on Sequential: 24 weights in 2 layers)
    """
    network = as_network(model, output)
    if not isinstance(family, Family):
        raise BatchbayesError(
            expected="a family of weights, such as bb.MeanField()",
            got=f"{family!r}"[:200],
            fix="call one of the families; bb.variational takes a likelihood as likelihood=",
        )
    module = own_copy(network.module)
    sites = find_sites(module, layers)
    with GlobalStream(seed):
        for layer in {id(site.module): site.module for site in sites}.values() if start == "fresh" else ():
            reset: Callable[[], Any] = layer.reset_parameters  # type: ignore[assignment]
            reset()
        return Noisy(module, family, sites, estimator, output)
