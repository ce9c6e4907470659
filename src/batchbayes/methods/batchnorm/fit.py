"""What all methods that read mini-batches have in common: check the network, gather rows, look for trouble."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes._common.progress import progress
from batchbayes._common.rng import GlobalStream
from batchbayes.batches import Batches, mini_batches
from batchbayes.engines.linear import MOST_OUTPUTS
from batchbayes.engines.linear_check import keep_examples
from batchbayes.engines.sample import sampled_outputs
from batchbayes.errors import BatchbayesError, warn
from batchbayes.inputs import Picker, require_finite
from batchbayes.methods.batchnorm.condition import drift_message, order_message, warn_of_condition
from batchbayes.methods.batchnorm.omega import collect_omegas, is_mean, running_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select, Site, find_sites
from batchbayes.network import Network, Output, as_network

FEW_OUTPUTS = 16
"""If a network has more outputs than this, the derivatives of all of them cost too much."""
SAMPLE_OUTPUTS = 4096
"""The influence of the rows is measured at this many outputs of each training input, or fewer."""
AXIS_EXAMPLES, AXIS_DRAWS = 128, 64
"""If there are many classes, so many examples of the first batch and draws show how they move together, or fewer."""


class MiniBatchOptions(TypedDict, total=False):
    """How mini-batches are read; see `mcbn`."""

    num_samples: int
    seed: int
    batch_size: int | None
    training_batch_size: int | None
    sites: Select
    inputs: Picker
    output: Output


class FitOptions(MiniBatchOptions, total=False):
    """All options of `mcbn` but one."""

    center: Center
    dropout: bool


class Prepared(NamedTuple):
    """A network, its sites, and a stream of training mini-batches of one size."""

    network: Network
    sites: tuple[Site, ...]
    idle: tuple[str, ...]
    """Layers that the first batch did not reach: no other may reach them either."""
    batch_size: int
    num_samples: int
    first: Any
    stream: Iterator[Any]
    random: GlobalStream
    """The random numbers that data loaders, augmentations and dropout draw."""


def prepare(
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    batch_size: int | None = None,
    training_batch_size: int | None = None,
    sites: Select = None,
    inputs: Picker = None,
    output: Output = None,
) -> Prepared:
    """Check the network and the data. The stream ends after `num_samples` mini-batches, or with the data."""
    whole_number("num_samples", num_samples)
    whole_number("seed", seed, least=None)
    if training_batch_size is not None:
        whole_number("training_batch_size", training_batch_size)
    network, random = as_network(model, output), GlobalStream(seed)
    for name, parameter in network.module.named_parameters():
        require_finite(parameter.detach(), f"the weights ({name})")
    with random:
        size, stream = mini_batches(batches, batch_size, picker=inputs, seed=seed)
        first = next(stream)
    if training_batch_size is not None and training_batch_size != size:
        warn(
            f"the statistics are those of batches of {size}, but the network was trained with batches of "
            f"{training_batch_size}: the spread is off by a factor of {(training_batch_size / size) ** 0.5:.2f}. "
            f"Pass batch_size={training_batch_size}."
        )
    found, idle = find_sites(network, first, sites)
    warn_of_condition(network.module, found)
    stream = islice(chain([first], _read_within(random, stream)), num_samples)
    return Prepared(network, found, idle, size, num_samples, first, stream, random)


def _read_within(random: GlobalStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Read each batch inside the random stream."""
    while True:
        with random:
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def fit_rows(prepared: Prepared, method: str, center: Center, dropout: bool) -> tuple[Tensor, BatchNormPosterior]:
    """Return omega of each mini-batch, (R, D), and the posterior of these rows."""
    rows = _gather_rows(prepared, dropout)
    return rows, _posterior_from_rows(prepared, rows, center, method)


