"""Does engine="auto" keep its promise? A table over small trained networks of many kinds.

The promise: of 100 networks for which "auto" takes the linear engine, at most one has a mean variance (for classes:
mutual information) that is more than 20 % off, or a rank correlation with the exact one below 0.9; and at least half of
the networks for which the linear engine is good get it. The truth is that of all draws on new inputs.

    python benchmarks/auto_engine.py --first 1000 --networks 100 --out auto.jsonl
"""

import argparse
import json
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import batchbayes as bb
from batchbayes.metrics import rank_correlation

DRAWS, MOST_OFF, LEAST_CORRELATION = 64, 0.2, 0.9
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU)


def made(seed: int) -> dict[str, Any]:
    """Return the settings of one network. Half of them are classifiers, a fifth have convolutions."""
    choose = random.Random(seed)
    return {
        "seed": seed,
        "inputs": choose.choice((1, 2, 4, 8)),
        "width": choose.choice((8, 16, 32, 64)),
        "depth": choose.choice((1, 2, 3)),
        "activation": choose.choice(ACTIVATIONS).__name__,
        "batch_size": choose.choice((8, 16, 32, 64, 128, 256)),
        "classes": choose.choice((0, 0, 0, 2, 3, 6)),
        "convolutions": choose.random() < 0.2,
        "steps": choose.choice((50, 200, 600)),
        "noise": choose.choice((0.05, 0.3)),
    }


def network_of(given: dict[str, Any]) -> nn.Module:
    """Build the network."""
    activation = next(each for each in ACTIVATIONS if each.__name__ == given["activation"])
    outputs, width, layers = max(1, given["classes"]), given["width"], []
    size = given["inputs"]
    if given["convolutions"]:
        layers = [nn.Unflatten(1, (1, size)), nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), activation()]
        layers += [nn.Flatten()]
        size *= 8
    for _ in range(given["depth"]):
        layers += [nn.Linear(size, width), nn.BatchNorm1d(width), activation()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, outputs))


def data_of(given: dict[str, Any], count: int, part: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a random smooth function with noise, or its classes."""
    rule, own = torch.Generator().manual_seed(given["seed"]), torch.Generator().manual_seed(10 * given["seed"] + part)
    outputs = max(1, given["classes"])
    weights = torch.randn(given["inputs"], 12, generator=rule)
    phases, mixed = 3 * torch.randn(12, generator=rule), torch.randn(12, outputs, generator=rule) / 12**0.5
    x = torch.randn(count, given["inputs"], generator=own)
    values = torch.sin(x @ weights + phases) @ mixed + given["noise"] * torch.randn(count, outputs, generator=own)
    return x, values if not given["classes"] else (3 * values).argmax(1)


def trained(given: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """Train the network, and return it with its training inputs."""
    torch.manual_seed(given["seed"])
    network, (x, y) = network_of(given), data_of(given, 1024, 0)
    optimiser = torch.optim.Adam(network.parameters(), lr=5e-3)
    loss = functional.cross_entropy if given["classes"] else functional.mse_loss
    for _ in range(given["steps"]):
        rows = torch.randint(0, len(x), (given["batch_size"],))
        optimiser.zero_grad()
        loss(network(x[rows]), y[rows]).backward()
        optimiser.step()
    return network.eval(), x


def truth(posterior: Any, x: Tensor, likelihood: Any) -> tuple[float, float]:
    """Return the ratio of the mean variance or information of linear to exact draws, and their rank correlation."""
    exact, linear = (
        bb.predict(posterior, x, likelihood, num_samples=DRAWS, engine=engine) for engine in ("sample", "linear")
    )
    name = "mutual_information" if hasattr(exact, "mutual_information") else "epistemic_variance"
    first, second = (getattr(each, name).flatten().double() for each in (linear, exact))
    return float(first.mean() / second.mean()), rank_correlation(first, second)


def judged(seed: int) -> dict[str, Any]:
    """Return the settings of a network, whether "auto" takes the linear engine, and whether that is good."""
    given = made(seed)
    network, x = trained(given)
    likelihood = bb.categorical() if given["classes"] else bb.gaussian(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = bb.mcbn(network, x, batch_size=given["batch_size"], num_samples=DRAWS)
        new = data_of(given, 300, 1)[0]
        auto = bb.predict(posterior, new, likelihood, num_samples=DRAWS, engine="auto")
        ratio, correlation = truth(posterior, new, likelihood)
    is_good = abs(ratio - 1) <= MOST_OFF and correlation >= LEAST_CORRELATION
    found = {"ratio": ratio, "correlation": correlation, "good": is_good}
    return {**given, **found, "linear": not auto.engine.startswith("sample"), "engine": auto.engine}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the counts as a table."""
    counts = {(good, linear): 0 for good in (True, False) for linear in (True, False)}
    for row in rows:
        counts[row["good"], row["linear"]] += 1
    lines = ["| the linear engine is | taken | refused |", "|---|---:|---:|"]
    for name, is_good in (("good", True), ("bad", False)):
        lines.append(f"| {name} | {counts[is_good, True]} | {counts[is_good, False]} |")
    return "\n".join(lines)


def main() -> None:
    """Judge networks, and print the table. A file keeps what was done, so that a run can be continued."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first network")
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None, help="a file for one line of JSON for each network")
    arguments = parser.parse_args()
    out = arguments.out
    lines = out.read_text().splitlines() if out and out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {row["seed"] for row in rows}
    for seed in range(arguments.first, arguments.first + arguments.networks):
        if seed not in done:
            rows.append(judged(seed))
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
