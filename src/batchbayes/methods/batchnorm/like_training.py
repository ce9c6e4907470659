r"""Are the network and the data as they were in training? The batch-norm layers tell.

**Layers** may have never been trained, or were frozen: then there is no noise to learn from.

**Inputs** of a layer should look like those of training, and its running statistics say what these looked like.
The inputs are standardised by the running statistics, so in training they had mean 0 and mean square 1 in each channel.
There are three numbers: the shift, which is the root mean square over channels of their means; the largest of these
means, because a mistake may reach few channels; and the spread, which is the mean square. All are means over examples,
so each has a t-test, and pixels of one image need not be independent. The running statistics lag behind the network,
and images of a test have no random crops. So the tests are not for a difference, but for one that is larger than a
tolerance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.errors import warn
from batchbayes.methods.batchnorm.omega import by_site, running_omega
from batchbayes.methods.batchnorm.sites import Site, some

LEVEL = 0.0025
"""How often each of the tests is wrong, at most, if the true difference is within the tolerance."""


class Tolerance(NamedTuple):
    """How far inputs may be from those of training."""

    shift: float
    """In standard deviations."""
    channel: float
    """The same in the channel that is furthest away."""
    spread: float
    """As a factor of the mean square, up or down."""


LOOSE = Tolerance(shift=0.4, channel=0.5, spread=3.0)
"""Further away is data that was prepared in another way. Test images that lack the random crops of training are at
0.16, 0.31 and a factor of 1.4 (docs/results/data-check.md)."""
STRICT = Tolerance(shift=0.07, channel=0.5, spread=1.15)
"""Further away are training batches that lack the transforms of training. They matter only if draws scatter around the
batches."""

UNMIXED = 4.0
"""Batches whose means vary by this factor more than those of random examples are not well mixed. With 8 batches of
random examples the factor is above 4 in fewer than one of a thousand cases."""


ALIKE = 4.0
"""By how many standard errors the ratio of von Neumann is below 1 if batches are like the ones before them. The
standard error of R random batches is about 1 / sqrt(R), so this is wrong once in 30,000 fits."""


def is_initial(layer: _BatchNorm) -> bool:
    """Whether the running statistics still have the values of a new layer: mean 0 and variance 1."""
    mean, variance = layer.running_mean, layer.running_var
    return mean is not None and variance is not None and not (bool(mean.any()) or bool((variance != 1).any()))


def is_settled(site: Site) -> bool:
    """Return whether the running statistics of a site describe its training data.

    They do not if they still have their initial values, nor after only a few batches of a moving average. If the
    counter is zero but the statistics are not the initial ones, a file of weights has left the counter out.
    """
    seen = site.layer.num_batches_tracked
    if not site.tracks or is_initial(site.layer):
        return False
    return seen is None or int(seen) == 0 or int(seen) * (site.layer.momentum or 1.0) >= 5


def is_frozen(module: nn.Module, layer: _BatchNorm) -> bool:
    """Whether a layer is in evaluation mode, or without gradients, while the rest of the network is trained."""
    others = [m for m in module.modules() if list(m.parameters(recurse=False)) and not isinstance(m, _BatchNorm)]
    if not layer.training and any(m.training for m in others):
        return True
    own = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
    return bool(own) and not any(own) and any(parameter.requires_grad for parameter in module.parameters())


def warn_of_condition(module: nn.Module, sites: Sequence[Site]) -> None:
    """Warn if layers have never been trained, or were frozen in training: then there is no noise to learn from."""
    initial = [site for site in sites if is_initial(site.layer)]
    if initial:
        which = "the batch-norm layers have" if len(initial) == len(sites) else _named(initial, sites, "has", "have")
        pristine = all(_has_initial_scale(site.layer) for site in initial)
        warn(
            f"{which} never been trained: their running statistics have the initial values, mean 0 and variance 1. "
            + ("Were the weights loaded?" if pristine else "Did the file of weights hold the buffers too?")
        )
    frozen = [site for site in sites if is_frozen(module, site.layer)]
    if frozen:
        warn(
            f"{_named(frozen, sites, 'is', 'are')} frozen (in evaluation mode or without gradients, while the rest of "
            "the network is trained). A layer that was frozen in training has seen no batch noise. Leave it out with "
            "sites=."
        )


def _named(few: Sequence[Site], sites: Sequence[Site], one: str, many: str) -> str:
    verb = one if len(few) == 1 else many
    return f"{len(few)} of {len(sites)} batch-norm layers ({some([site.name for site in few])}) {verb}"


def _has_initial_scale(layer: _BatchNorm) -> bool:
    scale, shift = layer.weight, layer.bias
    return (scale is None or bool((scale == 1).all())) and (shift is None or not bool(shift.any()))


def drift_message(site: Site, rows: Tensor, center: str) -> str | None:
    """Return a warning if the batches that rows (R, D) belong to do not look like those of training; else None.

    There is none for networks that never saw training data, because there is nothing to compare with, and none for
    fewer than 8 batches. The first site tells: what it sees does not depend on the statistics of other sites.
    """
    if len(rows) < 8 or not is_settled(site):
        return None
    (running_mean, running_log_std), (mean, log_std) = (
        by_site([site], omega)[0] for omega in (running_omega([site]), rows[:, : 2 * site.channels])
    )
    means = (mean - running_mean) / running_log_std.exp()
    squares = (2 * (log_std - running_log_std)).exp() + means.square()
    if how := difference(means, squares, LOOSE):
        return (
            "WARNING: the batches do not look like the training data. Probably they are not scaled or prepared as in "
            f"training. At {site.name}, the first batch-norm layer, their values {how} in training."
        )
    if center == "batches" and (how := difference(means, squares, STRICT)):
        return (
            f"at {site.name}, the first batch-norm layer, the values of the batches {how} in training. Do they pass "
            "through the same transforms as in training (crops, flips, scaling)? If so, or if they cannot be had, use "
            'center="running", which keeps the network\'s own answer and takes only the spread from the batches.'
        )
    return None


class Moved(NamedTuple):
    """How far draws are from the network's own answer. The unit of two is the spread of its answers over examples."""

    mean: float
    """The distance of the mean of the draws, in standard deviations."""
    spread: float
    """How much draws differ from each other, in standard deviations."""
    blurred: float
    """By how much draws raise the entropy of its answers, in nats, if these are logits."""