def _gather_rows(prepared: Prepared, dropout: bool) -> Tensor:
    """Return omega of each mini-batch, (R, D). Raise an error if several were asked for and all are the same."""
    random = prepared.random if dropout else None
    omegas = collect_omegas(prepared.network, prepared.sites, prepared.stream, idle=prepared.idle, dropout=random)
    rows = torch.stack(list(progress(omegas, "batch statistics", prepared.num_samples)))
    mean = is_mean(prepared.sites)
    relative = rows - rows.mean(0)
    relative[:, mean] /= rows.mean(0)[~mean].exp()  # shifts of the mean, in standard deviations
    if prepared.num_samples > 1 and relative.abs().max() < 100 * torch.finfo(rows.dtype).eps:
        raise BatchbayesError(
            expected="mini-batches with different statistics",
            got=f"zero spread at every site over {len(rows)} mini-batches of {prepared.batch_size}",
            fix="pass several batches of different examples: when one batch is the whole training set, "
            "every draw is the same network",
        )
    return rows


def _posterior_from_rows(prepared: Prepared, rows: Tensor, center: Center, method: str) -> BatchNormPosterior:
    """Return the posterior of observed rows. Warn if they do not look like those of training."""
    first = prepared.sites[0]
    for message in (drift_message(first, rows, center), order_message(first, rows, prepared.batch_size)):
        if message:
            warn(message)
    mean = rows.mean(0)
    middle = mean if center == "batches" else running_omega(prepared.sites)
    size = float(prepared.batch_size)
    fixed = (prepared.network, prepared.sites, middle, rows - mean, size, method, center)
    posterior = BatchNormPosterior(*fixed, idle=prepared.idle)
    if len(rows) < 2:
        return posterior
    few = prepared.first[: min(32, max(2, prepared.batch_size // 4))]
    drawn, are_maps = _draw_outputs(posterior, few, len(rows))
    moved = (drawn - drawn.mean(0)).flatten(1).double()  # (R, n * outputs), in the order of the draws
    _, weights, index = posterior.combinations(len(rows), seed=0)
    order = weights[index].double()  # draws -> rows: a permutation
    influence = (order.T @ (moved @ moved.T) @ order).to(rows.dtype)
    posterior, count = replace(posterior, influence=influence), drawn.shape[2]
    if not are_maps and FEW_OUTPUTS < count <= MOST_OUTPUTS:
        from batchbayes.methods.batchnorm.leading import find_output_axes

        drawn, _ = _draw_outputs(posterior, prepared.first[:AXIS_EXAMPLES], min(AXIS_DRAWS, len(rows)))
        axes = find_output_axes(drawn)
        posterior = replace(posterior, output_axes=axes and axes.to(rows))
    is_few, by_classes = count <= FEW_OUTPUTS, posterior.knows_classes
    kinds = {False: is_few or not by_classes, True: count > 1 and (is_few or by_classes)}  # without and with contrasts
    keep_examples(posterior, prepared.first, [kind for kind, wanted in kinds.items() if wanted], are_maps=are_maps)
    return posterior


def _draw_outputs(posterior: BatchNormPosterior, examples: Any, num_samples: int) -> tuple[Tensor, bool]:
    """Return draws on some examples, (S, n, outputs), and whether the outputs of the network are maps.

    Of maps, which are large, an even selection is kept, at once.
    """
    thinned, are_maps = [], False
    with torch.no_grad():
        for outputs in sampled_outputs(posterior, examples.to(posterior.device), num_samples, seed=0):
            are_maps = outputs.ndim > 3
            flat = outputs.reshape(*outputs.shape[:2], -1)
            last = flat.shape[-1] - 1
            thinned.append(flat[..., torch.linspace(0, last, min(SAMPLE_OUTPUTS, last + 1)).long()])
    return torch.cat(thinned), are_maps


def require_center(center: str) -> None:
    """Raise an error unless the centre is one of the two that exist."""
    if center not in ("batches", "running"):
        raise BatchbayesError(expected='center="batches" or "running"', got=repr(center), fix="choose one of them")
