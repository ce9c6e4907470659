r"""Statistics that follow the data: what batch norm normalises by after a drift, from a window of n inputs.

At a site, let $t$ be the statistics of the window (mean, log standard deviation of each channel) and $c$ those that
ordinary inputs would have. If nothing has changed, $t$ scatters around $c$ with a variance $v$ that is known. The
positive part of James and Stein then says how far to believe the window, with the means over the channels of the site:

$$\lambda = \max\bigl(0,\; 1 - \overline{v} \,/\, \overline{(t - c)^2}\bigr), \qquad
\text{adapted} = \text{running} + \lambda\,(t - c).$$

**Classes.** A window of few classes has other statistics, and this is no drift. Mean and second moment are linear in
the mix p of the classes, so $c = \sum_k p_k m_k$, and $v = k\, v_{within} / n + u\, v_{between}$, where u is the share
of the mix that is still unknown. The first pass knows nothing: p is that of ordinary data, and u = 1. So it believes
only what no mix could explain. This is mostly at early sites, which know little of classes, and it mends the
predictions enough to tell the mix. Two passes then explain the mix that was predicted last (with the correction of
Lipton et al., ICML 2018), with twice the variance (k = 2), because the mix is not known exactly. In the last pass the
mix is shrunk towards the ordinary one, by the variance that n draws of classes have. So a well-mixed window counts as
one.

**Draws.** If the drift at a site has the variance that the window shows, then given the window it still has the
variance $\lambda v$. A draw is the last pass once more: each site adds a deviation of ordinary examples, with that
variance, to what it has adapted to, and later sites are measured again after it. So the sites of a draw fit each other,
and it is hardly less accurate. The width is $1.5 \sqrt{n / (n + 8)}$ times that: narrower for windows of few inputs,
where $\lambda$ itself is a guess, and wider for others, since networks are too sure under drift. Both were chosen
on a ResNet-20 (docs/results/drift.md).

Reference for the statistics of a window: Schneider et al., NeurIPS 2020; Nado et al., 2020. Where we differ: no
pseudo-count is chosen, and classes are explained first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.network.source import spread_evenly
from batchbayes.novelty.statistics import FLOOR, Place, Sight

PASSES = ((1.0, 1.0), (2.0, 0.0), (2.0, 0.0), (1.0, 0.0))
"""Caution k, and the share u of the class mix that is unknown, in each pass."""
TEMPERATURE = 2.0
"""Predictions under drift are too sure. A mix from probabilities at this temperature errs less."""
ROWS, DRAWS = 64, 16
"""Deviations of ordinary examples that are kept, and draws of an adapted posterior."""
WIDE, NARROW = 1.5, 8.0
"""Draws for a window of n inputs have the first as width, times the root of n / (n + the second)."""
LEAST_VARIANCE = 1e-3
"""Variances below this, in units of the running one, count as this."""
PRIOR_COUNT = 5.0
"""Examples of the common mean that each class is given, so that a rare one has no strange moments."""


@dataclass(frozen=True, eq=False)
class ClassMoments:
    """What ordinary examples contribute to the statistics of their batch, in units of the running statistics.

    There are two numbers for each channel, E: at each place the means of the channels, then their second moments.
    """

    shares: Tensor
    """How often each class is predicted, (K,)."""
    confusion: Tensor
    """Mean probabilities, at `TEMPERATURE`, of the examples that are predicted to be of each class, (K, K)."""
    means: Tensor
    """By class, (K, E)."""
    within: Tensor
    """Variance of one example around its class, (E,)."""
    between: Tensor
    """Variance of the classes around the common mean, (E,)."""
    rows: Tensor
    """Deviations of single examples from their class: (R, E), so that their mean square is `within`."""

    @cached_property
    def _unmixing(self) -> Tensor:
        """From mean probabilities to the mix of classes that explains them, (K, K)."""
        return torch.linalg.inv(self.confusion.double().T)


def contributions(places: tuple[Place, ...], statistics: Tensor) -> Tensor:
    """Return means and second moments (n, E) of examples from what `Sight` says of them, (n, D)."""
    parts = []
    for place, part in zip(places, statistics.split([place.size for place in places], dim=1), strict=True):
        mean = part[:, : place.channels]
        square = part[:, place.channels : 2 * place.channels].exp() - FLOOR if place.positions else mean.square()
        parts += [mean, square]
    return torch.cat(parts, 1)


def fit_moments(places: tuple[Place, ...], statistics: Tensor, logits: Tensor) -> ClassMoments:
    """Fit to the statistics (n, D) of ordinary examples and their logits (n, K). Without classes K may be 0."""
    logits = logits if logits.shape[1] else torch.zeros(len(logits), 1)
    each, weight = contributions(places, statistics).double(), logits.double().softmax(1)
    members, own = F.one_hot(logits.argmax(1), logits.shape[1]).double(), torch.eye(logits.shape[1]).double()
    sums = members.T @ (logits.double() / TEMPERATURE).softmax(1) + PRIOR_COUNT * own
    common, shares = each.mean(0), weight.mean(0)
    means = (weight.T @ each + PRIOR_COUNT * common) / (weight.sum(0)[:, None] + PRIOR_COUNT)
    left = each - weight @ means
    between = (shares[:, None] * (means - shares @ means).square()).sum(0)
    groups = [part.mean(0) * len(part) ** 0.5 for part in left.tensor_split(min(ROWS, len(left)))]
    confusion = sums / sums.sum(1, keepdim=True)
    found = shares, confusion, means, left.square().mean(0), between, torch.stack(groups)
    return ClassMoments(*(tensor.float() for tensor in found))


class Adapted(NamedTuple):
    """What one pass with adapted statistics says."""

    logits: Tensor
    """(n, K), on the CPU."""
    means: Tensor
    """What each channel normalises by, (C,)."""
    log_stds: Tensor
    """(C,)"""
    trust: Tensor
    """Lambda of the means and of the spreads at each site, (sites, 2). Zero is the network as it is."""
    mix: Tensor
    """The class mix (K,) that was explained."""


def adapted_pass(
    sight: Sight,
    moments: ClassMoments,
    inputs: Tensor,
    mix: Tensor,
    caution: float,
    unknown: float,
    deviation: Tensor | None = None,
) -> Adapted:
    """Run the network once. Each site in turn is adapted to what it sees of the window, given the class mix (K,).

    A `deviation` of contributions (E,) is added to it, as far as the window leaves it possible.
    """
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    widths = [2 * place.channels for place in sight.places]
    expected = (mix @ moments.means).split(widths)
    noise = (caution * moments.within / inputs.shape[0] + unknown * moments.between).split(widths)

    each = (torch.zeros_like(moments.within) if deviation is None else deviation).split(widths)
    usual = (moments.shares @ moments.means).split(widths)

    def move(
        place: Place, unit: Tensor, center: Tensor, variance: Tensor, added: Tensor, typical: Tensor, h: Tensor
    ) -> Tensor:
        mean, std = unit
        like = [1, -1, *[1] * (h.ndim - 2)]
        old = mean.to(h).view(like)
        centred = h - old
        shift, growth, trust = _shrunk(_window_moments(centred, std), center, variance)
        if deviation is not None:
            of_mean, of_log_std = _in_omega(added, typical)
            shift, growth = shift + trust[0].sqrt() * of_mean, growth + trust[1].sqrt() * of_log_std
        found[place.name] = mean + std * shift, std.log() + growth, trust
        moved, scale = (t.to(h).view(like) for t in (std * shift, (-growth).exp()))
        return torch.addcmul(old, centred - moved, scale)  # the layer then normalises by the running statistics

    units = sight.units.split([place.channels for place in sight.places], dim=1)
    given = zip(sight.places, units, expected, noise, each, usual, strict=True)
    before: dict[str, Callable[[Tensor], Tensor | None]] = {own[0].name: partial(move, *own) for own in given}
    with torch.no_grad():
        outputs = sight.network(inputs.to(sight.network.device), before=before)
    means, log_stds, trust = zip(*(found[place.name] for place in sight.places), strict=True)
    return Adapted(outputs.double().cpu(), torch.cat(means), torch.cat(log_stds), torch.stack(trust), mix)


def _window_moments(centred: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel of (n, C, ...), in units of the running statistics, on the CPU.

    `torch.var_mean` takes as long as a convolution on a CPU. Activations are centred, so that squares lose nothing.
    """
    flat = centred.float().reshape(*centred.shape[:2], -1)
    mean, square = flat.mean(2).mean(0).cpu() / std, flat.square().mean(2).mean(0).cpu() / std.square()
    return mean, square - mean.square()


