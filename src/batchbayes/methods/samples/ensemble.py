r"""Ensembles: several networks, or several posteriors, that predict together.

What is random: which member predicts. Members may differ in weights, in architecture and in method: the network as it
is, MCBN, dropout, views.
q(f): $\frac1S\sum_s q_s(f)$, where $q_s$ is the posterior of member s. Members are dealt like cards, so that each comes
once before any comes again.
Cost: none for the fit; a draw is a draw of one member.
Reference: Lakshminarayanan, Pritzel, Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles", NeurIPS 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import nn

from batchbayes._common.rng import dealt
from batchbayes.errors import BatchbayesError
from batchbayes.methods.samples.members import inner_draw, require_finite_member
from batchbayes.methods.table import find_method, from_named_state, named_state
from batchbayes.network.function import Function, Network, Output
from batchbayes.posterior import Posterior
from batchbayes.state import Codec, File, State, coded, several

_STATES = several("members", "")


def _to_file(members: tuple[Posterior, ...], own: "EnsemblePosterior") -> State:
    header, tensors = _STATES.write([named_state(member) for member in members], own)
    if any(each.get("own") for each in header["members"]):
        raise BatchbayesError(
            expected="an ensemble that a file can hold",
            got="members whose views are functions of your own, which could not be passed again to load",
            fix="put the views around the ensemble: with_views(ensemble([...]), transform)",
        )
    return header | {"module_of_member": own.modules()[1]}, tensors


def _from_file(file: File) -> tuple[Posterior, ...]:
    """Build the members again. If they have several networks, the model is a list of them, in their order."""
    modules = list(file.model) if isinstance(file.model, nn.ModuleList | list | tuple) else [file.model]
    places = file.header["module_of_member"]
    if len(modules) != max(places) + 1:
        raise BatchbayesError(
            expected=f"the {max(places) + 1} networks of the ensemble, in their order",
            got=f"{len(modules)}",
            fix="pass load(path, nn.ModuleList([first, second, ...]))",
        )
    states = zip(_STATES.read(file), places, strict=True)
    return tuple(from_named_state(header, tensors, modules[place]) for (header, tensors), place in states)


@dataclass(frozen=True, eq=False)
class EnsemblePosterior(Posterior):
    """Functions that are draws of one of several posteriors."""

    kind: ClassVar[str] = "ensemble"

    members: tuple[Posterior, ...] = field(metadata=coded(Codec(_to_file, _from_file)))

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    @property
    def num_functions(self) -> int | None:  # type: ignore[override]
        return len(self.members) if all(member.is_point for member in self.members) else None

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The network of all members; if they have several, a `ModuleList` of these networks."""
        modules, _ = self.modules()
        return Network(modules[0] if len(modules) == 1 else nn.ModuleList(modules))

    def __repr__(self) -> str:
        kinds = list(dict.fromkeys(type(member).__name__ for member in self.members))
        more = f" and {len(kinds) - 2} more kinds" if len(kinds) > 2 else ""
        return f"{type(self).__name__}({len(self.members)} members: {', '.join(kinds[:2])}{more})"

    def draw(self, seed: int, index: int) -> Function:
        """Return a draw of the member whose turn it is."""
        number = dealt(seed, index, len(self.members))
        member = self.members[number]
        drawn = member.draw(*inner_draw(seed, index, number, len(self.members)))
        if member.device == self.device:
            return drawn
        return lambda inputs: drawn(inputs.to(member.device)).to(self.device)

    def with_output(self, output: Output) -> Self:
        return replace(self, members=tuple(member.with_output(output) for member in self.members))

    def modules(self) -> tuple[list[nn.Module], list[int]]:
        """Return the networks of all members, each once, and for each member the position of its network."""
        every: list[nn.Module] = [member.network.module for member in self.members]  # type: ignore[attr-defined]
        unique = list(dict.fromkeys(every))
        return unique, [unique.index(module) for module in every]


def ensemble(members: Sequence[nn.Module | Posterior]) -> EnsemblePosterior:
    """Let several networks or posteriors predict together.

    If all members are networks as they are, prediction makes as many draws as there are members, whatever `num_samples`
    asks for. With noise inside the members the draws are shared out evenly.

    Args:
        members: two or more networks or posteriors, whose outputs have the same shape and meaning. They stay where they
            are and are not copied. A file made by `save` does not hold their weights: load it with a
            `ModuleList` of the networks. `weight_samples` keeps the weights in its file.

    >>> import batchbayes as bb
    >>> networks = [nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3)) for width in (4, 8, 16)]
    >>> posterior = ensemble(networks)
    >>> posterior
    EnsemblePosterior(3 members: PointPosterior)
    >>> bb.predict(posterior, torch.randn(5, 2), bb.categorical()).num_samples
    3
    """
    if not isinstance(members, list | tuple) or len(members) < 2:
        raise BatchbayesError(
            expected="a list of two members or more",
            got=f"{len(members)}" if isinstance(members, list | tuple) else f"a {type(members).__name__}",
            fix="pass several networks; for a single one use bb.deterministic(model)",
        )
    found = [m if isinstance(m, Posterior) else find_method("deterministic")(m) for m in members]
    if homeless := [type(m).__name__ for m in found if not isinstance(getattr(m, "network", None), Network)]:
        raise BatchbayesError(
            expected="posteriors that know their network",
            got=f"a {homeless[0]} without the attribute network",
            fix="give the class of this posterior an attribute network",
        )
    for number, member in enumerate(found):
        module = member.network.module  # type: ignore[attr-defined]
        require_finite_member(dict(module.named_parameters()), dict(module.named_buffers()), number)
    if all(member.is_point and member.network.module is found[0].network.module for member in found):  # type: ignore[attr-defined]
        raise BatchbayesError(
            expected="members that differ",
            got=f"the same network {len(found)} times, which always agrees with itself",
            fix="pass networks that were trained from different starts",
        )
    return EnsemblePosterior(tuple(found))
