r"""Samples of the weights of one network: the posterior of deep ensembles, snapshots, SWAG, SG-MCMC and others.

What is random: all parameters and buffers of the network, so also the running statistics of batch norm.
q(w): the empirical distribution of S state dicts, the members. A draw is one member, dealt like cards. Inside each
member another posterior may add its own noise, such as MCBN or dropout.
Cost: the weights are kept as one stack (S, ...) of each tensor. After `load` they stay in the file: a draw reads one
member, so that memory is that of one network. A draw is one forward pass.
Reference: Lakshminarayanan et al., NeurIPS 2017 (ensembles); Teye et al., ICML 2018 (batch norm inside).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes._common.files import rows, under
from batchbayes._common.progress import progress
from batchbayes._common.rng import dealt
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import COUNTER, inner_draw, require_finite_member, state_of
from batchbayes.methods.table import from_named_state, named_state
from batchbayes.network.copies import plain_name
from batchbayes.network.function import Function, Network, Output, as_network, modules_by_name, require_layout
from batchbayes.network.inputs import Picker
from batchbayes.network.source import Batches, Source
from batchbayes.network.tap import tapping
from batchbayes.patch import Mean, Patch
from batchbayes.posterior import Header, Posterior
from batchbayes.state import Codec, File, State, coded, several


def _layout(module: nn.Module) -> list[list[Any]]:
    return [[name, str(t.dtype), list(t.shape)] for name, t in state_of(module).items()]


def _weights_to_file(weights: Mapping[str, Tensor], samples: "WeightSamples") -> tuple[Header, dict[str, Tensor]]:
    return {"layout": _layout(samples.network.module)}, {f"weights.{name}": each for name, each in weights.items()}


def _weights_from_file(file: File) -> Mapping[str, Tensor]:
    module = file.network.module
    require_layout(module, file.header["layout"], _layout(module), "weight", "tensor {} of {} and shape {}")
    return under(file.tensors, "weights.")


@dataclass(frozen=True, eq=False)
class WeightSamples(Posterior):
    """Functions that are one network with different weights."""

    kind: ClassVar[str] = "weight-samples"
    needs_weights: ClassVar[bool] = False

    network: Network
    """The network. Its own weights do not matter."""
    weights: Mapping[str, Tensor] = field(metadata=coded(Codec(_weights_to_file, _weights_from_file)))
    """Each parameter and buffer of all members, (S, ...)."""
    num_members: int
    method: str
    noise: tuple[State, ...] = field(metadata=coded(several("noise", "noise.")), default=())
    """For each member the posterior inside it, if there is one."""
    num_chains: int = 1
    """Of MCMC. Members come chain by chain, each chain in its order."""
    log_posterior: Tensor | None = None
    """The trace of MCMC, (S,): up to a constant, the mean log posterior over the steps before each sample."""

    @property
    def num_functions(self) -> int | None:  # type: ignore[override]
        return None if self.noise else self.num_members

    def __len__(self) -> int:
        return self.num_members

    def __repr__(self) -> str:
        inside = f", {self.noise[0][0]['kind']} inside" if self.noise else ""
        chains = f" in {self.num_chains} chains" if self.num_chains > 1 else ""
        return f"{type(self).__name__}({self.method} on {self.network}: {len(self)} members{chains}{inside})"

    def draw(self, seed: int, index: int) -> Function:
        """Return the network with the weights of the member whose turn it is."""
        number = dealt(seed, index, len(self))
        if not self.noise:
            return Patch(self.network, self.tensors(number))
        return _on(self.network, self._inside(number).draw(*inner_draw(seed, index, number, len(self))))

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the weights of one member, on the device of the network."""
        device = self.device
        return {name: tensor.to(device) for name, tensor in rows(self.weights, number).items()}

    def member(self, number: int) -> nn.Module:
        """Return a copy of the network with the weights of one member, in evaluation mode."""
        module = copy.deepcopy(self.network.module).eval()
        own = state_of(module)
        with torch.no_grad():
            for name, tensor in self.tensors(number).items():
                own[name].copy_(tensor)
        return module

    def with_noise(self, fit: Callable[[nn.Module], Posterior]) -> Self:
        """Return the same members, with the posterior `fit(member)` inside each of them.

        >>> import batchbayes as bb
        >>> networks = [nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(4)]
        >>> samples = weight_samples(networks[0], [network.state_dict() for network in networks])
        >>> samples.with_noise(lambda member: bb.mcbn(member, torch.randn(64, 2), batch_size=16))
        WeightSamples(weight_samples on Sequential: 4 members, batchnorm inside)
        """
        fitted = [fit(self.member(number)) for number in progress(range(len(self)), "fitting members", len(self))]
        return replace(self, noise=tuple(named_state(posterior) for posterior in fitted))

    def with_statistics(self, batches: Batches, *, inputs: Picker = None) -> Self:
        """Return the same members with running statistics of batch norm that are computed anew from training batches.

        Weights that were averaged or moved need this. `batches` is read once for each member, and all weights come into
        memory.
        """
        found = [
            running_statistics(self.network, self.tensors(number), batches, inputs)
            for number in progress(range(len(self)), "batch statistics", len(self))
        ]
        renewed = {name: torch.stack([own[name].cpu() for own in found]) for name in found[0]}
        kept = {name: self.weights[name] for name in self.weights if name not in renewed}
        return replace(self, weights={**kept, **renewed})

    def _inside(self, number: int) -> Posterior:
        header, tensors = self.noise[number]
        inside = from_named_state(header, tensors, self.member(number))
        own = self.network.output
        return inside if header.get("output") == own else inside.with_output(own)

    def require_sound(self) -> None:
        if any(type(number) is not int for number in (self.num_members, self.num_chains)):
            raise TypeError(f"{self.num_members!r} members in {self.num_chains!r} chains")


