"""Figure 1 of the MCBN paper: predictive bands of a small network on one-dimensional regression data.

Three hidden layers of 30 units and 500 draws, in the style of the ConvNetJS regression demo. The paper does not give
its data; ours is that of `data.toy`, with a gap in the middle. Beside MCBN stand its batch size tuned afterwards,
MC dropout and a deep ensemble, all trained on the same 100 points.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from batchbayes._common.rng import GlobalStream
from batchbayes._common.text import count
from batchbayes.data import toy
from batchbayes.experiments.mcbn.methods import TUNING_SIZES
from batchbayes.experiments.mcbn.scores import Drawn, draw, log_likelihood, tune_precision
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.dropout import mc_dropout
from batchbayes.methods.point import deterministic
from batchbayes.metrics import mean_score, root_mean_squared_error
from batchbayes.models.mlp import MLP
from batchbayes.posterior import Posterior
from batchbayes.reproduce.experiment import Unit
from batchbayes.reproduce.tables import Cell, Table
from batchbayes.training.loop import TrainingConfig
from batchbayes.training.stack.train import train_together

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (30, 30, 30)
BATCH_SIZE = 32
NUM_POINTS, NUM_TEST = 100, 500
"""Points to train on, and as many to tune by; points to test by, inside and outside the range of the data."""
GRID = torch.linspace(toy.BEYOND[0][0], toy.BEYOND[-1][1], 241)[:, None]
"""Where the curves of the figure are taken."""
LEVELS = (1, 2, 3)


@dataclass(frozen=True)
class Config:
    """One preset. The defaults are those of `quick`: the paper's number of draws, and more than its one network."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of data and networks; the figure shows the first."""
    epochs: int = 600
    """As in the demo: 300 fit new points inside the range visibly worse."""
    num_samples: int = 500
    members: int = 10
    """Networks of the ensemble; MCBN is fitted to the first of them."""
    dropout_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.02)
    """To choose from by the likelihood of the held-out points."""


PRESETS = {
    "smoke": Config(seeds=(0,), epochs=60, num_samples=40, members=3, dropout_rates=(0.1, 0.05)),
    "quick": Config(),
}
METHODS = {"batch norm": ("MCBN", "MCBN, M tuned"), "dropout": ("MC dropout",), "ensemble": ("deep ensemble",)}
"""By kind of network, each a unit of work."""


@dataclass(frozen=True)
class Row:
    """One way to predict after one training. Inside is where there is training data, outside the gap and beyond."""

    seed: int
    method: str
    setting: str
    """What the method is run with, such as "M = 32"."""
    std_inside: float
    """Mean over test points of the standard deviation of the draws, without observation noise."""
    std_outside: float
    rmse_inside: float
    rmse_outside: float
    pll_inside: float
    """Mean log-likelihood of the mixture of the draws, with the observation noise that fits held-out points best."""
    pll_outside: float
    mean: tuple[float, ...] = ()
    """Along the grid, for the figure."""
    std: tuple[float, ...] = ()


Predictor = Callable[[Tensor, Tensor], Drawn]
"""From inputs and targets, (N, 1) each, to predictions of these."""


def units(config: Config) -> list[Unit]:
    """A kind of network for each seed."""
    networks = {"batch norm": 1, "dropout": len(config.dropout_rates), "ensemble": config.members}
    return [
        Unit(f"seed {seed}, {kind}", {"seed": seed, "kind": kind}, effort=3 + networks[kind])
        for seed in config.seeds
        for kind in METHODS
    ]


def work(
    config: Config, unit: Unit, needed: Mapping[str, Any], data_folder: str | os.PathLike[str] | None = None
) -> list[dict[str, Any]]:
    """Train networks of one kind, and predict by them."""
    seed = unit.arguments["seed"]
    methods = {"batch norm": batch_norm, "dropout": dropout, "ensemble": ensemble}[unit.arguments["kind"]]
    curves = seed == config.seeds[0]
    found = methods(config, seed)
    return [asdict(scored(seed, method, *found[method], curves=curves)) for method in found]