MOST = Moved(mean=0.3, spread=1.0, blurred=0.3)
"""A posterior beyond any of these has little to do with the network. Measured: draws for batches of 32 raise the
entropy of EfficientNet-lite0 by 0.51 nats, and its NLL by a tenth; those for 16 that of CIFAR ResNets by up to 0.18."""


def moved_message(found: Moved, center: str, batch_size: int, is_known: bool) -> str | None:
    """Return a warning if draws lie beside the network's own answer, scatter more than its answers do, or blur it.

    `is_known` says whether this is known to be the batch size of training.
    """
    apart = "as the network's answers lie from each other"
    if found.mean > MOST.mean:
        what = f"the mean of the draws lies {found.mean:.2g} times as far from the network's own answer {apart}"
    elif found.spread > MOST.spread:
        what = f"the draws scatter {found.spread:.2g} times as far around their mean {apart}"
    elif found.blurred > MOST.blurred:
        what = f"the draws raise the entropy of the network's answers by {found.blurred:.2g} nats"
    else:
        return None
    fix = "Use batches as large as those of training, or at_batch_size."
    if center == "batches":
        fix = "Give the batches the transforms of training, or use center='running', which keeps its own answer."
    if not is_known:
        unknown = "The batch size of training is not known (training_batch_size=)."
        fix = f"{unknown} If it was above {batch_size}, the draws are too wide. {fix}"
    return (
        f"WARNING: on training data, {what}. Predictions by these draws are not those of the network, and may be much "
        f"worse. {fix}"
    )


