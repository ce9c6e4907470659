"""The pictures of Concepts, from small networks that are trained here in seconds, and that of Architecture."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from architecture import architecture
from matplotlib.figure import Figure
from torch import Tensor, nn

import batchbayes as bb
from batchbayes import TrainingConfig, train
from batchbayes import datasets as toy
from batchbayes.metrics import equal_width_reliability
from batchbayes.models import MLP
from batchbayes.plots import reliability_figure, save_figure
from batchbayes.tools import BLUE, GREY, VERMILION, house_style, new_figure, shuffled
from batchbayes.training.loop import supervised

BATCH_SIZE = 32
CENTRES = ((-1.4, 0.0), (1.4, 0.0), (0.0, 2.2))


def draw_all(folder: Path) -> None:
    """Write all pictures to a folder, unless they are there."""
    folder.mkdir(exist_ok=True)
    wanted = {"draws": draws, "omega": omega, "engines": engines, "three": three, "calibration": calibration}
    for name, picture in wanted.items():
        path = folder / f"concepts-{name}.png"
        if not path.exists():
            save_figure(picture(), path)
    save_figure(architecture(), folder / "architecture.png")


def _trained(network: nn.Module, x: Tensor, y: Tensor, loss: Any, epochs: int) -> nn.Module:
    config = TrainingConfig(epochs=epochs, batch_size=BATCH_SIZE)
    train(network, shuffled(x, y, BATCH_SIZE, 0), supervised(loss), config)
    return network


@cache
def _regression() -> tuple[Tensor, Tensor, bb.BatchNormPosterior]:
    x, y = toy.noisy_points(100)
    torch.manual_seed(0)
    network = _trained(MLP(1, [30, 30, 30], 1), x, y, nn.functional.mse_loss, 500)
    return x, y, bb.mcbn(network, x, batch_size=BATCH_SIZE, num_samples=200)


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of three classes, (N, 2). Two of the classes overlap."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=random)
    return torch.tensor(CENTRES)[labels] + 0.8 * torch.randn(count, 2, generator=random), labels


@cache
def _classifier() -> tuple[Tensor, Tensor, nn.Module]:
    x, y = blobs(400, 0)
    torch.manual_seed(0)
    return x, y, _trained(MLP(2, [32, 32], 3), x, y, nn.functional.cross_entropy, 60)


def draws() -> Figure:
    """Draw twenty functions, and what they say together."""
    x, y, posterior = _regression()
    grid = torch.linspace(-7, 7, 300)[:, None]
    seen = bb.predict(posterior, grid, bb.gaussian(100.0), num_samples=20, keep_draws=True)
    with house_style():
        figure, panels = new_figure(1, 2, (8.6, 3.0))
        for panel in panels[0]:
            panel.plot(x[:, 0], y[:, 0], "o", color="black", ms=2.2, mew=0)
            panel.set(xlabel="x", xlim=(-7, 7), ylim=(-3.6, 3.6))
        panels[0, 0].plot(grid[:, 0], seen.draws[:, :, 0].T, color=BLUE, lw=0.8, alpha=0.55)
        panels[0, 0].set(title="20 draws: each is one network", ylabel="y")
        low, high = seen.mean[:, 0] - 2 * seen.std[:, 0], seen.mean[:, 0] + 2 * seen.std[:, 0]
        panels[0, 1].fill_between(grid[:, 0], low, high, color=BLUE, alpha=0.25, lw=0)
        panels[0, 1].plot(grid[:, 0], seen.mean[:, 0], color=BLUE, lw=1.6)
        panels[0, 1].set(title="what they say together: mean and ± 2 std")
    return figure


def omega() -> Figure:
    """Draw the statistics of mini-batches in one channel of each of two layers."""
    _, _, posterior = _regression()
    other = posterior.at_batch_size(BATCH_SIZE // 4)
    width = 30  # channels of a layer: 30 means, then 30 log stds
    with house_style():
        figure, panels = new_figure(1, 2, (8.6, 3.2), share=False)
        for number, panel in enumerate(panels[0]):
            mean, log_std = 2 * width * number, 2 * width * number + width
            for each, colour, mark in ((posterior, BLUE, "o"), (other, VERMILION, "s")):
                points = each.center + each.deviations
                label = f"batches of {each.batch_size:.0f}"
                panel.plot(
                    points[:, mean], points[:, log_std], mark, color=colour, ms=2.6, mew=0, alpha=0.6, label=label
                )
            panel.plot(posterior.center[mean], posterior.center[log_std], "k+", ms=12, mew=1.6, label="centre")
            panel.set(xlabel="mean", ylabel="log std", title=f"batch-norm layer {number + 1}, channel 1")
        panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


def engines() -> Figure:
    """Compare the linear engine with exact draws, at a large and at a small batch size."""
    x, _, network = _classifier()
    posterior, inputs = bb.mcbn(network, x, batch_size=BATCH_SIZE, num_samples=200), blobs(300, 2)[0]
    with house_style():
        figure, panels = new_figure(1, 2, (8.6, 3.2), share=False)
        for panel, batch_size in zip(panels[0], (128, 4), strict=True):
            wanted = posterior.at_batch_size(batch_size)
            exact, linear = (_disagreement(wanted, inputs, engine) for engine in ("sample", "linear"))  # the same draws
            panel.plot(exact, linear, "o", color=BLUE, ms=3, mew=0, alpha=0.6)
            end = 1.05 * float(max(exact.max(), linear.max()))
            panel.plot([0, end], [0, end], color=GREY, lw=1, ls=(0, (4, 2)))
            panel.set(xlabel="mutual information, exact draws", ylabel="the same by the linear engine")
            panel.set(xlim=(0, end), ylim=(0, end))
            panel.set_title(f"batches of {batch_size}: {'can be trusted' if batch_size > 64 else 'not linear enough'}")
    return figure


def _disagreement(posterior: bb.BatchNormPosterior, inputs: Tensor, engine: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bb.BatchbayesWarning)  # the right panel shows what it warns of
        return bb.predict(posterior, inputs, bb.categorical(), num_samples=200, engine=engine).mutual_information


def three() -> Figure:
    """Map the three uncertainties over the plane."""
    x, y, network = _classifier()
    posterior = bb.mcbn(network, x, batch_size=BATCH_SIZE, num_samples=64)
    side = torch.linspace(-6, 6, 121)
    plane = torch.cartesian_prod(side, side)
    seen = bb.predict(posterior, plane, bb.categorical(), num_samples=64)
    detector = bb.novelty(network, x, calibration=blobs(300, 1)[0])
    maps = {
        "classes overlap\n(expected entropy)": seen.expected_entropy,
        "draws disagree\n(mutual information)": seen.mutual_information,
        "unlike the training data\n(novelty, 1 - p-value)": 1 - detector.report(plane, whole=False).p_value,
    }
    with house_style():
        figure, panels = new_figure(1, 3, (9.2, 3.2))
        for panel, (title, values) in zip(panels[0], maps.items(), strict=True):
            grid = values.reshape(121, 121).T
            panel.imshow(grid, extent=(-6, 6, -6, 6), origin="lower", cmap="viridis", aspect="equal")
            for label, mark in enumerate("os^"):
                panel.plot(*x[y == label].T, mark, ms=2, mew=0, color="white", alpha=0.7)
            panel.set(title=title, xticks=[], yticks=[])
    return figure


def calibration() -> Figure:
    """Draw reliability before and after a temperature."""
    x, y = blobs(36, 0)
    torch.manual_seed(0)
    network = _trained(MLP(2, [64, 64], 3, norm=False), x, y, nn.functional.cross_entropy, 600)  # too sure of itself
    network.eval()
    held_out, test = blobs(500, 1), blobs(3000, 2)
    own = bb.deterministic(network)
    kept = bb.predict(own, held_out[0], bb.categorical(), keep_draws=True)
    temperature = bb.calibrate.tune_temperature(kept, held_out[1])
    bins = {}
    for name, likelihood in {
        "network as it is": bb.categorical(),
        f"divided by a temperature of {temperature:.1f}": bb.categorical(temperature=temperature),
    }.items():
        confidence, answer = bb.predict(own, test[0], likelihood).probs.max(-1)
        bins[name] = equal_width_reliability(confidence, answer == test[1])
    return reliability_figure(bins)
