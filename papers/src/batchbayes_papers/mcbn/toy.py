"""MCBN, MC dropout and an ensemble on one-dimensional data, as in figure 1 of the MCBN paper.

The network has three hidden layers of 30 units, and there are 500 draws. The paper does not give its data. Ours, in
`data.toy`, resembles the ConvNetJS regression demo and has a gap in the middle. MCBN is compared with MCBN at a batch
size tuned after training, with MC dropout and with a deep ensemble, all trained on the same 100 points.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from batchbayes_tables.stack.train import train_together
from torch import Tensor, nn

import batchbayes as bb
from batchbayes import datasets as toy
from batchbayes.models import MLP
from batchbayes.tools import Figure, GlobalStream, count
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.mcbn.methods import TUNING_SIZES, at_effective_batch_size
from batchbayes_papers.mcbn.scores import (
    DrawnPredictions,
    draw_predictions,
    log_likelihood,
    rounded,
    tune_fold_precision,
)
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.tables import CellValue, ResultTable, mean_of

WIDTHS = (30, 30, 30)
BATCH_SIZE = 32
NUM_POINTS, NUM_TEST = 100, 500
"""The numbers of training points (and of held-out points), and of test points inside (and outside) the data range."""
GRID = torch.linspace(toy.BEYOND[0][0], toy.BEYOND[-1][1], 241)[:, None]
"""The inputs of the curves in the figure."""
LEVELS = (1, 2, 3)
CONSTANT = "± 2 std, constant"


@dataclass(frozen=True)
class ToyConfig:
    """A configuration. The defaults are those of `quick`: as many draws as in the paper, and more than one network."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """The seeds of data and networks; the figure shows the first."""
    epochs: int = 600
    """As in the demo. With 300 epochs new points inside the range fit visibly worse."""
    num_samples: int = 500
    members: int = 10
    """The number of networks in the ensemble; MCBN uses the first of them."""
    dropout_rates: tuple[float, ...] = (0.2, 0.1, 0.05, 0.02)
    """The likelihood of the held-out points chooses one of them."""


PRESETS = {
    "smoke": ToyConfig(seeds=(0,), epochs=60, num_samples=40, members=3, dropout_rates=(0.1, 0.05)),
    "quick": ToyConfig(),
}
METHODS = {"batch norm": ("MCBN", "MCBN, M tuned"), "dropout": ("MC dropout",), "ensemble": ("deep ensemble",)}
"""The methods of each kind of network; each kind is a unit of work."""


@dataclass(frozen=True)
class ToyRow:
    """The scores of one method. "Inside" has training data; "outside" is in the gap of the data and beyond it."""

    seed: int
    method: str
    setting: str
    """The setting of the method, for example "M = 32"."""
    std_inside: float
    """The mean over test points of the standard deviation of the draws, without observation noise."""
    std_outside: float
    rmse_inside: float
    rmse_outside: float
    pll_inside: float
    """The mean log-likelihood of the mixture of the draws, with the best observation noise for the held-out points."""
    pll_outside: float
    mean: tuple[float, ...] = ()
    """The mean along the grid, for the figure."""
    std: tuple[float, ...] = ()
    constant_std: float | None = None
    """The constant uncertainty around that mean (CUBN for MCBN) under which the held-out points are likeliest."""


Predictor = Callable[[Tensor, Tensor], DrawnPredictions]
"""A function of inputs and targets, (N, 1) each, that predicts these targets."""


def units(config: ToyConfig) -> list[Unit]:
    """Return one unit for each seed and kind of network."""
    networks = {"batch norm": 1, "dropout": len(config.dropout_rates), "ensemble": config.members}
    return [
        Unit(f"seed {seed}, {kind}", {"seed": seed, "kind": kind}, effort=3 + networks[kind])
        for seed in config.seeds
        for kind in METHODS
    ]


def work(config: ToyConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> list[dict[str, Any]]:
    """Train networks of one kind, and score their methods."""
    seed = unit.arguments["seed"]
    make = {"batch norm": batch_norm_predictors, "dropout": dropout_predictors, "ensemble": ensemble_predictors}
    found = make[unit.arguments["kind"]](config, seed)
    with_curves = seed == config.seeds[0]
    return [asdict(toy_row(seed, method, *found[method], with_curves=with_curves)) for method in found]


def batch_norm_predictors(config: ToyConfig, seed: int) -> dict[str, tuple[str, Predictor]]:
    """Return MCBN at the batch size of the training, and at the one with the highest likelihood of held-out points."""
    (network,) = train_toy_networks(config, seed, [lambda: MLP(1, WIDTHS, 1)])
    inputs, _ = toy.noisy_points(NUM_POINTS, seed, "train")
    posterior = bb.mcbn(
        network, inputs, batch_size=BATCH_SIZE, num_samples=config.num_samples, seed=seed, center="batches"
    )
    by_size = {size: by_draws(at_effective_batch_size(posterior, size), config, seed) for size in TUNING_SIZES}
    tuned = most_likely_setting(by_size, seed)
    return {
        "MCBN": (f"M = {BATCH_SIZE}", by_draws(posterior, config, seed)),
        "MCBN, M tuned": (f"M = {tuned}", by_size[tuned]),
    }


def dropout_predictors(config: ToyConfig, seed: int) -> dict[str, tuple[str, Predictor]]:
    """Return MC dropout at the rate with the highest likelihood of held-out points."""
    networks = train_toy_networks(
        config, seed, [lambda rate=rate: dropout_network(rate) for rate in config.dropout_rates]
    )
    by_rate = {
        rate: by_draws(bb.mc_dropout(network), config, seed)
        for rate, network in zip(config.dropout_rates, networks, strict=True)
    }
    rate = most_likely_setting(by_rate, seed)
    return {"MC dropout": (f"p = {rate:g}", by_rate[rate])}


def dropout_network(rate: float) -> MLP:
    """Return a network with dropout before every layer except the first, which has only one input."""
    network = MLP(1, WIDTHS, 1, norm=False, dropout=rate)
    next(module for module in network.modules() if isinstance(module, nn.Dropout)).p = 0.0
    return network


def ensemble_predictors(config: ToyConfig, seed: int) -> dict[str, tuple[str, Predictor]]:
    """Return an ensemble of networks with batch norm. Each network predicts with its running statistics."""
    networks = train_toy_networks(config, seed, [lambda: MLP(1, WIDTHS, 1)] * config.members)
    members = [by_draws(bb.deterministic(network), config, seed) for network in networks]

    def predict_all(inputs: Tensor, targets: Tensor) -> DrawnPredictions:
        each = [member(inputs, targets) for member in members]
        return DrawnPredictions(torch.cat([one.draws for one in each]), each[0].truth)

    return {"deep ensemble": (f"{config.members} networks", predict_all)}


def train_toy_networks(config: ToyConfig, seed: int, makers: Sequence[Callable[[], MLP]]) -> list[MLP]:
    """Train networks on the points of a seed. Each has its own initial weights and its own order of the data."""
    with GlobalStream(seed):
        networks = [make() for make in makers]
    orders = range(seed * config.members, seed * config.members + len(networks))
    data = toy.noisy_points(NUM_POINTS, seed, "train")
    configs = [bb.TrainingConfig(config.epochs, BATCH_SIZE, seed=n) for n in orders]
    train_together(networks, [data] * len(networks), configs)
    return networks


def by_draws(posterior: bb.Posterior, config: ToyConfig, seed: int) -> Predictor:
    """Return a predictor by exact draws; by one draw if all draws are the same."""

    def in_units(outputs: Tensor) -> Tensor:  # (..., 1) -> (...)
        return outputs.squeeze(-1).double()

    return lambda inputs, targets: draw_predictions(
        posterior, inputs, in_units(targets), in_units, config.num_samples, seed
    )


def tuned_on_held_out(predict: Predictor, seed: int) -> tuple[float, float]:
    """Return the precision with the highest likelihood of the held-out points, and the cost there."""
    return tune_fold_precision([predict(*toy.noisy_points(NUM_POINTS, seed, "held out"))], "PLL")


def most_likely_setting(predictors: Mapping[Any, Predictor], seed: int) -> Any:
    """Return the setting with the highest likelihood of held-out points, each with its own best observation noise."""
    costs = {setting: tuned_on_held_out(predict, seed)[1] for setting, predict in predictors.items()}
    return min(costs, key=costs.__getitem__)


def toy_row(seed: int, method: str, setting: str, predict: Predictor, *, with_curves: bool) -> ToyRow:
    """Score predictions where there is training data and where there is none."""
    precision, _ = tuned_on_held_out(predict, seed)
    inside = predict(*toy.noisy_points(NUM_TEST, seed, "inside"))
    outside = predict(*toy.noisy_points(NUM_TEST, seed, "outside", toy.BEYOND))
    row = ToyRow(
        seed,
        method,
        setting,
        std_inside=bb.metrics.mean_score(inside.variance.sqrt()),
        std_outside=bb.metrics.mean_score(outside.variance.sqrt()),
        rmse_inside=bb.metrics.root_mean_squared_error(inside.mean, inside.truth),
        rmse_outside=bb.metrics.root_mean_squared_error(outside.mean, outside.truth),
        pll_inside=bb.metrics.mean_score(log_likelihood(inside, precision)),
        pll_outside=bb.metrics.mean_score(log_likelihood(outside, precision)),
    )
    if not with_curves:
        return row
    along, held_out = predict(GRID, toy.true_function(GRID)), predict(*toy.noisy_points(NUM_POINTS, seed, "held out"))
    constant = bb.metrics.root_mean_squared_error(held_out.mean, held_out.truth)
    return replace(row, mean=rounded(along.mean), std=rounded(along.variance.sqrt()), constant_std=constant)


COLUMNS = {
    "std inside": ("std_inside", ".3f"),
    "std outside": ("std_outside", ".3f"),
    "RMSE inside": ("rmse_inside", ".3f"),
    "RMSE outside": ("rmse_outside", ".3f"),
    "PLL inside": ("pll_inside", ".2f"),
    "PLL outside": ("pll_outside", ".2f"),
}
"""The headings of the table, with their fields and formats."""


def toy_rows(config: ToyConfig, results: Results) -> list[ToyRow]:
    """Return the rows of all finished units, by seed."""
    return [ToyRow(**record) for unit in units(config) for record in results.get(unit.name, [])]


def tables(config: ToyConfig, results: Results) -> list[ResultTable]:
    """Return means over seeds, and the range of a ratio."""
    rows, lines = toy_rows(config, results), []
    for method in (method for methods in METHODS.values() for method in methods):
        own = [row for row in rows if row.method == method]
        cells: list[CellValue] = [method, ", ".join(dict.fromkeys(row.setting for row in own))]
        cells += [mean_of(own, name) for name, _ in COLUMNS.values()]
        ratios = sorted(row.std_outside / row.std_inside for row in own)
        cells.append(" to ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in ratios[:: max(1, len(ratios) - 1)])) or None)
        lines.append(tuple(cells))
    return [
        ResultTable(
            "Inside the range of the training data, and outside it: in the gap and beyond",
            ("method", "run with", *COLUMNS, "std outside / inside"),
            tuple(lines),
            ("", "", *(form for _, form in COLUMNS.values()), ""),
            (
                f"Means over {count(len(config.seeds), 'data set')}, and the range of the ratio. std is the standard "
                "deviation of the drawn functions, without observation noise. PLL is the mean log-likelihood, with "
                "observation noise.",
            ),
        )
    ]


def figures(config: ToyConfig, results: Results) -> dict[str, Figure]:
    """Show the bands of all methods on the first data set, and two constant standard deviations as dashed lines."""
    shown = [row for row in toy_rows(config, results) if row.seed == config.seeds[0]]
    figure = bb.plots.band_figure(
        GRID[:, 0],
        [bb.plots.Band(f"{row.method}: {row.setting}", row.mean, row.std) for row in shown],
        data=toy.noisy_points(NUM_POINTS, config.seeds[0], "train"),
        truth=toy.true_function(GRID)[:, 0],
        support=toy.SUPPORT,
        levels=LEVELS,
        columns=2,
    )
    for panel, row in zip(figure.axes, shown, strict=True):
        limits = panel.get_ylim()
        for sign, label in ((-2, CONSTANT), (2, None)):
            edge = torch.tensor(row.mean) + sign * (row.constant_std or 0.0)
            panel.plot(GRID[:, 0], edge, color="black", ls="--", lw=0.8, label=label)
        panel.set_ylim(limits)
    figure.legends[0].remove()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, columnspacing=1.2)
    return {"predictive-bands": figure}


def notes(config: ToyConfig) -> list[str]:
    """Say how this differs from the paper."""
    return [
        "The paper does not give its data. Ours is 0.3 x + 0.5 sin 2x with noise of "
        f"{toy.NOISE_STD:g}, {NUM_POINTS} points in [-5, -1] and [1, 5]. {config.epochs} epochs of Adam at batch size "
        f"{BATCH_SIZE} are our choice.",
        "The paper shows MCBN, and constant uncertainty (CUBN) as dashed lines. Here they are two standard deviations "
        "from the mean of each method, with the deviation under which the held-out points are likeliest: bands are of "
        "the drawn functions alone, dashed lines have the noise of the data in them.",
        "The batch size, the dropout rate and the observation noise are those with the "
        f"highest likelihood of {NUM_POINTS} held-out points, all inside the range of the data.",
        "There is dropout before every layer except the first, which has a single input.",
        *([f"{config.num_samples} draws instead of 500."] if config.num_samples != 500 else []),
    ]
