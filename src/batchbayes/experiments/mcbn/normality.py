r"""Figures 3, 7 and 8 of the MCBN paper: are batch statistics Gaussian, and of the variance that is claimed?

The paper's appendix takes the mean and the standard deviation of a unit in a mini-batch of M examples as
$\mu_B \sim N(\mu, \sigma^2/M)$ and $\sigma_B \sim N(\sigma, (\mu_4 - \sigma^4) / (4 \sigma^2 M))$, by the central limit
theorem, and shows Kolmogorov-Smirnov tests of one unit a layer on yacht. Here every unit is tested, against

- the Gaussian with the mean and variance of the same batches (the test of Lilliefors, which allows for that),
- the Gaussian of the theorem, from the moments of the unit over all training rows, and
- the same with its variance times (N - M) / (N - 1): a batch is drawn from N rows without replacement.
"""

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Normal

from batchbayes.errors import BatchbayesWarning
from batchbayes.experiments.mcbn.batch_statistics import (
    hold_against,
    layer_inputs,
    limit_gaussians,
    without_replacement,
)
from batchbayes.experiments.mcbn.protocol import SYNTHETIC, Candidate, Part, load_split, trained
from batchbayes.methods.batchnorm.diagnostics.kolmogorov import ks_distance, lilliefors_p_value
from batchbayes.methods.batchnorm.diagnostics.normality import Marginal, Statistic
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.models.mlp import MLP
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from batchbayes.plots import StatisticSweep

LAYERS = 2
STATISTICS: tuple[Statistic, ...] = ("mean", "std")
SHOWN = 0
"""The unit of each layer whose statistics are kept for the figures: chosen before any was seen."""
LEVEL = 0.05
FITTED, LIMIT, FINITE = "fitted Gaussian", "CLT (paper)", "CLT, without replacement"


@dataclass(frozen=True)
class Config:
    """One preset. The defaults are those of `quick`."""

    dataset: str = "yacht"
    batch_sizes: tuple[int, ...] = (32, 64, 128)
    """Of the training, and of the statistics."""
    epochs: tuple[int, ...] = (1, 20, 100, 500)
    """After which the network is looked at."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Networks; the figures of single units show the first."""
    num_batches: int = 500
    """As many as draws of MCBN: what the tests can see grows with it."""
    weight_decay: float = 1e-4


PRESETS = {
    "smoke": Config(SYNTHETIC, batch_sizes=(8, 64), epochs=(1, 10), seeds=(1,), num_batches=200),
    "quick": Config(),
}


@dataclass(frozen=True)
class Finding:
    """One statistic of the units of one layer of one network; lists have a number for each unit that varies."""

    seed: int
    batch_size: int
    epochs: int
    layer: int
    """From 1."""
    statistic: Statistic
    fitted: tuple[float, ...]
    """p-values against a Gaussian with the moments of the same batches."""
    limit: tuple[float, ...]
    """p-values against that of the central limit theorem."""
    finite: tuple[float, ...]
    """p-values against the same, for batches drawn without replacement."""
    ratio: tuple[float, ...]
    """Observed variance over that of the central limit theorem."""
    shrinkage: float
    """What that ratio should be, since batches are drawn without replacement: (N - M) / (N - 1)."""
    observed: tuple[float, ...] = ()
    """The statistic of one unit in every batch, for the figures."""
    claimed: tuple[float, float] = (0.0, 0.0)
    """Mean and standard deviation of that unit's statistic by the central limit theorem."""


def units(config: Config) -> list[Unit]:
    """A network for each seed and batch size."""
    return [
        Unit(f"seed {seed}, M = {size}", {"seed": seed, "batch_size": size}, effort=1 + 64 / size)
        for seed in config.seeds
        for size in config.batch_sizes
    ]


def work(
    config: Config, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None = None
) -> list[dict[str, Any]]:
    """Train so many epochs, then test every unit of every layer."""
    seed, size = unit.arguments["seed"], unit.arguments["batch_size"]
    part = load_split(config.dataset, 1, data_folder).whole
    found = []
    for epochs in config.epochs:
        candidate = Candidate(config.weight_decay, size, epochs=epochs)
        (network,) = trained(config.dataset, [part], candidate, [seed], ["whole"])
        found += findings(config, seed, size, epochs, network, part)
    return [asdict(finding) for finding in found]


