"""What all methods that read mini-batches have in common: check the network, gather rows, look for trouble."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from batchbayes._common.progress import progress
from batchbayes._common.rng import GlobalStream
from batchbayes._common.signatures import Count, Seed, checked
from batchbayes.engines.check import CHECK_EXAMPLES, usual_size
from batchbayes.errors import BatchbayesError, warn
from batchbayes.methods.batchnorm.facts import with_facts
from batchbayes.methods.batchnorm.like_training import (
    Moved,
    drift_message,
    is_settled,
    moved_message,
    order_message,
    warn_of_condition,
)
from batchbayes.methods.batchnorm.omega import collect_omegas, is_mean, running_omega
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select, Site, find_sites
from batchbayes.network.function import Network, Output, as_network
from batchbayes.network.inputs import Picker, Whole, each_tensor, require_finite
from batchbayes.network.source import Batches, MiniBatches, Source

SAMPLE_OUTPUTS = 4096
"""Outputs of each training input that are compared, or fewer."""
COMPARED = 8
"""Largest number of draws that are compared with the network's own answer."""
FEWEST_COMPARED = 8
"""They are compared on at least this number of examples, if a mini-batch has them."""


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

    center: Center | None
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
    drawn: MiniBatches
    """Where the mini-batches that were read come from."""
    training_batch_size: int | None
    """The batch size of training, if the user has said it."""
    answers: Tensor
    """What the network itself answers to examples of the first mini-batch, (n, outputs)."""
    examples: list[Any]
    """Copies of the first mini-batches that were read: as many as the facts are measured on."""


@checked
def prepare(
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: Count = 64,
    seed: Seed = 0,
    batch_size: int | None = None,
    training_batch_size: Count | None = None,
    sites: Select = None,
    inputs: Picker = None,
    output: Output = None,
) -> Prepared:
    """Check the network and the data. The stream ends after `num_samples` mini-batches, or with the data."""
    network, random = as_network(model, output, inputs), GlobalStream(seed)
    for name, parameter in network.module.named_parameters():
        require_finite(parameter.detach(), f"the weights ({name})")
    with random:
        source = Source(batches, inputs)
        drawn = source.mini_batches(batch_size, seed)
        size, first = drawn.batch_size, next(drawn)
    if training_batch_size is not None and training_batch_size != size:
        warn(
            f"the statistics are those of batches of {size}, but the network was trained with batches of "
            f"{training_batch_size}: the spread is off by a factor of {(training_batch_size / size) ** 0.5:.2f}. "
            f"Pass batch_size={training_batch_size}."
        )
    found, idle, outputs, _ = find_sites(network, first, sites)
    warn_of_condition(network.module, found)
    rest = drawn if source.is_rows else _read_within(random, drawn)  # tensors are shuffled by no global stream
    examples: list[Any] = []
    stream = noting(examples, islice(chain([first], rest), num_samples))
    answers = _thinned(outputs[None])[0]
    return Prepared(
        network, found, idle, size, num_samples, first, stream, random, drawn, training_batch_size, answers, examples
    )


