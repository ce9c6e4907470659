r"""Are batch statistics Gaussian, with the variance that the MCBN paper states? Its figures 3, 7 and 8.

By the central limit theorem, the appendix of the paper takes the mean and the standard deviation of a unit in a
mini-batch of M examples as $\mu_B \sim N(\mu, \sigma^2/M)$ and $\sigma_B \sim N(\sigma, (\mu_4 - \sigma^4) / (4
\sigma^2 M))$. It shows Kolmogorov-Smirnov tests of one unit in each layer on yacht. Here every unit is tested against
three Gaussians:

- the Gaussian with the mean and the variance of the same batches (by the test of Lilliefors, which allows for that),
- the Gaussian of the theorem, with the moments of the unit over all training rows, and
- the same with its variance multiplied by (N - M) / (N - 1), since batches are drawn from N rows without replacement.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.distributions import Normal

import batchbayes as bb
from batchbayes.models import MLP
from batchbayes.tools import Figure
from batchbayes.tools import count as count_of
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.mcbn import statistics_figures
from batchbayes_papers.mcbn.normality_tests import (
    Marginal,
    Statistic,
    compare_with_gaussians,
    ks_distance,
    layer_inputs,
    lilliefors_p_value,
    limit_gaussians,
    without_replacement,
)
from batchbayes_papers.mcbn.protocol import GridPoint, train_candidate
from batchbayes_papers.mcbn.scores import rounded
from batchbayes_papers.mcbn.splits import SYNTHETIC, StandardisedPart, load_split
from batchbayes_papers.runner.experiment import Results, Unit, warnings_ignored
from batchbayes_papers.runner.tables import ResultTable

LAYERS = 2
STATISTICS: tuple[Statistic, ...] = ("mean", "std")
SHOWN = 0
"""The unit of each layer that the figures show. It was chosen before any result was known."""
LEVEL = 0.05
"""The significance level of the tests."""
FITTED, LIMIT, FINITE = "fitted Gaussian", "CLT (paper)", "CLT, without replacement"


@dataclass(frozen=True)
class NormalityConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    dataset: str = "yacht"
    batch_sizes: tuple[int, ...] = (32, 64, 128)
    """The batch sizes of both the training and the statistics."""
    epochs: tuple[int, ...] = (1, 20, 100, 500)
    """The numbers of epochs after which a network is tested."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """One network for each; the figures of single units show the first."""
    num_batches: int = 500
    """As many as MCBN has draws. With more batches, the tests detect smaller deviations."""
    weight_decay: float = 1e-4


PRESETS = {
    "smoke": NormalityConfig(SYNTHETIC, batch_sizes=(8, 64), epochs=(1, 10), seeds=(1,), num_batches=200),
    "quick": NormalityConfig(),
}


@dataclass(frozen=True)
class Finding:
    """The tests of one statistic in one layer of one network. The lists have one number for each unit that varies."""

    seed: int
    batch_size: int
    epochs: int
    layer: int
    """The first layer is 1."""
    statistic: Statistic
    fitted: tuple[float, ...]
    """p-values, as in `compare_with_gaussians`."""
    limit: tuple[float, ...]
    finite: tuple[float, ...]
    ratio: tuple[float, ...]
    """The observed variance divided by that of the central limit theorem."""
    shrinkage: float
    """The expected ratio for batches drawn without replacement: (N - M) / (N - 1)."""
    observed: tuple[float, ...] = ()
    """The statistic of one unit in every batch, for the figures."""
    claimed: tuple[float, float] = (0.0, 0.0)
    """The mean and the standard deviation of that unit's statistic by the central limit theorem."""


def units(config: NormalityConfig) -> list[Unit]:
    """Return one unit for each seed and batch size: a network."""
    return [
        Unit(f"seed {seed}, M = {size}", {"seed": seed, "batch_size": size}, effort=1 + 64 / size)
        for seed in config.seeds
        for size in config.batch_sizes
    ]


