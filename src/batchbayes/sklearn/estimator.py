"""What both estimators share: parameters, checks of the data, training, novelty and files.

Columns of a table as inputs of a network: each column itself, and how far it is through each of its bins.

A network learns steps and thresholds of a column slowly from one number, and quickly from such bins (the piecewise
linear encoding of Gorishniy, Rubachev and Babenko, NeurIPS 2022, with quantiles as the ends of bins).

The rows of a training table: a fixed order, weights as repetitions, and folds.
"""

import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from batchbayes._common.checks import finite_number, whole_number
from batchbayes._common.files import UNREADABLE, read_json, write_tensors
from batchbayes._common.progress import hidden_progress
from batchbayes._common.rng import GlobalStream, stream_seed
from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP
from batchbayes.novelty.detector import FEWEST, Novelty, novelty
from batchbayes.sklearn.crossfit import CrossFit, Recipe, cross_fit
from batchbayes.training.stack.stack import stack_networks, unstack
from batchbayes.training.stack.train import Loss

FORMAT = 1
FACTORS = (0.0, 0.5, 1.0, 2.0)
"""Scales of the batch-norm noise that are tried, as factors of that of the training batches."""
LARGE_BATCHES = 20_000
"""With more rows than this, batches are four times as large, because more rows have more to say in each step."""


