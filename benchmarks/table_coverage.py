"""Do intervals of `UncertainRegressor` hold their level by fifths of a noisy column, with outliers, and on few rows?

    nice -n 10 python benchmarks/table_coverage.py RESULTS.jsonl [--repeats 12] [--small 200] [--figure FIGURE.png]

noisy     400 rows; noise from 0.05 to 0.55 along a column. Coverage of 90 % intervals on 2,000 new rows, by its fifths.
counts    400 rows of Poisson counts with means from 1 to 70. The same, by fifths of the column that drives them.
outliers  400 rows, 3 % of them far away. The share of new rows in the middle two tenths of the predicted distribution.
small     100 rows of diabetes data, coverage of the other 342; beside split-conformal and CV+ intervals around ridge
          regression.

Each result is a line of JSON, written when it is there, and a run that was stopped continues.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold

from batchbayes.plots import save_figure
from batchbayes.sklearn import UncertainRegressor
from batchbayes.tools import house_style, new_figure

TRAINING, NEW, LEVEL = 400, 2000, 0.9


def fifths(lower: np.ndarray, upper: np.ndarray, y: np.ndarray, column: np.ndarray) -> list[float]:
    inside = ((lower <= y) & (y <= upper))[np.argsort(column)]
    return [float(part.mean()) for part in np.array_split(inside, 5)]


def noisy(random: np.random.Generator, seed: int) -> dict[str, Any]:
    x = random.uniform(0, 1, (TRAINING + NEW, 5))
    y = np.sin(4 * x[:, 0]) + x[:, 1] + (0.05 + 0.5 * x[:, 2]) * random.standard_normal(len(x))
    model = UncertainRegressor(random_state=seed).fit(x[:TRAINING], y[:TRAINING])
    return {"ours": fifths(*model.predict_interval(x[TRAINING:]), y[TRAINING:], x[TRAINING:, 2])}


def counts(random: np.random.Generator, seed: int) -> dict[str, Any]:
    x = random.uniform(0, 1, (TRAINING + NEW, 5))
    y = random.poisson(np.exp(0.5 + 2.5 * x[:, 0] + x[:, 1] * x[:, 2]))
    model = UncertainRegressor(random_state=seed).fit(x[:TRAINING], y[:TRAINING])
    return {"ours": fifths(*model.predict_interval(x[TRAINING:]), y[TRAINING:], x[TRAINING:, 0])}


def outliers(random: np.random.Generator, seed: int) -> dict[str, Any]:
    x = random.uniform(-2, 2, (TRAINING + NEW, 3))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * random.standard_normal(len(x))
    y += np.where(random.random(len(x)) < 0.03, 5 * random.standard_normal(len(x)), 0)
    model = UncertainRegressor(random_state=seed).fit(x[:TRAINING], y[:TRAINING])
    low, high = model.predict_quantiles(x[TRAINING:], (0.4, 0.6)).T
    return {"ours": [float(((low < y[TRAINING:]) & (y[TRAINING:] < high)).mean())]}


def small(random: np.random.Generator, seed: int) -> dict[str, Any]:
    x, y = load_diabetes(return_X_y=True)
    train, test = np.split(random.permutation(len(y)), [100])
    mine = UncertainRegressor(random_state=seed).fit(x[train], y[train]).predict_interval(x[test], LEVEL)
    half = RidgeCV().fit(x[train[:50]], y[train[:50]])
    errors = np.sort(np.abs(y[train[50:]] - half.predict(x[train[50:]])))
    width = errors[int(np.ceil(51 * LEVEL)) - 1]
    ends = [half.predict(x[test]) + sign * width for sign in (-1, 1)]
    found = {"ours": mine, "split conformal": ends, "CV+": cross_conformal(x[train], y[train], x[test])}
    return {name: [float(((lower <= y[test]) & (y[test] <= upper)).mean())] for name, (lower, upper) in found.items()}


def cross_conformal(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return CV+ intervals (Barber et al., Annals of Statistics 49, 2021) around ridge regression, with ten folds."""
    lower, upper = [], []
    for used, held_out in KFold(10).split(x):
        model = RidgeCV().fit(x[used], y[used])
        errors, predicted = np.abs(y[held_out] - model.predict(x[held_out])), model.predict(new)
        lower += [predicted - error for error in errors]
        upper += [predicted + error for error in errors]
    rank = int(np.ceil((len(x) + 1) * LEVEL))
    return np.sort(lower, 0)[len(x) - rank], np.sort(upper, 0)[rank - 1]


PARTS = {"noisy": noisy, "counts": counts, "outliers": outliers, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--figure", type=Path, help="where to draw the small part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(line["part"], line["seed"]) for line in lines}
    for seed in range(max(options.repeats, options.small)):
        for part, work in PARTS.items():
            if (part, seed) not in done and seed < (options.small if part == "small" else options.repeats):
                lines.append({"part": part, "seed": seed, "found": work(np.random.default_rng(seed), seed)})
                with options.results.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for line in lines:
        for model, shares in line["found"].items():
            found[line["part"], model].append(shares)
    print("| part | model | repeats | share | standard error |\n|---|---|---:|---:|---:|")
    for (part, model), runs in sorted(found.items()):
        mean, error = np.mean(runs, 0), np.std(runs, 0) / max(1, len(runs) - 1) ** 0.5
        cells = [", ".join(f"{100 * value:.1f}" for value in values) for values in (mean, error)]
        print(f"| {part} | {model} | {len(runs)} | {' | '.join(cells)} |")
    if options.figure:
        draw({model: np.ravel(runs) for (part, model), runs in found.items() if part == "small"}, options.figure)


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """Draw how often each coverage occurs, and the mean with two standard errors."""
    with house_style():
        figure, panels = new_figure(1, len(found), (9.6, 2.8))
        for ax, (model, shares) in zip(panels[0], sorted(found.items()), strict=True):
            mean, error = shares.mean(), shares.std() / max(1, len(shares) - 1) ** 0.5
            ax.hist(shares, bins=np.arange(0.7, 1.011, 0.02), color="0.7")
            ax.axvline(LEVEL, color="black", ls="--", lw=1)
            ax.axvspan(mean - 2 * error, mean + 2 * error, color="tab:blue", alpha=0.6)
            ax.set(xlabel="coverage in a split", title=f"{model}: {100 * mean:.1f} ± {200 * error:.1f} %")
        panels[0][0].set_ylabel("splits")
        save_figure(figure.figure, path)


if __name__ == "__main__":
    main()