def work(config: NormalityConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[dict[str, Any]]:
    """Train networks for each number of epochs, and test every unit of every layer."""
    seed, size = unit.arguments["seed"], unit.arguments["batch_size"]
    part = load_split(config.dataset, 1, data_folder).whole
    found = []
    for epochs in config.epochs:
        candidate = GridPoint(config.weight_decay, size, epochs=epochs)
        (network,) = train_candidate(config.dataset, [part], candidate, [seed], ["whole"])
        found += findings(config, seed, size, epochs, network, part)
    return [asdict(finding) for finding in found]


def findings(
    config: NormalityConfig, seed: int, size: int, epochs: int, network: MLP, part: StandardisedPart
) -> Iterator[Finding]:
    """Test the statistics of mini-batches of one network."""
    with warnings_ignored():  # running statistics lag behind in short trainings, but nothing is predicted here
        posterior = bb.mcbn(
            network, part.inputs, batch_size=size, num_samples=config.num_batches, seed=seed, center="batches"
        )
    rows = (posterior.center + posterior.deviations).double().split([2 * site.channels for site in posterior.sites], 1)
    for layer, (omega, values) in enumerate(zip(rows, layer_inputs(network, part.inputs), strict=True), 1):
        means, log_stds = omega.chunk(2, 1)
        limits = limit_gaussians(values, size)
        for statistic, observed in zip(STATISTICS, (means, log_stds.exp()), strict=True):
            limit, shrinkage = limits[statistic], without_replacement(len(values), size)
            tests = compare_with_gaussians(observed, limit, shrinkage)
            numbers: Any = {name: rounded(values) for name, values in tests.items()}
            finding = Finding(seed, size, epochs, layer, statistic, **numbers, shrinkage=shrinkage)
            if seed == config.seeds[0]:
                moments = float(limit.loc[SHOWN]), float(limit.scale[SHOWN])
                finding = replace(finding, observed=rounded(observed[:, SHOWN]), claimed=moments)
            yield finding


def findings_of(config: NormalityConfig, results: Results) -> list[Finding]:
    """Return the findings of all finished units."""
    return [Finding(**record) for unit in units(config) for record in results.get(unit.name, [])]


Group = tuple[int, str, int, int]
"""Layer, statistic, batch size and epochs."""


def by_group(found: Iterable[Finding]) -> dict[Group, list[Finding]]:
    """Group findings so that those of all seeds are together."""
    groups: dict[Group, list[Finding]] = {}
    for each in found:
        groups.setdefault((each.layer, each.statistic, each.batch_size, each.epochs), []).append(each)
    return groups


def share_passed(found: Sequence[Finding], test: str) -> float | None:
    """Return the share of units, over all seeds, that a test does not reject."""
    p_values = [p for each in found for p in getattr(each, test)]
    return sum(p >= LEVEL for p in p_values) / len(p_values) if p_values else None


def median_ratio(found: Sequence[Finding]) -> float | None:
    """Return the median, over the units of all seeds, of the observed variance divided by that of the theorem."""
    ratios = [ratio for each in found for ratio in each.ratio]
    return float(torch.tensor(ratios, dtype=torch.float64).quantile(0.5)) if ratios else None


TITLES = {
    "fitted": "Gaussian of any mean and variance: units not rejected at 5 %",
    "limit": "Gaussian of the central limit theorem, as in the paper: units not rejected at 5 %",
    "finite": "The same, for batches drawn without replacement: units not rejected at 5 %",
}


def tables(config: NormalityConfig, results: Results) -> list[ResultTable]:
    """Return a table for each test and one of the variances, with a column for each number of epochs."""
    groups = by_group(findings_of(config, results))
    kinds = [(layer, s, size) for layer in range(1, LAYERS + 1) for s in STATISTICS for size in config.batch_sizes]
    heads = ("layer", "batch statistic", "M", *(f"epoch {epochs}" for epochs in config.epochs))
    formats, count = ("", "", ""), len(config.epochs)
    found = {kind: [groups.get((*kind, epochs), ()) for epochs in config.epochs] for kind in kinds}
    made = []
    for test, title in TITLES.items():
        rows = tuple((*kind, *(share_passed(group, test) for group in own)) for kind, own in found.items())
        made.append(ResultTable(title, heads, rows, (*formats, *[".0%"] * count)))
    rows = tuple(
        (*kind, next((each.shrinkage for group in own for each in group), None), *map(median_ratio, own))
        for kind, own in found.items()
    )
    title = "Observed variance over that of the central limit theorem, median over units"
    columns = (*heads[:3], "(N − M) / (N − 1)", *heads[3:])
    return [*made, ResultTable(title, columns, rows, (*formats, *[".3f"] * (count + 1)))]


def figures(config: NormalityConfig, results: Results) -> dict[str, Figure]:
    """Show single units over epochs and over batch sizes, as in the paper, and the share of all units that pass."""
    single: dict[tuple[int, int], list[Marginal]] = {}
    found = findings_of(config, results)
    for each in found:
        if each.observed:
            single.setdefault((each.batch_size, each.epochs), []).append(marginal_of(each))
    size, last = config.batch_sizes[0], config.epochs[-1]
    return {
        "distributions-of-all-units": statistics_figures.normality_sweep_figure(
            config.batch_sizes, sweeps(config, by_group(found)), level=LEVEL
        ),
        "distributions-of-single-units": statistics_figures.marginals_figure(single[size, last]),
        "single-units-over-epochs": statistics_figures.normality_figure(
            {f"epoch {epochs}": single[size, epochs] for epochs in config.epochs}
        ),
        "single-units-over-batch-sizes": statistics_figures.normality_figure(
            {f"M = {each}": single[each, last] for each in config.batch_sizes}
        ),
    }


def sweeps(
    config: NormalityConfig, groups: Mapping[Group, Sequence[Finding]]
) -> list[statistics_figures.StatisticSweep]:
    """Return the numbers of the tables in the form that the figure needs."""
    made = []
    for layer, statistic in [(layer, statistic) for layer in range(1, LAYERS + 1) for statistic in STATISTICS]:
        own = [[groups[layer, statistic, size, epochs] for size in config.batch_sizes] for epochs in config.epochs]
        shares = {
            name: [[_number(share_passed(found, test)) for found in line] for line in own]
            for name, test in ((FITTED, "fitted"), (LIMIT, "limit"), (FINITE, "finite"))
        }
        ratio = [[_number(median_ratio(found)) for found in line] for line in own]
        expected = [found[0].shrinkage for found in own[0]]
        made.append(statistics_figures.StatisticSweep(f"layer {layer}: batch {statistic}", shares, ratio, expected))
    return made


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def marginal_of(found: Finding) -> Marginal:
    """Return one unit and the Gaussians that it is compared with."""
    observed = torch.tensor(found.observed, dtype=torch.float64)
    mean, std = torch.tensor(found.claimed, dtype=torch.float64)
    claims = {
        FITTED: Normal(observed.mean(), observed.std()),
        LIMIT: Normal(mean, std),
        FINITE: Normal(mean, std * math.sqrt(found.shrinkage)),
    }
    distances = {name: ks_distance(observed[:, None], claim) for name, claim in claims.items()}
    p_value = float(lilliefors_p_value(distances[FITTED], len(observed)))
    plain = {name: float(distance) for name, distance in distances.items()}
    return Marginal(f"layer {found.layer}", SHOWN, found.statistic, observed, dict(claims), plain, {FITTED: p_value})


def notes(config: NormalityConfig) -> list[str]:
    """Say how this differs from the paper."""
    synthetic = config.dataset == SYNTHETIC
    return [
        "The paper shows one unit in each layer and says that the approximations hold. Here all units of "
        f"{count_of(len(config.seeds), 'network')} are tested. The units of layer 1 are sums of "
        f"{'five' if synthetic else 'six'} inputs, so their tests are not independent.",
        f"Each test has {config.num_batches} batches. With enough batches, it rejects even a small deviation.",
        f"Our own choices: {', '.join(map(str, config.epochs))} epochs, a weight decay of {config.weight_decay:g}, and "
        "batches of the same size for the training and for the statistics.",
    ]