def noting(examples: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Copy the first batches of a stream, because the user may change them, until there are enough examples."""
    for batch in batches:
        if sum(map(len, examples)) < max(CHECK_EXAMPLES[0], usual_size(batch)):
            examples.append(each_tensor(batch, torch.clone))
        yield batch


def _read_within(random: GlobalStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Read each batch inside the random stream."""
    while True:
        with random:
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def fit_rows(
    prepared: Prepared,
    method: str,
    center: Center | None,
    dropout: bool,
    change: Callable[[BatchNormPosterior, Tensor], BatchNormPosterior] = lambda posterior, rows: posterior,
) -> BatchNormPosterior:
    """Return the posterior of the rows that mini-batches show, changed by a method, with its facts."""
    rows, shape = _gather_rows(prepared, dropout)
    plain = _posterior_from_rows(prepared, rows, chosen_center(center, prepared.sites), method)
    return with_facts(change(plain, rows), prepared.examples, len(shape) > 2)


def _gather_rows(prepared: Prepared, dropout: bool) -> tuple[Tensor, torch.Size]:
    """Return omega of each mini-batch, (R, D), and the shape of the outputs of one of them.

    Raise an error if several were asked for and all are the same.
    """
    random, stream = (
        prepared.random if dropout else None,
        progress(prepared.stream, "batch statistics", prepared.num_samples),
    )
    rows, shape = collect_omegas(prepared.network, prepared.sites, stream, idle=prepared.idle, dropout=random)
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
    return rows, shape


def _posterior_from_rows(prepared: Prepared, rows: Tensor, center: Center, method: str) -> BatchNormPosterior:
    """Return the posterior of observed rows. Warn if they do not look like those of training."""
    first = prepared.sites[0]
    unlike = drift_message(first, rows, center)
    for message in (unlike, order_message(first, rows, prepared.batch_size)):
        if message:
            warn(message)
    mean = rows.mean(0)
    middle = mean if center == "batches" else running_omega(prepared.sites)
    size = float(prepared.batch_size)
    fixed = (prepared.network, prepared.sites, middle, rows - mean, size, method, center)
    drawn_from = {
        "num_examples": prepared.drawn.num_examples,
        "population": prepared.drawn.population(prepared.batch_size),
    }
    posterior = BatchNormPosterior(*fixed, idle=prepared.idle, **drawn_from)
    if not unlike and not isinstance(prepared.first, Whole):
        _compare_with_network(prepared, posterior)
    return posterior


def _thinned(outputs: Tensor) -> Tensor:
    """Return an even selection of the outputs of each example, (s, n, ...) -> (s, n, outputs)."""
    flat = outputs.reshape(*outputs.shape[:2], -1)
    last = flat.shape[-1] - 1
    return flat[..., torch.linspace(0, last, min(SAMPLE_OUTPUTS, last + 1)).long()]


@torch.no_grad()
def _compare_with_network(prepared: Prepared, posterior: BatchNormPosterior) -> None:
    """Warn if draws on some training inputs lie beside the network's own answer, or hide it.

    The unit is the standard deviation of the network's answers over examples: what it has to say about them. All draws
    run in one pass, which costs about as much as that of a mini-batch.
    """
    answers = prepared.answers.cpu().double()
    unit = float(answers.var(0).mean().sqrt())
    told_apart = unit > 100 * torch.finfo(torch.float32).eps * float(answers.abs().max())
    if not (told_apart and all(is_settled(site) for site in prepared.sites)):
        return
    draws = min(COMPARED, len(posterior.deviations))
    few = prepared.first[: min(32, max(FEWEST_COMPARED, prepared.batch_size // draws))]
    outputs = posterior.draw_together(0, range(draws))(few.to(posterior.device))
    drawn, own = _thinned(outputs).cpu().double(), answers[: len(few)]
    spread = float(drawn.var(0, correction=draws > 1).mean())
    moved = float((drawn.mean(0) - own).square().mean()) - spread / draws  # without their noise
    before, after = own.softmax(-1), drawn.softmax(-1).mean(0)  # if the outputs are logits
    blurred = mean_entropy(after) - mean_entropy(before) if outputs.ndim == 3 and outputs.shape[2] > 2 else 0.0
    found = Moved(max(moved, 0.0) ** 0.5 / unit, spread**0.5 / unit, blurred)
    is_known = prepared.training_batch_size is not None
    if message := moved_message(found, posterior.centered_on, prepared.batch_size, is_known):
        warn(message)


def mean_entropy(probs: Tensor) -> float:
    """Return the mean over examples of the entropy of probabilities (N, K), in nats."""
    return -float(torch.special.xlogy(probs, probs).sum(-1).mean())


def chosen_center(center: Center | None, sites: Sequence[Site]) -> Center:
    """Return the centre that was asked for, or else the running statistics, if all layers have them."""
    return center or ("running" if all(site.tracks for site in sites) else "batches")
