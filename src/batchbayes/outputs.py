"""Several outputs of one network under one set of draws: a draw returns them side by side, as one tensor (N, D)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions

from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood, require_likelihood
from batchbayes.network.function import Output, pick_output
from batchbayes.posterior import Posterior


class SideBySide:
    """Picks several outputs of a network, and remembers their shapes, so that they can be taken apart again."""

    def __init__(self, picks: Mapping[Any, Output]) -> None:
        self._picks = dict(picks)
        self._shapes: dict[Any, torch.Size] = {}

    def __call__(self, outputs: Any) -> Tensor:
        picked = {name: pick_output(outputs, pick) for name, pick in self._picks.items()}
        if len({t.shape[:1] for t in picked.values()}) > 1 or not all(t.is_floating_point() for t in picked.values()):
            raise BatchbayesError(
                expected="outputs of real numbers, with one row for each example",
                got=", ".join(f"{name!r} {tuple(t.shape)} of {t.dtype}" for name, t in picked.items()),
                fix="pick others, or bring them to this form by functions, as in {name: (function, likelihood)}",
            )
        self._shapes = {name: tensor.shape[1:] for name, tensor in picked.items()}
        return torch.cat([tensor.reshape(len(tensor), -1) for tensor in picked.values()], 1)

    def part(self, name: Any, draws: Tensor) -> Tensor:
        """Return one of the outputs, (S, N, ...), from draws of all of them, (S, N, D)."""
        names = list(self._shapes)
        sizes = [self._shapes[each].numel() for each in names]
        return draws.split(sizes, -1)[names.index(name)].reshape(*draws.shape[:2], *self._shapes[name])


@dataclass(frozen=True, eq=False)
class Part(Likelihood[Any]):
    """The likelihood of one of several outputs that stand side by side."""

    name: Any
    likelihood: Likelihood[Any]
    packed: SideBySide

    def __call__(self, outputs: Tensor) -> distributions.Distribution:
        return self.likelihood(self.packed.part(self.name, outputs))

    def summary(self) -> "_PartSummary":
        return _PartSummary(self)


class _PartSummary:
    """The running summary of one output. Blocks are draws of all outputs."""

    def __init__(self, part: Part) -> None:
        self._part, self._inner = part, part.likelihood.summary()
        self.needs_draws = self._inner.needs_draws

    def add(self, block: Any) -> None:
        self._inner.add(self._part.packed.part(self._part.name, block))

    def finish(self, draws: Any) -> Any:
        return self._inner.finish(None if draws is None else self._part.packed.part(self._part.name, draws))


def side_by_side(
    posterior: Posterior, wanted: Mapping[Any, Any], engine: str
) -> tuple[Posterior, tuple[Likelihood[Any], ...]]:
    """Return the posterior with all outputs that are wanted side by side, and the likelihood of each.

    `wanted` has likelihoods, or pairs of a pick and a likelihood, by name. A name without a pick is the pick itself.
    """
    if not wanted:
        raise BatchbayesError("a likelihood for each output", "none", 'pass {"classes": bb.categorical()}, for example')
    if engine == "linear":
        raise BatchbayesError(
            expected="one output for the linear engine",
            got=f"{len(wanted)} likelihoods by name",
            fix='use engine="sample", or predict one output, fitted with output=',
        )
    pairs: dict[Any, tuple[Any, Any]] = {
        name: value if isinstance(value, tuple) and len(value) == 2 else (name, value) for name, value in wanted.items()
    }
    for _, likelihood in pairs.values():
        require_likelihood(likelihood)
    packed = SideBySide({name: pick for name, (pick, _) in pairs.items()})
    parts = tuple(Part(name, likelihood, packed) for name, (_, likelihood) in pairs.items())
    return posterior.with_output(packed), parts
