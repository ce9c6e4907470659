"""What a fit measures of a batch-norm posterior, on at most 64 of its training examples.

The outputs at the centre, of a few draws and of small steps towards them say how linear the network is in its
statistics. A few backward passes say how far each row moves the outputs. Together that is about twelve passes, and
neither a prediction nor a file needs another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchbayes.engines.check import (
    CHECK_EXAMPLES,
    FEWEST_MAPS,
    MAP_POSITIONS,
    Linearity,
    compared,
    slopes_along,
    spread_sample,
    trial_of,
    usual_size,
)
from batchbayes.engines.linear import MOST_OUTPUTS
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.leading import OutputAxes, find_output_axes
from batchbayes.network.inputs import Whole, tensors_of
from batchbayes.network.replicas import one_call
from batchbayes.network.source import spread_evenly
from batchbayes.state import Codec, File, State

if TYPE_CHECKING:
    from batchbayes.methods.batchnorm.posterior import BatchNormPosterior

FEW_OUTPUTS = 16
"""If a network has more outputs than this, the derivatives of all of them cost too much."""
MOST_MAPS = 4
"""Maps have more to say than vectors, and take longer."""
AXES = ("output_axes", "output_positions", "output_covariances")
"""The names in files of the tensors of output axes."""
KINDS = {"values": False, "contrasts": True}
"""The names in files of what was measured without contrasts, and with them."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What was measured of one posterior. A changed posterior does not take the facts of the old one for its own."""

    of: tuple[object, ...] = ()
    """What the posterior was then: network, output, centre and deviations."""
    influence: Tensor | None = None
    """Gram matrix (R, R) of the output changes that the rows cause on some training inputs."""
    output_axes: OutputAxes | None = None
    """Axes along which the logits of training inputs move, if there are many classes."""
    linearity: Mapping[tuple[str, bool], Linearity] = field(default_factory=dict)
    """How linear the network is for a kind of noise, without contrasts and with them."""


NOTHING = Facts()


def _to_file(facts: Facts, posterior: "BatchNormPosterior") -> State:
    known, tensors = posterior.known, {}
    if known.influence is not None:
        tensors["influence"] = known.influence
    if known.output_axes:
        tensors |= dict(zip(AXES, known.output_axes.tensors(), strict=True))
    found = {name: posterior.linearity(contrasts=each) for name, each in KINDS.items()}
    return {"linearity": {name: asdict(each) for name, each in found.items() if each}}, tensors


def _from_file(file: File) -> Facts:
    tensors, header, of = file.tensors, file.header, (file.network.module, file.network.output)
    axes = OutputAxes(*(tensors[name] for name in AXES)) if AXES[0] in tensors else None
    found = header.get("linearity", {}).items()
    linearity = {(header["noise"], KINDS[name]): Linearity.of(own) for name, own in found}
    return Facts((*of, file.known["center"], file.known["deviations"]), tensors.get("influence"), axes, linearity)


FACTS = Codec(_to_file, _from_file)


def with_facts(posterior: "BatchNormPosterior", batches: Sequence[Any], are_maps: bool) -> "BatchNormPosterior":
    """Return the posterior with what some training batches tell of it. Of maps, few examples are enough.

    A network that gradients cannot pass through, or that does not run on these examples alone, tells nothing.
    """
    if posterior.is_point or isinstance(batches[0], Whole):
        return posterior
    forms = [[tensor.shape[1:] for tensor in tensors_of(batch)] for batch in batches]
    examples = torch.cat([batch for batch, form in zip(batches, forms, strict=True) if form == forms[0]])
    try:
        with one_call(), torch.inference_mode(False), torch.no_grad():
            return replace(posterior, facts=_measured(posterior, examples, are_maps))
    except (BatchbayesError, RuntimeError, Warning):  # the latter if warnings are errors
        return posterior


def _measured(posterior: "BatchNormPosterior", examples: Any, are_maps: bool) -> Facts:
    fewest = FEWEST_MAPS if are_maps else CHECK_EXAMPLES[0]
    sample = spread_sample(examples[:MOST_MAPS] if are_maps else examples, fewest).to(posterior.device)
    trial = trial_of(posterior, sample)
    num_outputs, kinds, slopes = trial.middle[0, 0].numel(), [False], None
    influence = axes = None
    if are_maps and posterior.noise != "factorised":
        influence = _gram(_outputs_of_rows(posterior, sample[:FEWEST_MAPS]))
    elif not are_maps:
        kinds = [False, True] if 1 < num_outputs <= MOST_OUTPUTS else [False]
        slopes = slopes_along(posterior, sample, trial.directions)
        influence = _gram(slopes) if posterior.noise != "factorised" else None
        if FEW_OUTPUTS < num_outputs <= MOST_OUTPUTS:
            axes = find_output_axes(trial.exact, trial.middle[0])
    known = kinds if len(sample) >= fewest else []  # fewer examples say little
    linearity = {(posterior.noise, kind): compared(trial, slopes, slice(None), contrasts=kind) for kind in known}
    like = posterior.deviations
    return Facts(posterior.now, None if influence is None else influence.to(like), axes and axes.to(like), linearity)


def _gram(moved: Tensor) -> Tensor:
    """Return the products of what rows do to outputs (R, n, ...), (R, R)."""
    moved = (moved - moved.mean(0)).flatten(1).double()
    return moved @ moved.T


def _outputs_of_rows(posterior: "BatchNormPosterior", sample: Any) -> Tensor:
    """Return outputs of each row on a few examples of which the outputs are maps, (R, n, positions)."""
    size = max(1, usual_size(sample) // len(sample))
    found = []
    for rows in posterior.deviations.split(size):
        index = torch.arange(len(rows)).repeat_interleave(len(sample))
        outputs = posterior.at_each(posterior.center + rows, index)(torch.cat([sample] * len(rows))).flatten(1)
        found.append(outputs[:, spread_evenly(outputs.shape[1], MAP_POSITIONS)].cpu().unflatten(0, (len(rows), -1)))
    return torch.cat(found)