def mean_and_unit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each column, and its standard deviation, which is 1 for a column of equal values.

    >>> mean_and_unit(np.array([[1e-20, 5.0], [3e-20, 5.0]]))
    (array([2.e-20, 5.e+00]), array([1.e-20, 1.e+00]))
    """
    with np.errstate(over="ignore"):
        mean, spread = values.mean(0), values.std(0)
    if not np.isfinite(spread).all():
        got = f"some as large as {np.abs(values).max():g}"
        raise BatchbayesError(expected="numbers whose squares are finite", got=got, fix="use another unit")
    return mean, np.where(spread > 1e-12 * np.abs(values).max(0), spread, 1.0)


class Uncertain(BaseEstimator):
    """Networks with batch normalisation, trained side by side; each leaves out one fold, which calibrates it."""

    _loss: Loss
    _numbers: tuple[str, ...]
    """The fitted numbers that only this kind of estimator has."""

    def __init__(
        self,
        hidden_widths: tuple[int, ...] = (64, 64),
        weight_decays: tuple[float, ...] = (1e-5, 1e-3, 1e-2),
        num_folds: int = 5,
        num_seeds: int = 4,
        num_steps: int = 4000,
        batch_size: int = 32,
        learning_rate: float = 5e-3,
        num_draws: int = 4,
        num_bins: int = 16,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_widths = hidden_widths
        self.weight_decays = weight_decays
        self.num_folds = num_folds
        self.num_seeds = num_seeds
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.num_draws = num_draws
        self.num_bins = num_bins
        self.random_state = random_state
        self.verbose = verbose

    def _used_rows(self, inputs: np.ndarray, targets: np.ndarray, weights: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows to train on, in a fixed order, as often as their weights say, and which are copies."""
        self._require_parameters()
        checked = None if weights is None else _check_sample_weight(weights, inputs, dtype=np.float64)
        return ordered_rows(inputs, targets, checked)

    def _train(self, inputs: np.ndarray, targets: np.ndarray, copies: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Train on inputs (N, Q) and targets (N, K). Return both as tensors, standardised, and the folds."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.bins_ = bin_ends(inputs, self.num_bins)
        inputs = encoded(inputs, self.bins_)
        self.input_mean_, self.input_std_ = mean_and_unit(inputs)
        x, y = self._standardised(inputs), torch.from_numpy(targets).float()
        folds = torch.from_numpy(folds_of(copies, self.num_folds, self.num_seeds, seed))
        with hidden_progress(not self.verbose):
            self.networks_ = cross_fit(x, y, folds, self._recipe(seed, len(x)))
        self.weight_decay_ = self.networks_.weight_decay
        self.detector_ = self._detector(x, folds, seed)
        return x, y, folds

    def _recipe(self, seed: int, rows: int) -> Recipe:
        return Recipe(
            hidden_widths=tuple(self.hidden_widths),
            weight_decays=tuple(self.weight_decays),
            num_steps=self.num_steps,
            batch_size=self.batch_size * (4 if rows > LARGE_BATCHES else 1),
            learning_rate=self.learning_rate,
            num_draws=self.num_draws,
            seed=seed,
            loss=self._loss,
        )

    def _require_parameters(self) -> None:
        least = {"num_folds": 2, "num_seeds": 1, "num_steps": 1, "batch_size": 2, "num_draws": 2, "num_bins": 0}
        for name, limit in least.items():
            whole_number(name, getattr(self, name), limit)
        for name, example in (("weight_decays", (1e-3,)), ("hidden_widths", (64, 64))):
            value = getattr(self, name)
            if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or not len(value):
                raise BatchbayesError(f"{name} as a tuple of numbers", f"{name}={value!r}", f"pass {example}")
        for width in self.hidden_widths:
            whole_number("a width of hidden_widths", width)
        finite_number("learning_rate", self.learning_rate, above=0, fix="pass for example 0.005")

    def _standardised(self, inputs: np.ndarray) -> Tensor:
        with np.errstate(all="ignore"):  # what is too large becomes infinite, and is refused
            found = ((inputs - self.input_mean_) / self.input_std_).astype(np.float32)
        if not np.isfinite(found).all():
            raise BatchbayesError(
                expected="inputs whose distance from the training data is a number of float32, in standard deviations",
                got="some that are too far away",
                fix="look for a wrong unit or a mark of missing values such as 1e300",
            )
        return torch.from_numpy(found)

    def _inputs(self, X: Any) -> Tensor:  # noqa: N803
        """Return checked and standardised inputs."""
        check_is_fitted(self)
        inputs: Any = validate_data(self, X, dtype=np.float64, reset=False)
        return self._standardised(encoded(inputs, self.bins_))

    def _blank(self, widths: Sequence[int], last: int) -> MLP:
        """Return a network whose weights are still to be filled in. The global generator is left as it was."""
        with GlobalStream(0):
            return MLP(len(self.input_mean_), widths, last).float()

    def _first_network(self) -> MLP:
        stack = self.networks_.stack
        widths = [stack.tensors[f"{layer.linear}.weight"].shape[1] for layer in stack.layers]
        network = self._blank(widths[:-1], widths[-1])
        unstack(stack.select([0]), [network])
        return network.eval()

    def _detector(self, x: Tensor, folds: Tensor, seed: int) -> Novelty | None:
        """Fit a detector to the first network, and calibrate it on the fold that this network has not seen."""
        unseen = folds[0] == self.networks_.fold_of_network[0]
        if min(int(unseen.sum()), int((~unseen).sum())) < FEWEST:
            return None
        return novelty(self._first_network(), x[~unseen], calibration=x[unseen], logits=False, seed=seed)

    def novelty(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return how unusual each row is, (N,): a p-value. At most a share a of ordinary rows has one of a or less."""
        inputs = self._inputs(X)
        if self.detector_ is None:
            raise BatchbayesError(
                expected=f"at least {FEWEST} training rows in each fold, to know what is usual",
                got="fewer",
                fix="train on more rows, or lower num_folds",
            )
        return self.detector_.p_value(inputs).numpy()

    def predict_frame(self, X: Any) -> Any:  # noqa: N803
        """Return a pandas DataFrame: prediction and uncertainty of each row, novelty if known, and the index of X."""
        check_is_fitted(self)
        if find_spec("pandas") is None:
            raise BatchbayesError("the package pandas", "none", "pip install pandas, or use predict")
        columns = self._columns(X)
        if self.detector_ is not None:
            columns["novelty"] = self.novelty(X)
        index = None if isinstance(X, list | tuple) else getattr(X, "index", None)  # lists have a method of this name
        return import_module("pandas").DataFrame(columns, index=index)

    def _columns(self, X: Any) -> dict[str, np.ndarray]:  # noqa: N803
        """Return what `predict_frame` says about each row, by name."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a .safetensors file: numbers and JSON, never code."""
        check_is_fitted(self)
        fit = self.networks_
        tensors = {f"stack.{name}": tensor for name, tensor in fit.stack.tensors.items()}
        for name, (mean, std) in fit.statistics.items():
            tensors |= {f"mean.{name}": mean, f"std.{name}": std}
        header: dict[str, Any] = {"format": FORMAT, "estimator": type(self).__name__, "weight_decay": fit.weight_decay}
        header["parameters"] = {n: v for n, v in self.get_params().items() if n != "random_state"}
        header["bins"] = [len(ends) for ends in self.bins_]
        tensors["bins"] = torch.from_numpy(np.concatenate(self.bins_))
        header["features"] = getattr(self, "feature_names_in_", np.array([])).tolist()
        tensors |= {"folds": fit.fold_of_network, "input_mean": torch.from_numpy(self.input_mean_)}
        tensors["input_std"] = torch.from_numpy(self.input_std_)
        if self.detector_ is not None:
            header["detector"], own = self.detector_.state()
            tensors |= {f"detector.{name}": tensor for name, tensor in own.items()}
        header |= {name: getattr(self, name) for name in self._numbers}
        more, own = self._state()
        # A search over parameters may have set them to numbers and arrays of numpy.
        text = json.dumps(header | more, default=lambda value: value.tolist())
        write_tensors(path, tensors | own, {"batchbayes": text})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator that `save` has written."""
        try:
            header, tensors = read_json(path, "batchbayes"), load_file(path)
            if header["format"] != FORMAT or header["estimator"] != cls.__name__:
                raise ValueError(f"format {header['format']} of {header['estimator']}")
            given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in header["parameters"].items()}
            estimator = cls(**given)
            estimator._restore(header, tensors)
        except (*UNREADABLE, TypeError, RuntimeError) as error:
            raise BatchbayesError(
                expected=f"a {cls.__name__} that was saved by save() at {path}",
                got=f"{type(error).__name__}: {error}"[:300],
                fix="check the path and the class, or fit and save again",
            ) from error
        return estimator

    def _restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what a file holds."""
        self.input_mean_, self.input_std_ = (tensors[f"input_{kind}"].numpy() for kind in ("mean", "std"))
        self.bins_ = np.split(tensors["bins"].numpy(), np.cumsum(header["bins"])[:-1])
        self.n_features_in_ = len(self.bins_)
        if header["features"]:
            self.feature_names_in_ = np.array(header["features"], dtype=object)
        own = {name.removeprefix("stack."): each for name, each in tensors.items() if name.startswith("stack.")}
        widths = [own[name].shape[1] for name in own if name.endswith("linear.weight")]
        last = own["output.weight"].shape[1]
        template = stack_networks([self._blank(widths, last)])
        stack = type(template)(template.layers, own, {})
        names = [layer.norm for layer in stack.layers if layer.norm]
        statistics = {name: (tensors[f"mean.{name}"], tensors[f"std.{name}"]) for name in names}
        self.networks_ = CrossFit(stack, tensors["folds"], statistics, header["weight_decay"])
        self.weight_decay_ = header["weight_decay"]
        self.detector_ = None
        if "detector" in header:
            named = {n.removeprefix("detector."): t for n, t in tensors.items() if n.startswith("detector.")}
            self.detector_ = Novelty.restore(header["detector"], named, self._first_network())
        for name in self._numbers:
            setattr(self, name, float(header[name]))
        self._set_state(header, tensors)

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what else a file must hold."""
        raise NotImplementedError

    def _set_state(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `_state` returned."""
        raise NotImplementedError


MOST_INPUTS = 512
"""Tables with many columns get fewer bins, so that there are at most so many."""


def bin_ends(columns: np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Return the ends of the bins of each column, for columns (N, Q). A column of two values or fewer has no bins.

    >>> bin_ends(np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [6.0, 1.0]]), 2)
    [array([0. , 1.5, 6. ]), array([], dtype=float64)]
    """
    count = min(num_bins, MOST_INPUTS // columns.shape[1])
    found = [np.unique(np.quantile(column, np.linspace(0, 1, count + 1))) for column in columns.T]
    return [ends if len(ends) > 2 else ends[:0] for ends in found]


def encoded(columns: np.ndarray, bins: Sequence[np.ndarray]) -> np.ndarray:
    """Return columns (N, Q), followed by one number from 0 to 1 for each bin: 0 below it and 1 above it.

    >>> encoded(np.array([[1.0]]), [np.array([0.0, 2.0, 4.0])])
    array([[1. , 0.5, 0. ]])
    """
    shares = [
        np.clip((column[:, None] - ends[:-1]) / np.diff(ends), 0, 1)
        for column, ends in zip(columns.T, bins, strict=True)
        if len(ends)
    ]
    return np.concatenate([columns, *shares], 1)


COPIES = 4
"""Rows with weights that are not whole numbers are repeated this many times on average."""
MOST_ROWS = 100_000_000
"""More repetitions are refused before memory runs out."""


def ordered_rows(inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows to train on, in an order that depends on their values alone, and which of them are copies.

    A weight is a number of repetitions. So a weight of two is the same as a row that occurs twice, and a weight of zero
    the same as a row that is left out. Other weights are rounded, so that their running total is right; then copies of
    a row have the same number in the second array, and are no observations of their own.

    >>> ordered_rows(np.array([[2.0], [1.0]]), np.zeros(2), np.array([2, 1]))
    (array([1, 0, 0]), array([0, 1, 2]))
    >>> ordered_rows(np.array([[2.0], [1.0]]), np.zeros(2), np.array([0.25, 0.75]))
    (array([1, 1, 1, 1, 1, 1, 0, 0]), array([1, 1, 1, 1, 1, 1, 0, 0]))
    """
    order = np.lexsort([targets, *inputs.T[::-1]])
    if weights is None:
        return order, np.arange(len(order))
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise BatchbayesError(
            expected="finite sample weights of zero or more, not all zero",
            got=f"weights from {weights.min():g} to {weights.max():g}",
            fix="check sample_weight",
        )
    is_whole = (weights == np.round(weights)).all()
    if is_whole and weights.sum() > MOST_ROWS:
        raise BatchbayesError(
            expected=f"whole sample weights, which are repetitions of rows, with a sum of at most {MOST_ROWS:,}",
            got=f"a sum of {weights.sum():g}",
            fix="if they are shares and not repetitions, pass sample_weight / sample_weight.sum()",
        )
    if not is_whole:
        weights = weights * float(COPIES * (weights > 0).sum() / weights.sum())
    running_total = np.cumsum(np.asarray(weights)[order])
    ends = np.floor(running_total + 0.5).astype(int)
    rows = np.repeat(order, np.diff(ends, prepend=0))
    return rows, np.arange(len(rows)) if is_whole else rows


def folds_of(rows: np.ndarray, num_folds: int, num_seeds: int, seed: int) -> np.ndarray:
    """Return a random fold for each row and seed, (R, N). Copies of a row, with one number in `rows`, share it."""
    _, group = np.unique(rows, return_inverse=True)
    count, random = int(group.max()) + 1, np.random.default_rng(stream_seed(seed, "folds"))
    return np.stack([random.permutation(count)[group] % min(num_folds, count) for _ in range(num_seeds)])