def _shrunk(seen: tuple[Tensor, Tensor], center: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return shift and log growth of each channel (C,), and the trust in means and spreads (2,).

    `center` and `noise` are the expected moments and their variances, (2 C,).
    """
    (mean, variance), (first, second) = seen, center.chunk(2)
    mean_noise, square_noise = noise.chunk(2)
    usual = (second - first.square()).clamp_min(LEAST_VARIANCE)
    shift, growth = mean - first, 0.5 * (variance.clamp_min(LEAST_VARIANCE) / usual).log()
    growth_noise = square_noise / (4 * usual.square())  # of a log standard deviation
    trust = torch.stack([_trust(shift, mean_noise), _trust(growth, growth_noise)])
    return trust[0] * shift, trust[1] * growth, trust


def _trust(deviation: Tensor, noise: Tensor) -> Tensor:
    """Return the positive part of James and Stein.

    >>> _trust(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 1.0]))
    tensor(0.7500)
    """
    return (1 - noise.mean() / deviation.square().mean().clamp_min(1e-12)).clamp_min(0)


def class_mix(logits: Tensor, moments: ClassMoments, *, shrink: bool = False) -> Tensor:
    """Return the mix of classes (K,) in a window; if asked for, shrunk towards the ordinary shares.

    Probabilities are never all on one class, so their mean understates a window of few classes. If p is the mix, it is
    about p @ confusion, which is solved for p.
    """
    shares = moments.shares
    if logits.ndim != 2 or logits.shape[1] != len(shares):
        return shares  # no classes
    mean = (logits.double() / TEMPERATURE).softmax(1).mean(0)
    mix = (moments._unmixing @ mean).clamp_min(0).to(shares)
    deviation = mix / mix.sum() - shares
    if not shrink:
        return shares + deviation
    by_chance = (shares * (1 - shares)).sum() / logits.shape[0]
    return shares + (1 - by_chance / deviation.square().sum().clamp_min(1e-12)).clamp_min(0) * deviation


def adapt_to(sight: Sight, moments: ClassMoments, inputs: Tensor) -> Adapted:
    """Adapt to a window of inputs in four passes."""
    adapted = adapted_pass(sight, moments, inputs, moments.shares, *PASSES[0])
    for number, settings in enumerate(PASSES[1:], 2):
        mix = class_mix(adapted.logits, moments, shrink=number == len(PASSES))
        adapted = adapted_pass(sight, moments, inputs, mix, *settings)
    return adapted


def _in_omega(deviation: Tensor, typical: Tensor) -> tuple[Tensor, Tensor]:
    """Return a deviation of moments (2 C,) as one of means and of log standard deviations, (C,) each."""
    (of_mean, of_square), (first, second) = deviation.chunk(2), typical.chunk(2)
    variance = (second - first.square()).clamp_min(LEAST_VARIANCE)
    return of_mean, (of_square - 2 * first * of_mean) / (2 * variance)


def draws_of(sight: Sight, moments: ClassMoments, inputs: Tensor, adapted: Adapted) -> list[Adapted]:
    """Return what the window leaves possible: passes with the deviations of some ordinary examples."""
    count, rows = inputs.shape[0], moments.rows[spread_evenly(len(moments.rows), min(DRAWS, len(moments.rows)))]
    scale = WIDE / (count + NARROW) ** 0.5
    return [adapted_pass(sight, moments, inputs, adapted.mix, *PASSES[-1], scale * row) for row in rows]


def as_posterior(sight: Sight, adapted: Adapted, draws: Sequence[Adapted], count: int) -> BatchNormPosterior:
    """Return the network adapted to a window of `count` examples, with draws; without any, it is a point."""
    by_name = {site.name: site for site in all_sites(sight.network.module)}
    sites = tuple(by_name[place.name] for place in sight.places)
    widths = [place.channels for place in sight.places]

    def omega(found: Adapted) -> Tensor:
        split = (tensor.split(widths) for tensor in (found.means, found.log_stds))
        return torch.cat([part for pair in zip(*split, strict=True) for part in pair])

    center = omega(adapted)
    deviations = torch.stack([omega(draw) - center for draw in draws] or [torch.zeros_like(center)])
    idle = tuple(name for name in by_name if name not in {place.name for place in sight.places})
    size = float(max(2, count))  # a batch size is above one
    return BatchNormPosterior(sight.network, sites, center, deviations, size, "drift", "window", idle=idle)
