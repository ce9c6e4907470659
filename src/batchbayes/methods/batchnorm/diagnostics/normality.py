r"""How Gaussian the batch statistics are, and how they hang together across layers.

What is looked at: the rows of a fitted `mcbn` posterior, that is the mean $\mu_B$ and the standard deviation $\sigma_B$
of every unit in R training mini-batches. The central limit theorem makes them Gaussian for large M; the Gaussian
posteriors stand or fall with it, and factorised ones also with independence across layers.
Tests: Kolmogorov-Smirnov, $D = \sup_x |F_R(x) - F(x)|$. Against a Gaussian with the rows' own mean and standard
deviation (the paper's) the usual p-value is far too large, since the parameters were estimated from the same rows; the
Lilliefors p-value accounts for that. Against another posterior, such as `clt_bn`, the usual one is right as far as that
posterior was not fitted to these rows.
Epochs and batch sizes: fit a posterior for each, and call again.
Reference: Teye, Azizpour, Smith, ICML 2018, figures 3, 7 and 8; for the marginals Atanov et al., 2018.
Where we differ: all units are tested, not one a layer, and both p-values are given.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, LogNormal, Normal

from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.diagnostics.kolmogorov import kolmogorov_p_value, ks_distance, lilliefors_p_value
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior

Statistic = Literal["mean", "std"]
FEWEST_ROWS = 8
"""With fewer there is nothing to see."""
ROUNDING = 100 * torch.finfo(torch.float32).eps
"""Relative spread that is nothing but rounding."""


@dataclass(frozen=True, eq=False)
class SiteNormality:
    """Tests of one statistic of all units of a site, (C,) each; nan for units whose statistic never varies."""

    site: str
    statistic: Statistic
    distance: Tensor
    """Kolmogorov-Smirnov distance between the rows and the distribution that they are held against."""
    p_value: Tensor
    """As if that distribution had been known before the rows."""
    lilliefors_p_value: Tensor | None
    """As for a Gaussian whose parameters are those of the rows; None against another posterior."""


@dataclass(frozen=True, eq=False)
class Marginal:
    """One statistic of one unit: what R mini-batches gave, and the distributions that claim to describe it."""

    site: str
    channel: int
    statistic: Statistic
    observed: Tensor
    """(R,)"""
    claims: dict[str, Distribution]
    distances: dict[str, float]
    """Kolmogorov-Smirnov distance of each claim."""
    p_values: dict[str, float]
    """Lilliefors' for a Gaussian fitted to these rows, the usual ones for other posteriors."""


@dataclass(frozen=True, eq=False)
class CorrelationMap:
    """Mean absolute correlation of the statistics of each pair of sites over mini-batches, themselves excepted."""

    sites: tuple[str, ...]
    values: Tensor
    """(sites, sites)"""
    floor: float
    """What independent Gaussian statistics would show with that many rows."""


def normality(posterior: BatchNormPosterior, against: BatchNormPosterior | None = None) -> list[SiteNormality]:
    """Test the batch means, then the standard deviations, of every site.

    Args:
        posterior: a fitted `mcbn` posterior; its rows are tested.
        against: another posterior at the same batch size, whose marginals they are held against; by default Gaussians
            with the rows' own mean and standard deviation.

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
    """The mean, then the standard deviation, of one unit of every site, for a figure.

    Args:
        posterior: a fitted `mcbn` posterior; its rows are shown.
        claims: other posteriors at the same batch size, by name; by default a Gaussian fitted to the rows.
        channel: which unit; the last one where a site has fewer.
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
    r"""Mean $|r|$ over the statistics (means and log standard deviations) of each pair of sites.

    Statistics that never vary are left out; a site with nothing else is nan. With R rows chance alone gives
    $E|r| = \Gamma(\frac{R-1}{2}) / (\sqrt\pi\,\Gamma(\frac R2))$, the floor.
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
    """(site, statistic, values (R, C), what they are held against (C,)), in the order of the sites."""
    rows = _require_rows(posterior)
    widths = [2 * site.channels for site in posterior.sites]
    if against is None:
        claimed = [None] * len(widths)
    else:
        _require_comparable(posterior, against)
        moments = torch.stack([against.center.double(), against.omega_var().double().sqrt()])
        claimed = moments.split(widths, 1)
    for site, values, claim in zip(posterior.sites, rows.split(widths, 1), claimed, strict=True):
        means, log_stds = values.split(site.channels, 1)
        stds = log_stds.exp()
        if claim is None:
            yield site.name, "mean", means, _distribution(Normal, means.mean(0), means.std(0))
            yield site.name, "std", stds, _distribution(Normal, stds.mean(0), stds.std(0))
        else:
            of_means, of_log_stds = claim.split(site.channels, 1)
            yield site.name, "mean", means, _distribution(Normal, *of_means)
            yield site.name, "std", stds, _distribution(LogNormal, *of_log_stds)


def _distribution(kind: type[Normal] | type[LogNormal], location: Tensor, scale: Tensor) -> Distribution:
    """Of one statistic of all units; nan where it never varies."""
    varies = scale > ROUNDING * location.abs()
    return kind(location, torch.where(varies, scale, torch.nan), validate_args=False)


def _unit(claim: Distribution, channel: int) -> Distribution:
    """The distribution of one unit among those of a site."""
    assert isinstance(claim, Normal | LogNormal)
    return type(claim)(claim.loc[channel], claim.scale[channel], validate_args=False)


def _require_rows(posterior: BatchNormPosterior) -> Tensor:
    """The observed statistics, (R, D) in float64."""
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
