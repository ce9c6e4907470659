r"""Are batch statistics Gaussian, and are those of different layers correlated?

What is tested: the rows of a fitted `mcbn` posterior. They are the mean $\mu_B$ and the standard deviation $\sigma_B$
of every unit in R training mini-batches. By the central limit theorem they are Gaussian for large M. All Gaussian
posteriors assume this, and factorised ones also assume that layers are independent.
Test: Kolmogorov-Smirnov, $D = \sup_x |F_R(x) - F(x)|$. The paper takes F as the Gaussian with the mean and the standard
deviation of the rows. These were estimated from the same rows, so the usual p-value is far too large, and that of
Lilliefors is right. If F is another posterior that was not fitted to these rows, such as `clt_bn`, the usual one is
right.
Epochs and batch sizes: fit a posterior for each of them.
Reference: Teye, Azizpour, Smith, ICML 2018, figures 3, 7 and 8; for the marginals Atanov et al., 2018.
Where we differ: all units are tested, not one unit of each layer, and both p-values are given.

The Kolmogorov-Smirnov test in plain torch, for many columns at once.

There are two p-values. If the claimed distribution was known before the values, the distance follows the distribution
of Kolmogorov, with a correction for few values (Vrbik, Pioneer Journal of Theoretical and Applied Statistics, 2018). If
the claim is a Gaussian whose parameters were estimated from the same values, this p-value is far too large. Then the
distance follows the distribution of Lilliefors (JASA, 1967), which is simulated here.

The central limit theorem: for batches of M examples, the appendix of the MCBN paper states
$\mu_B \sim N(\mu, \sigma^2/M)$ and $\sigma_B \sim N(\sigma, (\mu_4 - \sigma^4) / (4 \sigma^2 M))$.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, LogNormal, Normal

from batchbayes import BatchbayesError, BatchNormPosterior
from batchbayes.methods.batchnorm.omega import by_batch, by_site
from batchbayes.methods.batchnorm.sites import all_sites
from batchbayes.models import MLP
from batchbayes.tools import Network, generator

Statistic = Literal["mean", "std"]
FEWEST_ROWS = 8
"""Fewer rows are refused, because they tell nothing."""
ROUNDING = 100 * torch.finfo(torch.float32).eps
"""A relative spread below this is rounding."""
NULL_SAMPLES = 5000
"""The number of samples of the distribution of Lilliefors. p-values are then accurate to 0.007."""


@dataclass(frozen=True, eq=False)
class SiteNormality:
    """Tests of one statistic of all units of a site, (C,) each. They are NaN for units whose statistic never varies."""

    site: str
    statistic: Statistic
    distance: Tensor
    """Kolmogorov-Smirnov distance between the rows and the claimed distribution."""
    p_value: Tensor
    """The p-value if that distribution was known before the rows."""
    lilliefors_p_value: Tensor | None
    """The p-value for a Gaussian with the parameters of the rows; None if another posterior is the claim."""


@dataclass(frozen=True, eq=False)
class Marginal:
    """One statistic of one unit in R mini-batches, and the distributions that claim to describe it."""

    site: str
    channel: int
    statistic: Statistic
    observed: Tensor
    """(R,)"""
    claims: dict[str, Distribution]
    distances: dict[str, float]
    """Kolmogorov-Smirnov distance of each claim."""
    p_values: dict[str, float]
    """Those of Lilliefors for a Gaussian that was fitted to these rows, and the usual ones for other posteriors."""


@dataclass(frozen=True, eq=False)
class CorrelationMap:
    """The mean absolute correlation over mini-batches of the statistics of each pair of sites.

    The correlation of a statistic with itself is left out.
    """

    sites: tuple[str, ...]
    values: Tensor
    """(sites, sites)"""
    floor: float
    """The value for independent Gaussian statistics with as many rows."""


def normality(posterior: BatchNormPosterior, against: BatchNormPosterior | None = None) -> list[SiteNormality]:
    """Test the batch means and then the batch standard deviations of every site.

    Args:
        posterior: a fitted `mcbn` posterior, whose rows are tested.
        against: another posterior at the same batch size, whose marginals are the claimed distributions. By default
            they are Gaussians with the mean and the standard deviation of the rows.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    >>> tests = normality(bb.mcbn(network, torch.randn(500, 3), batch_size=50))
    >>> [(test.site, test.statistic, tuple(test.p_value.shape)) for test in tests]
    [('0', 'mean', (3,)), ('0', 'std', (3,))]
    """
    results = []
    for site, statistic, values, claim in _columns(posterior, against):
        distance = ks_distance(values, claim)
        own = None if against is not None else lilliefors_p_value(distance, len(values))
        results.append(SiteNormality(site, statistic, distance, kolmogorov_p_value(distance, len(values)), own))
    return results


def marginals(
    posterior: BatchNormPosterior, claims: Mapping[str, BatchNormPosterior] | None = None, *, channel: int = 0
) -> list[Marginal]:
    """Return the batch mean and then the batch standard deviation of one unit of every site, for a figure.

    Args:
        posterior: a fitted `mcbn` posterior, whose rows are shown.
        claims: other posteriors at the same batch size, by name. By default a Gaussian is fitted to the rows.
        channel: the number of the unit. A site with fewer units shows its last one.
    """
    shown = {"fitted Gaussian": None} if claims is None else claims
    found: list[Marginal] = []
    for columns in zip(*(_columns(posterior, claim) for claim in shown.values()), strict=True):
        site, statistic, values, _ = columns[0]
        unit = min(channel, values.shape[1] - 1)
        one = {name: _unit(claim, unit) for name, (_, _, _, claim) in zip(shown, columns, strict=True)}
        distances = {name: ks_distance(values[:, [unit]], claim) for name, claim in one.items()}
        p_value = lilliefors_p_value if claims is None else kolmogorov_p_value
        p_values = {name: float(p_value(distance, len(values))) for name, distance in distances.items()}
        plain = {name: float(distance) for name, distance in distances.items()}
        found.append(Marginal(site, unit, statistic, values[:, unit], one, plain, p_values))
    return found


def correlation_map(posterior: BatchNormPosterior) -> CorrelationMap:
    r"""Return the mean of $|r|$ over the statistics (means and log standard deviations) of each pair of sites.

    Statistics that never vary are left out. A site that has no others is NaN. The floor is what chance alone gives with
    R rows, $E|r| = \Gamma(\frac{R-1}{2}) / (\sqrt\pi\,\Gamma(\frac R2))$.
    """
    rows = _require_rows(posterior)
    moved = rows - rows.mean(0)
    varies = moved.std(0) > ROUNDING * rows.mean(0).abs()
    widths = [2 * site.channels for site in posterior.sites]
    units = [each[:, kept] for each, kept in zip(moved.split(widths, 1), varies.split(widths), strict=True)]
    units = [each / each.norm(dim=0) for each in units]  # (R, statistics that vary)
    values = torch.full((len(units), len(units)), torch.nan, dtype=torch.float64)
    for i, first in enumerate(units):
        for j, second in enumerate(units[: i + 1]):
            pairs = first.shape[1] * second.shape[1] - (first.shape[1] if i == j else 0)
            total = (first.T @ second).abs().sum() - (first.shape[1] if i == j else 0)
            values[i, j] = values[j, i] = total / pairs if pairs else torch.nan
    floor = math.exp(math.lgamma((len(rows) - 1) / 2) - math.lgamma(len(rows) / 2)) / math.sqrt(math.pi)
    return CorrelationMap(tuple(site.name for site in posterior.sites), values, floor)


def _columns(
    posterior: BatchNormPosterior, against: BatchNormPosterior | None
) -> Iterator[tuple[str, Statistic, Tensor, Distribution]]:
    """Yield site, statistic, values (R, C) and claimed distribution (C,), in the order of the sites."""
    observed = by_site(posterior.sites, _require_rows(posterior))
    claimed = [None] * len(observed)
    if against is not None:
        _require_comparable(posterior, against)
        moments = torch.stack([against.center.double(), against.omega_var().double().sqrt()])
        claimed = by_site(posterior.sites, moments)
    for site, (means, log_stds), claim in zip(posterior.sites, observed, claimed, strict=True):
        stds = log_stds.exp()
        of_means, of_stds = claim or [(values.mean(0), values.std(0)) for values in (means, stds)]
        yield site.name, "mean", means, _distribution(Normal, *of_means)
        yield site.name, "std", stds, _distribution(Normal if claim is None else LogNormal, *of_stds)


def _distribution(kind: type[Normal] | type[LogNormal], location: Tensor, scale: Tensor) -> Distribution:
    """Return the distribution of one statistic of all units. It is NaN for units whose statistic never varies."""
    varies = scale > ROUNDING * location.abs()
    return kind(location, torch.where(varies, scale, torch.nan), validate_args=False)


def _unit(claim: Distribution, channel: int) -> Distribution:
    """Return the distribution of one unit of a site."""
    assert isinstance(claim, Normal | LogNormal)
    return type(claim)(claim.loc[channel], claim.scale[channel], validate_args=False)


def _require_rows(posterior: BatchNormPosterior) -> Tensor:
    """Return the observed statistics, (R, D) in float64, or refuse a posterior without them."""
    if posterior.noise != "rows" or len(posterior.deviations) < FEWEST_ROWS:
        raise BatchbayesError(
            expected=f"a posterior with the statistics of {FEWEST_ROWS} mini-batches or more, as mcbn fits it",
            got=f"{posterior.method} with {len(posterior.deviations)} rows and {posterior.noise} noise",
            fix="fit mcbn(model, batches, num_samples=500)",
        )
    return (posterior.center + posterior.deviations).double()


def _require_comparable(posterior: BatchNormPosterior, against: BatchNormPosterior) -> None:
    names, others = ([site.name for site in each.sites] for each in (posterior, against))
    same_size = math.isclose(posterior.batch_size, against.batch_size)
    if names != others or not same_size or posterior.site_batch_sizes != against.site_batch_sizes:
        raise BatchbayesError(
            expected=f"a posterior of the same {len(names)} sites at batch size {posterior.batch_size:g}",
            got=f"{len(others)} sites at batch size {against.batch_size:g}",
            fix="fit both to one network with the same sites=, and take one to the other's batch size by at_batch_size",
        )


def ks_distance(values: Tensor, claim: Distribution) -> Tensor:
    """Return the largest gap between the empirical and the claimed distribution of each column of (R, C), (C,)."""
    claimed = claim.cdf(values.sort(0).values)
    steps = torch.arange(len(values) + 1, dtype=values.dtype)[:, None] / len(values)
    return torch.maximum(steps[1:] - claimed, claimed - steps[:-1]).amax(0)


def kolmogorov_p_value(distance: Tensor, count: int) -> Tensor:
    r"""Return P(D >= distance) for `count` independent values of a known continuous distribution.

    It is $P(K \ge x) = 2\sum_k (-1)^{k-1} e^{-2k^2x^2}$ at
    $x = \sqrt n D + \frac{1}{6\sqrt n} + \frac{\sqrt n D - 1}{4n}$. For 8 values it is within 0.004 of the exact
    value, and for 64 within 0.0003. Below x = 1 the series has another form that converges there,
    $P(K < x) = \frac{\sqrt{2\pi}}{x} \sum_k e^{-(2k-1)^2\pi^2/(8x^2)}$.

    >>> kolmogorov_p_value(torch.tensor([0.05, 0.08, 0.136]), 100)
    tensor([0.9532, 0.5181, 0.0449], dtype=torch.float64)
    """
    root = math.sqrt(count)
    scaled = root * distance.double()
    x = (scaled + 1 / (6 * root) + (scaled - 1) / (4 * count)).clamp_min(0.05)[..., None]
    k = torch.arange(1, 9, dtype=torch.float64)
    upper = 2 * (-((-1) ** k) * (-2 * k.square() * x.square()).exp()).sum(-1)
    odd = (2 * k - 1).square()
    lower = 1 - math.sqrt(2 * math.pi) / x[..., 0] * (-odd * math.pi**2 / (8 * x.square())).exp().sum(-1)
    return torch.where(x[..., 0] < 1, lower, upper).clamp(0, 1)


def lilliefors_p_value(distance: Tensor, count: int) -> Tensor:
    """Return P(D >= distance) for `count` Gaussian values and the Gaussian with their own mean and standard deviation.

    The distribution depends on the count alone, so it is simulated once for each count.
    """
    null = _lilliefors_null(count)
    above = len(null) - torch.searchsorted(null, distance.double().contiguous())
    return torch.where(distance.isnan(), torch.nan, (above + 1) / (len(null) + 1))


@cache
def _lilliefors_null(count: int) -> Tensor:
    """Return the distances of simulated samples, in rising order."""
    random, chunks = generator(0, "lilliefors", count), []
    for _ in range(10):
        values = torch.randn(count, NULL_SAMPLES // 10, generator=random, dtype=torch.float64)
        chunks.append(ks_distance(values, Normal(values.mean(0), values.std(0))))
    return torch.cat(chunks).sort().values


def layer_inputs(network: MLP, inputs: Tensor) -> list[Tensor]:
    """Return the inputs of each batch norm, (N, C) in double precision, if all training rows form one batch."""
    sites, seen = all_sites(network), []
    with torch.no_grad():
        Network(network)(inputs, tensors=by_batch(sites), before={site.name: seen.append for site in sites})
    return [values.double() for values in seen]


def limit_gaussians(values: Tensor, batch_size: int) -> dict[Statistic, Normal]:
    """Return the Gaussians of the central limit theorem for batches of M, from all values of each unit, (N, C).

    >>> limits = limit_gaussians(torch.tensor([[-2.0], [0.0], [0.0], [2.0]]), batch_size=8)
    >>> [(round(float(limit.loc), 3), round(float(limit.variance), 3)) for limit in limits.values()]
    [(0.0, 0.25), (1.414, 0.062)]
    """
    variance, mean = torch.var_mean(values, 0, correction=0)
    fourth = (values - mean).pow(4).mean(0)
    of_std = (fourth - variance.square()).clamp_min(0) / (4 * variance * batch_size)
    return {
        "mean": Normal(mean, (variance / batch_size).sqrt(), validate_args=False),
        "std": Normal(variance.sqrt(), of_std.sqrt(), validate_args=False),
    }


def without_replacement(num_rows: int, batch_size: int) -> float:
    """Return the factor by which the variance of a batch mean shrinks if no row is drawn twice.

    >>> without_replacement(5, 3)
    0.5
    """
    return (num_rows - batch_size) / (num_rows - 1)


def compare_with_gaussians(observed: Tensor, limit: Normal, shrinkage: float) -> dict[str, Tensor]:
    """Test a statistic of C units in R batches, (R, C), against three Gaussians.

    Returns p-values against a Gaussian with the mean and the variance of the same batches ("fitted"), against that of
    the central limit theorem ("limit"), and against the latter, corrected for batches drawn without replacement
    ("finite"). "ratio" is the observed variance divided by that of the theorem. Each has a number for each unit that
    varies.

    Args:
        observed: the statistic in each batch.
        limit: the Gaussians of the central limit theorem, (C,).
        shrinkage: the factor by which the variance is smaller in batches drawn without replacement.

    >>> values = torch.randn(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> tests = compare_with_gaussians(values, Normal(torch.zeros(1), torch.ones(1) / 2), shrinkage=4.0)
    >>> [bool(tests[name] > 0.05) for name in ("fitted", "limit", "finite")], round(float(tests["ratio"]))
    ([True, False, True], 4)
    """
    own = Normal(observed.mean(0), observed.std(0), validate_args=False)
    varies = (own.scale > ROUNDING * own.loc.abs()) & (limit.scale > 0)
    finite = Normal(limit.loc, limit.scale * math.sqrt(shrinkage), validate_args=False)
    count = len(observed)
    tests = {
        "fitted": lilliefors_p_value(ks_distance(observed, own), count),
        "limit": kolmogorov_p_value(ks_distance(observed, limit), count),
        "finite": kolmogorov_p_value(ks_distance(observed, finite), count),
        "ratio": own.variance / limit.variance,
    }
    return {name: values[varies] for name, values in tests.items()}
