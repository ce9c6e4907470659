"""Stochastic gradient MCMC on a posterior that is known exactly: a conjugate Gaussian regression.

Many chains run at once. The table says how far mean and covariance are from the exact ones, in Monte Carlo standard
errors, with R-hat and the effective sample size, with all data and under the noise of mini-batches.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.methods.samples.sg_mcmc import Hamiltonian, Langevin
from batchbayes.tools import Figure, GlobalStream, generator
from batchbayes_papers.data.folder import DataFolder
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import seeds_figure
from batchbayes_papers.runner.tables import ResultTable
from batchbayes_papers.samples.diagnostics import effective_sample_size, r_hat

NUM_EXAMPLES, SIZE, TAU, DELTA = 60, 3, 4.0, 2.0
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGLD": (Langevin, {"lr": 0.02}),
    "preconditioned SGLD": (Langevin, {"lr": 0.02, "preconditioned": True}),
    "SGHMC": (Hamiltonian, {"lr": 0.005, "friction": 0.2}),
}
"""Learning rates in units of the inverse curvature of the mean loss."""


@dataclass(frozen=True)
class McmcConfig:
    """A configuration. The defaults are those of the preset `quick`."""

    num_chains: int = 40
    steps: int = 40_000
    batch_sizes: tuple[int, ...] = (60, 40)
    """60 is all data."""


PRESETS = {"smoke": McmcConfig(4, 400), "quick": McmcConfig(), "paper": McmcConfig(100, 400_000, (60, 40, 20))}


def units(config: McmcConfig) -> list[Unit]:
    """Return one unit for each sampler and batch size."""
    return [
        Unit(f"{sampler}, batches of {size}", {"sampler": sampler, "batch_size": size})
        for sampler in SAMPLERS
        for size in config.batch_sizes
    ]


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs, targets, and the exact posterior mean and covariance of the weights."""
    random = generator(0, "regression")
    x = torch.linalg.qr(torch.randn(NUM_EXAMPLES, SIZE, generator=random, dtype=torch.float64))[0]
    mix = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.9, 0.0], [-0.3, 0.2, 0.9]], dtype=torch.float64)
    x = NUM_EXAMPLES**0.5 * x @ mix
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y = y + TAU**-0.5 * torch.randn(NUM_EXAMPLES, generator=random, dtype=torch.float64)
    covariance = (TAU * x.T @ x + DELTA * torch.eye(SIZE, dtype=torch.float64)).inverse()
    return x, y, TAU * covariance @ x.T @ y, covariance


def work(config: McmcConfig, unit: Unit, needed: Results, data_folder: DataFolder = None) -> dict[str, Any]:
    """Run all chains of one sampler, and compare their moments with the exact ones."""
    x, y, mean, covariance = problem()
    stiffness = float(torch.linalg.eigvalsh(covariance.inverse())[-1]) / NUM_EXAMPLES
    kind, options = SAMPLERS[unit.arguments["sampler"]]
    scale = (stiffness / NUM_EXAMPLES) ** 0.5 if "preconditioned" in options else 1.0
    options = options | {"lr": options["lr"] / stiffness * scale, "num_examples": NUM_EXAMPLES}
    size, kept = unit.arguments["batch_size"], []
    with GlobalStream(0):
        weights = nn.Parameter(mean + 0.3 * torch.randn(config.num_chains, SIZE, dtype=torch.float64))
        sampler = kind([weights], **options)
        for step in range(config.steps):
            every = torch.arange(NUM_EXAMPLES).expand(config.num_chains, -1)
            rows = every if size == NUM_EXAMPLES else torch.randint(NUM_EXAMPLES, (config.num_chains, size))
            errors = (x[rows] @ weights.detach()[:, :, None])[:, :, 0] - y[rows]
            gradient = TAU * (errors[:, None] @ x[rows])[:, 0] / size
            weights.grad = gradient + DELTA / NUM_EXAMPLES * weights.detach()
            sampler.step()
            if step >= config.steps // 10:
                sampler.param_groups[0]["adapts"] = False
                if step % 20 == 0:
                    kept.append(weights.detach().clone())
    return summary(torch.stack(kept, 1), mean, covariance)


def summary(kept: Tensor, mean: Tensor, covariance: Tensor) -> dict[str, Any]:
    """Return the errors of the moments of chains (C, S, D) in Monte Carlo standard errors, and the diagnostics."""
    products = (kept - mean)[..., :, None] * (kept - mean)[..., None, :]
    errors = []
    for values, exact in ((kept, mean), (products, covariance)):
        spread = values.flatten(0, 1).std(0) / effective_sample_size(values).sqrt()
        errors.append(float(((values.mean((0, 1)) - exact).abs() / spread).max()))
    ratio = kept.flatten(0, 1).var(0) / covariance.diagonal()
    return {
        "mean_error": errors[0],
        "covariance_error": errors[1],
        "r_hat": float(r_hat(kept).max()),
        "effective": float(effective_sample_size(kept).min()),
        "variance_ratios": ratio.tolist(),
        "trace": kept[: min(4, len(kept)), :: max(1, kept.shape[1] // 200), 0].tolist(),
    }


def tables(config: McmcConfig, results: Results) -> list[ResultTable]:
    """Return the errors of each sampler."""
    names = ("mean_error", "covariance_error", "r_hat", "effective")
    lines = []
    for unit in units(config):
        own = results.get(unit.name)
        lines.append((
            unit.arguments["sampler"], unit.arguments["batch_size"], *(own[name] if own else None for name in names),
            " ".join(f"{ratio:.3f}" for ratio in own["variance_ratios"]) if own else None,
        ))  # fmt: skip
    return [
        ResultTable(
            f"Moments of {config.num_chains} chains of {config.steps:,} steps",
            ("sampler", "batch", "mean", "covariance", "R-hat", "effective samples", "variances over exact ones"),
            tuple(lines),
            ("", "", ".2f", ".2f", ".4f", ".0f", ""),
            ("Mean and covariance: the largest error in Monte Carlo standard errors.",),
        )
    ]


def figures(config: McmcConfig, results: Results) -> dict[str, Figure]:
    """Show the first weight along some chains of the first sampler."""
    trace = torch.tensor(results[units(config)[0].name]["trace"])
    lines = {f"chain {number + 1}": (list(range(len(row))), row[None].numpy()) for number, row in enumerate(trace)}
    return {"first-weight-along-chains": seeds_figure(lines, xlabel="sample", ylabel="first weight")}


def notes(config: McmcConfig) -> list[str]:
    """Say what was sampled."""
    return [f"A regression with {SIZE} weights, {NUM_EXAMPLES} examples, noise precision {TAU:g} and prior {DELTA:g}."]