def _on(network: Network, drawn: Function) -> Function:
    """Return a draw inside a member as one that puts all weights of the member into the network."""
    if isinstance(drawn, Mean):
        return Mean(tuple(_on(network, part) for part in drawn.parts))
    if not isinstance(drawn, Patch) or not isinstance(drawn.network, Network):
        return drawn
    return replace(drawn, network=network, tensors={**state_of(drawn.network.module), **drawn.tensors})


@torch.no_grad()
def running_statistics(
    network: Network, tensors: Mapping[str, Tensor], batches: Batches, inputs: Picker
) -> dict[str, Tensor]:
    """Return the running means and variances of all batch-norm layers for the weights `tensors`, by training batches.

    They are the plain means of the statistics of the batches, as `torch.optim.swa_utils.update_bn` computes them: the
    variances are unbiased, and each batch counts the same.
    """
    every = modules_by_name(network.module, _BatchNorm)
    layers = [name for name, layer in every.items() if layer.running_mean is not None]  # others always use the batch
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def look(name: str, values: Tensor) -> None:
        variance, mean = torch.var_mean(values, [axis for axis in range(values.ndim) if axis != 1])
        seen[f"{name}.running_mean"].append(mean)
        seen[f"{name}.running_var"].append(variance)

    blank: dict[str, Tensor | None] = {f"{n}.running_{kind}": None for n in layers for kind in ("mean", "var")}
    with tapping(network, layers, look, tensors={**tensors, **blank}) as run:
        for batch in Source(batches, inputs).inputs():
            run(batch)
    if not seen:
        raise BatchbayesError(
            expected="training batches, and a network with batch norm",
            got=f"{len(layers)} batch-norm layers, and none of them saw a batch",
            fix="pass a list or a DataLoader, since each member reads the batches, and an iterator can be read only "
            "once; a network without batch norm has no running statistics",
        )
    return {name: torch.stack(parts).mean(0) for name, parts in seen.items()}


def weight_samples(model: nn.Module, states: Iterable[Mapping[str, Tensor]], *, output: Output = None) -> WeightSamples:
    """Take several state dicts of one network as samples of its weights.

    Args:
        model: the network. It is not changed, and its own weights do not matter.
        states: two or more state dicts, for example from several files of weights. They are copied.
        output: which output counts, if the network returns several.

    >>> networks = [nn.Linear(2, 3) for _ in range(5)]
    >>> weight_samples(networks[0], [network.state_dict() for network in networks])
    WeightSamples(weight_samples on Linear: 5 members)
    """
    return stack_states(as_network(model, output), list(states), "weight_samples")


def stack_states(network: Network, states: Sequence[Mapping[str, Tensor]], method: str) -> WeightSamples:
    """Return the posterior whose members are these state dicts, or refuse them."""
    if len(states) < 2:
        fix = "pass more sets of weights; for a single network use bb.deterministic(model)"
        raise BatchbayesError("two members or more", f"{len(states)}", fix)
    own = state_of(network.module)
    plain = [{_own_name(name, own): tensor for name, tensor in state.items()} for state in states]
    parameters = {plain_name(name) for name, _ in network.module.named_parameters(remove_duplicate=False)}
    for number, state in enumerate(plain):
        _require_fitting(own, state, number)
        trained = {name: state[name] for name in own if name in parameters}
        require_finite_member(trained, {name: state[name] for name in own if name not in trained}, number)
    stacked = {name: torch.stack([state[name].detach().to(own[name].dtype).cpu() for state in plain]) for name in own}
    if all(bool((tensor == tensor[:1]).all()) for tensor in stacked.values()):
        got = f"{len(plain)} members that are all the same"
        fix = "check that each member was trained from its own random start, or loaded from its own file"
        raise BatchbayesError("members that differ in their weights", got, fix)
    return WeightSamples(network, stacked, len(plain), method)


def _own_name(name: str, own: Mapping[str, Tensor]) -> str:
    """Return the name that a tensor has in the network itself, without what DataParallel and torch.compile add."""
    plain = plain_name(name)
    return plain if plain in own else plain.removeprefix("module.")


def _require_fitting(own: Mapping[str, Tensor], state: Mapping[str, Tensor], number: int) -> None:
    """Refuse a state dict of another network."""
    names = [*own, *(name for name in state if name not in own and not name.endswith(COUNTER))]
    for name in names:
        shapes = [tuple(getattr(each[name], "shape", ())) if name in each else None for each in (own, state)]
        wanted, found = (f"no tensor {name}" if s is None else f"a tensor {name} of shape {s}" for s in shapes)
        if wanted != found:
            fix = "pass state dicts of one network; bb.ensemble([...]) takes networks of different shapes"
            raise BatchbayesError(f"{wanted} in every member", f"{found} in member {number}", fix)