def batch_norm(config: Config, seed: int) -> dict[str, tuple[str, Predictor]]:
    """MCBN at the batch size of the training, and at the one under which the held-out points are likeliest."""
    (network,) = trained(config, seed, [lambda: MLP(1, WIDTHS, 1)])
    inputs, _ = toy.noisy_points(NUM_POINTS, seed, "train")
    posterior = mcbn(network, inputs, batch_size=BATCH_SIZE, num_samples=config.num_samples, seed=seed)
    by_size = {size: by_draws(posterior.at_batch_size(size), config, seed) for size in TUNING_SIZES}
    tuned = likeliest(by_size, seed)
    return {
        "MCBN": (f"M = {BATCH_SIZE}", by_draws(posterior, config, seed)),
        "MCBN, M tuned": (f"M = {tuned}", by_size[tuned]),
    }


def dropout(config: Config, seed: int) -> dict[str, tuple[str, Predictor]]:
    """MC dropout at the rate under which the held-out points are likeliest."""
    networks = trained(config, seed, [lambda rate=rate: dropout_network(rate) for rate in config.dropout_rates])
    by_rate = {
        rate: by_draws(mc_dropout(network), config, seed)
        for rate, network in zip(config.dropout_rates, networks, strict=True)
    }
    rate = likeliest(by_rate, seed)
    return {"MC dropout": (f"p = {rate:g}", by_rate[rate])}


def dropout_network(rate: float) -> MLP:
    """Dropout before every layer but the first: to drop the only input is to drop all there is."""
    network = MLP(1, WIDTHS, 1, norm=False, dropout=rate)
    next(module for module in network.modules() if isinstance(module, nn.Dropout)).p = 0.0
    return network


def ensemble(config: Config, seed: int) -> dict[str, tuple[str, Predictor]]:
    """Networks with batch norm from several starts, each as it predicts by itself."""
    networks = trained(config, seed, [lambda: MLP(1, WIDTHS, 1)] * config.members)
    members = [by_draws(deterministic(network), config, seed, count=1) for network in networks]

    def predicted(inputs: Tensor, targets: Tensor) -> Drawn:
        each = [member(inputs, targets) for member in members]
        return Drawn(torch.cat([one.draws for one in each]), each[0].truth)

    return {"deep ensemble": (f"{config.members} networks", predicted)}


def trained(config: Config, seed: int, makers: Sequence[Callable[[], MLP]]) -> list[MLP]:
    """Networks on the points of a seed; each has its own start and its own order of the data."""
    with GlobalStream(seed):
        networks = [make() for make in makers]
    orders = range(seed * config.members, seed * config.members + len(networks))
    data = toy.noisy_points(NUM_POINTS, seed, "train")
    configs = [TrainingConfig(config.epochs, BATCH_SIZE, seed=n) for n in orders]
    train_together(networks, [data] * len(networks), configs)
    return networks


def by_draws(posterior: Posterior, config: Config, seed: int, count: int | None = None) -> Predictor:
    """Exact draws, as many as the preset says."""
    return lambda inputs, targets: draw(
        posterior, inputs, targets[:, 0].double(), _single, count or config.num_samples, seed
    )


def _single(outputs: Tensor) -> Tensor:
    """(..., 1) -> (...), in double precision."""
    return outputs.squeeze(-1).double()


def likeliest(predictors: Mapping[Any, Predictor], seed: int) -> Any:
    """The setting under which held-out points are likeliest, each with the observation noise that suits it best."""
    held_out = toy.noisy_points(NUM_POINTS, seed, "held out")
    costs = {setting: tune_precision([predict(*held_out)], "PLL")[1] for setting, predict in predictors.items()}
    return min(costs, key=costs.__getitem__)


