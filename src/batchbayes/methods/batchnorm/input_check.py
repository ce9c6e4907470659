r"""Do the inputs of a batch-norm layer look like those of training? Its running statistics say what they looked like.

The inputs are standardised by the running statistics, so in training they had mean 0 and mean square 1 in each channel.
There are three numbers: the shift, which is the root mean square over channels of their means; the largest of these
means, because a mistake may reach few channels; and the spread, which is the mean square. All are means over examples,
so each has a t-test, and pixels of one image need not be independent. The running statistics lag behind the network,
and images of a test have no random crops. So the tests are not for a difference, but for one that is larger than a
tolerance.
"""

from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

LEVEL = 0.0025
"""How often each of the tests is wrong, at most, if the true difference is within the tolerance."""


@dataclass(frozen=True)
class Tolerance:
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
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
