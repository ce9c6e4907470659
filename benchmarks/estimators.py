"""The scikit-learn estimators beside gradient boosting and a Gaussian process, on the eight UCI regression sets.

    nice -n 19 python benchmarks/estimators.py DATA_FOLDER RESULTS.json

The splits are the published random ones of 90 % and 10 %, and further ones where 20 are too few. Each result is written
when it is there, and a run that was stopped continues. RMSE, CRPS and the width of 90 % intervals are in units of the
standard deviation of the targets.

Test rows are few, and some splits have easier ones. Each network of ours alone has intervals whose coverage is exactly
90 % by theory: split-conformal ones from the fold that it has not seen, randomised. What they cover beyond that in a
split is luck, and "without luck" is our coverage less that.

gradient boosting   HistGradientBoostingRegressor with default options. Its intervals are split-conformal: 20 % of the
                    rows are left out of its training, and its errors there are one spread for all inputs.
Gaussian process    an RBF kernel with one length for each input, and noise, on at most 500 rows. Its intervals are
                    its own.
"""

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from batchbayes.calibrate import conformal_quantile
from batchbayes.metrics import gaussian_crps
from batchbayes.sklearn import UncertainRegressor
from batchbayes.tools import atomic_path

SPLITS = {
    "boston": 20, "concrete": 20, "energy": 20, "kin8nm": 3, "power": 3, "protein": 1, "wine": 8, "yacht": 100,
}  # fmt: skip
"""How many splits: more of the small sets, whose test parts have only a few rows."""
GAUSSIAN_PROCESS_ROWS, CONFORMAL_SHARE, LEVEL = 500, 0.2, 0.9


class Prediction(NamedTuple):
    """What a model says of new rows, (N,) each."""

    mean: np.ndarray
    std: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    exact_coverage: Callable[[np.ndarray], float] = lambda _: LEVEL
    """The share of true targets in intervals for which theory says what to expect: it tells how lucky a split is."""


class Watched(UncertainRegressor):
    """Keeps its errors on the rows that each network left out."""

    def _calibrate(self, x: torch.Tensor, y: torch.Tensor, folds: torch.Tensor) -> None:
        super()._calibrate(x, y, folds)
        draws = self.networks_.held_out_draws(x, folds)[..., 0].unflatten(0, (len(folds), -1))  # (R, S, N)
        self.kept = (draws.mean(1) - y[:, 0]).abs(), folds

    def exact_coverage(self, new: np.ndarray, y: np.ndarray) -> float:
        """Return the mean coverage of each network alone, with randomised split-conformal intervals from its fold."""
        draws = self.networks_.draws(self._inputs(new))[..., 0].unflatten(0, (len(self.networks_.stack), -1))
        truth = (torch.from_numpy(y) - self.target_mean_) / self.target_std_
        errors, folds, found = *self.kept, []
        networks = (draws.mean(1) - truth).abs().unflatten(0, (len(folds), -1))  # (R, F, N)
        for seed, fold in np.ndindex(*networks.shape[:2]):
            held_out = errors[seed, folds[seed] == fold].sort().values
            smaller = torch.searchsorted(held_out, networks[seed, fold].contiguous())
            found.append(((len(held_out) + 1) * LEVEL - smaller).clamp(0, 1).mean())
        return float(torch.stack(found).mean())