def findings(config: Config, seed: int, size: int, epochs: int, network: MLP, part: Part) -> Iterator[Finding]:
    """Statistics of mini-batches of one network, and what the theorem says of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchbayesWarning)  # running statistics lag behind, but nothing is predicted
        posterior = mcbn(network, part.inputs, batch_size=size, num_samples=config.num_batches, seed=seed)
    rows = (posterior.center + posterior.deviations).double().split([2 * site.channels for site in posterior.sites], 1)
    for layer, (omega, values) in enumerate(zip(rows, layer_inputs(network, part.inputs), strict=True), 1):
        means, log_stds = omega.chunk(2, 1)
        claims = limit_gaussians(values, size)
        for statistic, observed in zip(STATISTICS, (means, log_stds.exp()), strict=True):
            claim, shrinkage = claims[statistic], without_replacement(len(values), size)
            tests = hold_against(observed, claim, shrinkage)
            p_values = _rounded(tests.fitted), _rounded(tests.limit), _rounded(tests.finite)
            finding = Finding(seed, size, epochs, layer, statistic, *p_values, _rounded(tests.ratio), shrinkage)
            if seed == config.seeds[0]:
                moments = float(claim.loc[SHOWN]), float(claim.scale[SHOWN])
                finding = replace(finding, observed=_rounded(observed[:, SHOWN]), claimed=moments)
            yield finding


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values.tolist())


def findings_of(config: Config, results: Mapping[str, Any]) -> list[Finding]:
    """All that there are."""
    return [Finding(**record) for unit in units(config) for record in results.get(unit.name, [])]


Group = tuple[int, str, int, int]
"""Layer, statistic, batch size, epochs."""


def by_group(found: Iterable[Finding]) -> dict[Group, list[Finding]]:
    """The findings of all seeds together."""
    groups: dict[Group, list[Finding]] = {}
    for each in found:
        groups.setdefault((each.layer, each.statistic, each.batch_size, each.epochs), []).append(each)
    return groups


def share(found: Sequence[Finding], test: str) -> float | None:
    """How many units of all seeds a test does not reject."""
    p_values = [p for each in found for p in getattr(each, test)]
    return sum(p >= LEVEL for p in p_values) / len(p_values) if p_values else None


def median_ratio(found: Sequence[Finding]) -> float | None:
    """Observed variance over the claimed one, median over the units of all seeds."""
    ratios = [ratio for each in found for ratio in each.ratio]
    return float(torch.tensor(ratios, dtype=torch.float64).quantile(0.5)) if ratios else None


TITLES = {
    "fitted": "Gaussian of any mean and variance: units not rejected at 5 %",
    "limit": "Gaussian of the central limit theorem, as in the paper: units not rejected at 5 %",
    "finite": "The same, for batches drawn without replacement: units not rejected at 5 %",
}


def tables(config: Config, results: Mapping[str, Any]) -> list[Table]:
    """A table for each test, and one of the variances; a column for each number of epochs."""
    groups = by_group(findings_of(config, results))
    kinds = [(layer, s, size) for layer in range(1, LAYERS + 1) for s in STATISTICS for size in config.batch_sizes]
    heads = ("layer", "batch statistic", "M", *(f"epoch {epochs}" for epochs in config.epochs))
    blank, count = ("", "", ""), len(config.epochs)
    made = []
    for test, title in TITLES.items():
        cells = [(*kind, *(share(groups.get((*kind, e), ()), test) for e in config.epochs)) for kind in kinds]
        made.append(Table(title, heads, tuple(cells), (*blank, *[".0%"] * count)))
    ratios: list[tuple[Cell, ...]] = []
    for kind in kinds:
        own = [groups.get((*kind, epochs), ()) for epochs in config.epochs]
        shrinkage = next((each.shrinkage for found in own for each in found), None)
        ratios.append((*kind, shrinkage, *map(median_ratio, own)))
    title = "Observed variance over that of the central limit theorem, median over units"
    columns = (*heads[:3], "(N − M) / (N − 1)", *heads[3:])
    made.append(Table(title, columns, tuple(ratios), (*blank, *[".3f"] * (count + 1))))
    return made


def figures(config: Config, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """Single units, over epochs and over batch sizes, as in the paper; and how many of all units pass."""
    from batchbayes.plots import marginals_figure, normality_figure, normality_sweep_figure

    single: dict[tuple[int, int], list[Marginal]] = {}
    found = findings_of(config, results)
    for each in found:
        if each.observed:
            single.setdefault((each.batch_size, each.epochs), []).append(marginal_of(each))
    size, last = config.batch_sizes[0], config.epochs[-1]
    return {
        "all-units": normality_sweep_figure(config.batch_sizes, sweeps(config, by_group(found)), level=LEVEL),
        "single-units": marginals_figure(single[size, last]),
        "over-epochs": normality_figure({f"epoch {epochs}": single[size, epochs] for epochs in config.epochs}),
        "over-batch-sizes": normality_figure({f"M = {each}": single[each, last] for each in config.batch_sizes}),
    }


def sweeps(config: Config, groups: Mapping[Group, Sequence[Finding]]) -> "list[StatisticSweep]":
    """The tables, as the figure takes them."""
    from batchbayes.plots import StatisticSweep

    made = []
    for layer, statistic in [(layer, statistic) for layer in range(1, LAYERS + 1) for statistic in STATISTICS]:
        own = [[groups[layer, statistic, size, epochs] for size in config.batch_sizes] for epochs in config.epochs]
        shares = {
            name: [[_number(share(found, test)) for found in line] for line in own]
            for name, test in ((FITTED, "fitted"), (LIMIT, "limit"), (FINITE, "finite"))
        }
        ratio = [[_number(median_ratio(found)) for found in line] for line in own]
        expected = [found[0].shrinkage for found in own[0]]
        made.append(StatisticSweep(f"layer {layer}: batch {statistic}", shares, ratio, expected))
    return made


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def marginal_of(found: Finding) -> Marginal:
    """One unit beside the Gaussians that claim to describe it."""
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


def notes(config: Config) -> list[str]:
    """Where we differ from the paper."""
    synthetic = config.dataset == SYNTHETIC
    return [
        "The paper shows one unit a layer and says that the approximations hold. Here all units are tested, of "
        f"{len(config.seeds)} networks; those of layer 1 are sums of {'five' if synthetic else 'six'} inputs, so that "
        "their tests hang together.",
        f"{config.num_batches} batches a test: a claim that is nearly right is rejected once there are enough of them.",
        f"Our own choice: {', '.join(map(str, config.epochs))} epochs, a weight decay of {config.weight_decay:g}, and "
        "statistics of batches as large as those of the training.",
        *(["Synthetic data in place of yacht: numbers to test the program by."] if synthetic else []),
    ]