def scored(seed: int, method: str, setting: str, predict: Predictor, *, curves: bool) -> Row:
    """Predict where there is data and where there is none."""
    precision, _ = tune_precision([predict(*toy.noisy_points(NUM_POINTS, seed, "held out"))], "PLL")
    inside = predict(*toy.noisy_points(NUM_TEST, seed, "inside"))
    outside = predict(*toy.noisy_points(NUM_TEST, seed, "outside", toy.BEYOND))
    row = Row(
        seed,
        method,
        setting,
        std_inside=mean_score(inside.variance.sqrt()),
        std_outside=mean_score(outside.variance.sqrt()),
        rmse_inside=root_mean_squared_error(inside.mean, inside.truth),
        rmse_outside=root_mean_squared_error(outside.mean, outside.truth),
        pll_inside=mean_score(log_likelihood(inside, precision)),
        pll_outside=mean_score(log_likelihood(outside, precision)),
    )
    if not curves:
        return row
    along = predict(GRID, toy.true_function(GRID))
    return replace(row, mean=_rounded(along.mean), std=_rounded(along.variance.sqrt()))


def _rounded(values: Tensor) -> tuple[float, ...]:
    """To what a figure can show."""
    return tuple(float(f"{value:.5g}") for value in values.tolist())


COLUMNS = {
    "std inside": ("std_inside", ".3f"),
    "std outside": ("std_outside", ".3f"),
    "RMSE inside": ("rmse_inside", ".3f"),
    "RMSE outside": ("rmse_outside", ".3f"),
    "PLL inside": ("pll_inside", ".2f"),
    "PLL outside": ("pll_outside", ".2f"),
}
"""Headings of the table, the fields behind them and their format."""


def rows_of(config: Config, results: Mapping[str, Any]) -> list[Row]:
    """All rows that there are, by seed."""
    return [Row(**record) for unit in units(config) for record in results.get(unit.name, [])]


def tables(config: Config, results: Mapping[str, Any]) -> list[Table]:
    """Means over seeds, with their range."""
    rows, lines = rows_of(config, results), []
    for method in (method for methods in METHODS.values() for method in methods):
        own = [row for row in rows if row.method == method]
        cells: list[Cell] = [method, ", ".join(dict.fromkeys(row.setting for row in own))]
        for name, _ in COLUMNS.values():
            values = [getattr(row, name) for row in own]
            cells.append(sum(values) / len(values) if values else None)
        ratios = sorted(row.std_outside / row.std_inside for row in own)
        cells.append(f"{ratios[0]:.1f} to {ratios[-1]:.1f}" if ratios else None)
        lines.append(tuple(cells))
    return [
        Table(
            "Inside the range of the data, and outside: in the gap and beyond",
            ("method", "run with", *COLUMNS, "std outside / inside"),
            tuple(lines),
            ("", "", *(form for _, form in COLUMNS.values()), ""),
            (
                f"Means over {count(len(config.seeds), 'data set')}, and the range of the ratio. std: of the "
                "drawn functions, without observation noise. PLL: mean log-likelihood, observation noise included.",
            ),
        )
    ]


def figures(config: Config, results: Mapping[str, Any]) -> "dict[str, Figure]":
    """The bands of all methods on the first data set."""
    from batchbayes.plots import Band, band_figure

    shown = [row for row in rows_of(config, results) if row.seed == config.seeds[0]]
    figure = band_figure(
        GRID[:, 0],
        [Band(f"{row.method}: {row.setting}", row.mean, row.std) for row in shown],
        data=toy.noisy_points(NUM_POINTS, config.seeds[0], "train"),
        truth=toy.true_function(GRID)[:, 0],
        support=toy.SUPPORT,
        levels=LEVELS,
        columns=2,
    )
    return {"bands": figure}


def notes(config: Config) -> list[str]:
    """Where we differ from the paper."""
    return [
        "The paper does not give its data: here 0.3 x + 0.5 sin 2x with noise of "
        f"{toy.NOISE_STD:g}, {NUM_POINTS} points in [-5, -1] and [1, 5]. {config.epochs} epochs of Adam at batch size "
        f"{BATCH_SIZE} are our choice.",
        "The paper shows MCBN alone. The batch size, the dropout rate and the observation noise are those under which "
        f"{NUM_POINTS} held-out points, all inside the range of the data, are likeliest.",
        "Dropout stands before every layer but the first, which has a single input.",
        *([f"{config.num_samples} draws instead of 500."] if config.num_samples != 500 else []),
    ]