def order_message(site: Site, rows: Tensor, batch_size: int) -> str | None:
    r"""Return a warning if batches differ more from each other than random ones can; else None.

    The mean of M examples that are drawn at random varies by at most $\sigma^2 / M$, whatever the data are like.
    Batches that follow the order of the classes, or of time, vary up to M times as much. Where the pixels of one image
    vary more than the means of images, this bound is far away, but batches that follow each other are alike: the mean
    square of their differences is well below twice their variance (von Neumann's ratio). The first site tells.
    """
    if len(rows) < 8:
        return None
    mean, log_std = by_site([site], rows[:, : 2 * site.channels])[0]
    between, within = mean.var(0), (2 * log_std).exp().mean(0)
    ratio = float((between / (between + within)).mean()) * batch_size
    told = (
        f"the means of the batches vary {ratio:.3g} times as much as those of {batch_size} examples at random"
        if ratio >= UNMIXED
        else _neighbours_alike(mean[:, between > 0], between[between > 0])
    )
    if told is None:
        return None
    return (
        f"at {site.name}, the first batch-norm layer, {told}. Does the data come in the order of its classes, or of "
        "time? Shuffle it: use shuffle=True in the DataLoader, or pass a tensor or a Dataset and batch_size=."
    )


def _neighbours_alike(mean: Tensor, variance: Tensor) -> str | None:
    """Say that batches with these means (R, C) are like the ones before them; None if they can be random."""
    if not variance.numel():
        return None
    ratio = float((mean.diff(dim=0).square().mean(0) / (2 * variance)).mean())
    if ratio > 1 - ALIKE / len(mean) ** 0.5:
        return None
    return (
        f"batches are like the ones before them: their means differ {ratio**0.5:.2g} times as much as those of batches "
        "at random"
    )


def difference(means: Tensor, squares: Tensor, tolerance: Tolerance) -> str | None:
    """Say how inputs of a layer differ from those of training for certain; None if they are within the tolerance.

    Args:
        means: the mean over positions of the standardised input, for each example and channel, (N, C).
        squares: the mean over positions of its square, (N, C).
        tolerance: what is not worth a word.
    """
    along, each = shifts(means), means.mean(0).abs()
    if float(along.mean() - error(along)) > tolerance.shift:
        return f"lie {float(along.mean()):.2g} standard deviations away from those"
    certain = each > tolerance.channel + error(means, tests=2 * len(each))
    if bool(certain.any()):
        return f"lie up to {float(each[certain].max()):.2g} standard deviations away from those"
    spread = squares.mean(1)
    ratio, unsure = float(spread.mean()), float(error(spread))
    if ratio - unsure > tolerance.spread or ratio + unsure < 1 / tolerance.spread:
        return f"spread {ratio**0.5:.2g} times as far as those"
    return None


def shifts(means: Tensor) -> Tensor:
    """Return how far each example (N, C) lies from zero in the direction of the mean of all others, (N,).

    The unit is the root mean square over channels. The direction does not depend on the example itself, so a mean over
    examples is not above the true shift on average, however many channels there are.
    """
    others = means.sum(0) - means
    return (means * others).sum(1) / others.norm(dim=1).clamp_min(1e-30) / means.shape[1] ** 0.5


def error(values: Tensor, tests: int = 1) -> Tensor:
    """Return how far the means of some values (N, ...) are from the true ones, at most, in one direction.

    With several tests none of them is wrong more often than one alone would be.
    """
    return t_quantile(1 - LEVEL / tests, len(values) - 1) * values.std(0) / len(values) ** 0.5


def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t, by the first terms of its expansion around the normal one.

    >>> round(t_quantile(0.9975, 9), 2), round(t_quantile(0.9975, 100), 2)  # exact: 3.69 and 2.87
    (3.66, 2.87)
    """
    z = float(torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)))
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