def ours(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    model = Watched(random_state=seed).fit(x, y)
    exact = partial(model.exact_coverage, new)
    return Prediction(*model.predict(new, return_std=True), *model.predict_interval(new, LEVEL), exact)


def boosting(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    rows = np.random.default_rng(seed).permutation(len(x))
    held_out, used = np.split(rows, [int(CONFORMAL_SHARE * len(x))])
    model = HistGradientBoostingRegressor(random_state=seed).fit(x[used], y[used])
    errors = y[held_out] - model.predict(x[held_out])
    mean, width = model.predict(new), conformal_quantile(torch.from_numpy(np.abs(errors)), LEVEL)
    return Prediction(mean, np.full(len(new), float((errors**2).mean() ** 0.5)), mean - width, mean + width)


def gaussian_process(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    rows = np.random.default_rng(seed).permutation(len(x))[:GAUSSIAN_PROCESS_ROWS]
    middle, spread = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1)
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    model.fit((x[rows] - middle) / spread, y[rows])
    mean, std = model.predict((new - middle) / spread, return_std=True)
    return Prediction(mean, std, mean - 1.645 * std, mean + 1.645 * std)


MODELS = {"UncertainRegressor": ours, "gradient boosting": boosting, "Gaussian process": gaussian_process}
WITHOUT_LUCK = {"UncertainRegressor"}


def test_rows(published: np.ndarray, count: int, split: int) -> np.ndarray:
    """Return the test rows of a split: a published one, or a random one of the same size."""
    if split < len(published):
        return published[split].astype(int)
    return np.random.default_rng(1000 + split).permutation(count)[: len(published[0])]


def scores(folder: Path, dataset: str, split: int, model: str) -> dict[str, float]:
    """Fit a model to one split, and return its scores on the test rows."""
    data = np.load(folder / "uci" / f"{dataset}.npz")
    x, y = data["X"], data["y"]
    test = test_rows(np.load(folder / "uci" / "pbp_test_indices.npz")[dataset], len(y), split)
    train = np.setdiff1d(np.arange(len(y)), test)
    start = time.process_time()
    found = MODELS[model](x[train], y[train], x[test], split)
    seconds, unit = time.process_time() - start, y[train].std()
    values = [torch.from_numpy(np.ascontiguousarray(each)) for each in (found.mean, found.std, y[test])]
    return {
        "rmse": float(np.sqrt(((found.mean - y[test]) ** 2).mean()) / unit),
        "crps": float(gaussian_crps(*values).mean() / unit),
        "coverage": float(((found.lower <= y[test]) & (y[test] <= found.upper)).mean()),
        "exact_coverage": found.exact_coverage(y[test]),
        "width": float((found.upper - found.lower).mean() / unit),
        "seconds": seconds,
    }


def print_table(results: dict[str, dict[str, float]]) -> None:
    """Print one line for each data set and model: means over splits."""
    found = defaultdict(list)
    for key, values in results.items():
        dataset, _, model = key.split("/")
        found[dataset, model].append(values)
    print("| data set | splits | model | RMSE | CRPS | 90 % hold | without luck | width | CPU seconds |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for (dataset, model), runs in sorted(found.items()):
        rmse, crps, width, seconds = (fmean(run[name] for run in runs) for name in ("rmse", "crps", "width", "seconds"))
        held = mean_and_error([run["coverage"] for run in runs])
        fair = mean_and_error([run["coverage"] - run["exact_coverage"] + LEVEL for run in runs])
        cells = [f"{rmse:.3f}", f"{crps:.4f}", held, fair if model in WITHOUT_LUCK else "", f"{width:.2f}"]
        print(f"| {dataset} | {len(runs)} | {model} | {' | '.join(cells)} | {seconds:.1f} |")


def mean_and_error(shares: list[float]) -> str:
    """Return a mean in per cent, with its standard error if there are several."""
    return f"{fmean(shares):.1%}" + (f" ± {stdev(shares) / len(shares) ** 0.5:.1%}" if len(shares) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimiser of the Gaussian process says when a length reaches a bound
        for split, dataset in sorted((split, dataset) for dataset, count in SPLITS.items() for split in range(count)):
            for model in options.models:
                key = f"{dataset}/{split}/{model}"
                if key not in results:
                    results[key] = scores(options.folder, dataset, split, model)
                    with atomic_path(options.results) as partial:
                        partial.write_text(json.dumps(results, indent=1))
    print_table(results)


if __name__ == "__main__":
    main()
