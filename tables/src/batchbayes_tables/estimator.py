"""What both estimators share: parameters, checks of the data, training, novelty and files."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_feature_names,  # pyright: ignore[reportAttributeAccessIssue]
    _check_n_features,  # pyright: ignore[reportAttributeAccessIssue]
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from batchbayes._common.checks import finite_number, whole_number
from batchbayes._common.files import UNREADABLE, TensorFile, read_json, write_tensors
from batchbayes._common.progress import hidden_progress
from batchbayes._common.rng import GlobalStream
from batchbayes.errors import BatchbayesError
from batchbayes.models import MLP
from batchbayes.novelty.detector import FEWEST, Novelty, novelty
from batchbayes_tables.columns import Column, Columns, Kind, as_meant, is_frame, read_array, read_frame
from batchbayes_tables.crossfit import Candidate, Recipe, Score, cross_fit
from batchbayes_tables.packing import packed, unpacked
from batchbayes_tables.rows import FEWEST_ROWS, folds_of, ordered_rows
from batchbayes_tables.stack.stack import unstack
from batchbayes_tables.stack.train import Loss

FORMAT = 2
LARGER_BATCHES = (2_000, 8_000)
"""Above each of these numbers of rows, batches are twice as large, because more rows have more to say in each step."""
FACTORS = (0.0, 0.5, 1.0, 2.0)
"""Scales of the batch-norm noise that are tried, as factors of that of the training batches."""
MIXES = tuple(round(0.1 * step, 1) for step in range(11))
"""Shares of the linear part that are tried."""
Read = Mapping[str, tuple[Kind, np.ndarray]]


class Uncertain(BaseEstimator):
    """Networks with batch normalisation, trained side by side; each leaves out one fold, which calibrates it."""

    _loss: Loss
    _score: Score

    hidden_widths: tuple[int, ...]
    weight_decays: tuple[float, ...]
    num_folds: int
    num_seeds: int
    num_steps: int
    batch_size: int
    learning_rate: float
    num_draws: int
    num_bins: int
    random_state: int | np.random.RandomState | None
    verbose: bool
    warm_start: bool
    num_levels: int

    def _keep(self, parameters: dict[str, Any]) -> None:
        """Keep the parameters of `__init__`, from its `locals()`."""
        vars(self).update({name: each for name, each in parameters.items() if name not in ("self", "__class__")})

    def __sklearn_tags__(self) -> Any:
        tags: Any = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "networks_" in state and "columns_" not in state:
            raise BatchbayesError(
                expected=f"a pickle of {type(self).__name__} by this version",
                got="one of batchbayes 0.2.0, whose networks have no spread and other calibration",
                fix="fit again, or use batchbayes 0.2.0 to load it",
            )
        super().__setstate__({"num_levels": 32} | state)  # version 0.3.0 had no such parameter

    def _read(self, X: Any, reset: bool) -> Read:  # noqa: N803
        """Check a table, and return its columns."""
        if not is_frame(X):
            found: Any = validate_data(
                self, X, dtype=np.float64, reset=reset, ensure_all_finite="allow-nan", ensure_min_samples=1 + 4 * reset
            )
            return read_array(found)
        _check_feature_names(self, X, reset=reset)
        _check_n_features(self, X, reset=reset)
        if len(X) < 1 + (FEWEST_ROWS - 1) * reset or not len(X.columns):
            raise ValueError(
                f"Found array with {len(X)} sample(s) and {len(X.columns)} feature(s), while a minimum of "
                f"{FEWEST_ROWS if reset else 1} and of 1 is required."
            )
        return read_frame(X)

    def _learn_columns(self, X: Any, y: np.ndarray, weights: Any) -> tuple[Tensor, np.ndarray, np.ndarray]:  # noqa: N803
        """Learn how the table is read. Return its inputs for training, which rows they are, and which are copies."""
        self._require_parameters()
        read = self._fitting(X) if self._continues else self._read(X, reset=True)
        check_consistent_length(y, *(values for _, values in read.values()))
        if self._continues:
            plans = self.columns_.plans
        else:
            read = {name: as_meant(name, *each) for name, each in read.items()}
            plans = [Column.learn(name, *each, self.num_levels) for name, each in read.items()]
        numbers, flags = Columns.raw(plans, read)
        if weights is not None:
            weights = _check_sample_weight(weights, numbers, dtype=np.float64)
        rows, copies = ordered_rows(np.concatenate([numbers, flags], 1), y, weights)
        if not self._continues:
            self.columns_ = Columns.learn(plans, numbers[rows], flags[rows], self.num_bins)
        return torch.from_numpy(self.columns_.standardised(numbers[rows], flags[rows])), rows, copies

    def _inputs(self, X: Any, told: bool = True) -> Tensor:  # noqa: N803
        """Return checked and standardised inputs. Tell values that training had not."""
        read = self._fitting(X)
        if told and (unknown := self.columns_.unknown(read)):
            named = ", ".join(f"{name} ({int(rows.sum())} rows)" for name, rows in unknown.items())
            warnings.warn(
                f"unknown categories, or values missing where none were in training: {named}. They are read as rare "
                "categories and medians, and novelty is 0 there",
                stacklevel=3,
            )
        return torch.from_numpy(self.columns_.standardised(*Columns.raw(self.columns_.plans, read)))

    def _without_bins(self, x: Tensor) -> Tensor:
        return x[:, torch.from_numpy(~self.columns_.is_bin)]

    def _for_networks(self, x: Tensor) -> Tensor:
        """Return the inputs that networks get."""
        return x

    def _fitting(self, X: Any) -> Read:  # noqa: N803
        check_is_fitted(self)
        read = self._read(X, reset=False)
        if not is_frame(X) or not hasattr(self, "feature_names_in_"):
            read = {plan.name: each for plan, each in zip(self.columns_.plans, read.values(), strict=True)}
        return self.columns_.checked(read)

    def _train(self, x: Tensor, targets: Tensor, folds: Tensor, seed: int, tails: Sequence[float] = ()) -> None:
        """Train on inputs (N, Q) and targets (N, K), by folds (R, N)."""
        decays = tuple(float(decay) for decay in self.weight_decays)
        candidates = [Candidate(decay) for decay in decays]
        candidates += [Candidate(decays[(len(decays) - 1) // 2], tail) for tail in tails]
        recipe = Recipe(
            hidden_widths=tuple(self.hidden_widths),
            candidates=tuple(candidates),
            num_steps=self.num_steps,
            batch_size=self.batch_size * 2 ** sum(len(x) > limit for limit in LARGER_BATCHES),
            learning_rate=self.learning_rate,
            num_draws=self.num_draws,
            seed=seed,
            loss=self._loss,
            score=self._score,
        )
        with hidden_progress(not self.verbose):
            self.networks_ = cross_fit(x, targets, folds, recipe, self.networks_ if self._continues else None)
        self.weight_decay_ = self.networks_.candidate.weight_decay
        self.detector_ = self._detector(x, folds, seed)

    @property
    def _continues(self) -> bool:
        """Whether a fit goes on with the networks of the one before."""
        if not (self.warm_start and hasattr(self, "networks_")):
            return False
        own = self.networks_.num_folds, self.networks_.num_seeds, self.networks_.stack.hidden_widths
        return own == (self.num_folds, self.num_seeds, tuple(self.hidden_widths))

    def _folds(self, copies: np.ndarray, x: Tensor, targets: np.ndarray) -> tuple[Tensor, int]:
        """Return the folds of each seed, (R, N), and the seed of everything else."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if not self.warm_start:
            return torch.from_numpy(folds_of(copies, self.num_folds, self.num_seeds, seed)), seed
        # A row must stay in its fold from fit to fit, or networks would be judged by rows that they have seen.
        rows = np.concatenate([x.numpy().astype(np.float64), targets[:, None]], 1)
        digests = [hashlib.shake_128(row.tobytes()).digest(8 * self.num_seeds) for row in rows]
        folds = np.frombuffer(b"".join(digests), np.uint64).reshape(len(rows), -1).T % np.uint64(self.num_folds)
        if any(len(np.unique(own)) < self.num_folds for own in folds):
            raise BatchbayesError("more rows for warm_start=True", f"{len(rows)}", "pass warm_start=False")
        return torch.from_numpy(np.ascontiguousarray(folds, dtype=np.int64)), seed

    def _require_parameters(self) -> None:
        least = {
            "num_folds": 2,
            "num_seeds": 1,
            "num_steps": 1,
            "batch_size": 2,
            "num_draws": 2,
            "num_bins": 0,
            "num_levels": 1,
        }
        for name, limit in least.items():
            whole_number(name, getattr(self, name), limit)
        for name, example in (("weight_decays", (1e-3,)), ("hidden_widths", (64, 64))):
            value = getattr(self, name)
            if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or not len(value):
                raise BatchbayesError(f"{name} as a tuple of numbers", f"{name}={value!r}", f"pass {example}")
        for width in self.hidden_widths:
            whole_number("a width of hidden_widths", width)
        finite_number("learning_rate", self.learning_rate, above=0, fix="pass for example 0.01")

    def _first_network(self) -> MLP:
        stack = self.networks_.stack
        first, last = (stack.tensors[f"{stack.layers[place].linear}.weight"][0] for place in (0, -1))
        inputs, outputs = first.shape[1], last.shape[0]
        with GlobalStream(0):  # the global generator is left as it was
            network = MLP(inputs, stack.hidden_widths, outputs).float()
        unstack(stack.select([0]), [network])
        return network.eval()

    def _detector(self, x: Tensor, folds: Tensor, seed: int) -> Novelty | None:
        """Fit a detector to the first network, and calibrate it on the fold that this network has not seen."""
        unseen = folds[0] == self.networks_.fold_of_network[0]
        if min(int(unseen.sum()), int((~unseen).sum())) < FEWEST:
            return None
        return novelty(self._first_network(), x[~unseen], calibration=x[unseen], logits=False, seed=seed)

    def novelty(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return how unusual each row is, (N,): a p-value. At most a share a of ordinary rows has one of a or less.

        It is zero for rows with a category that training had not, or a missing value where none were missing.
        """
        inputs = self._inputs(X, told=False)
        if self.detector_ is None:
            raise BatchbayesError(
                expected=f"at least {FEWEST} training rows in each fold, to know what is usual",
                got="fewer",
                fix="train on more rows, or lower num_folds",
            )
        found = self.detector_.p_value(self._for_networks(inputs), whole=False).numpy()
        for rows in self.columns_.unknown(self._fitting(X)).values():
            found = np.where(rows, 0.0, found)
        return found

    def predict_frame(self, X: Any, level: float = 0.9) -> Any:  # noqa: N803
        """Return a pandas DataFrame: prediction and uncertainty of each row, novelty if known, and the index of X.

        The ends of intervals, of a regressor, hold a share `level` of new targets.
        """
        check_is_fitted(self)
        if find_spec("pandas") is None:
            raise BatchbayesError("the package pandas", "none", "pip install pandas, or use predict")
        columns = self._columns(X, level)
        if self.detector_ is not None:
            columns["novelty"] = self.novelty(X)
        index = None if isinstance(X, list | tuple) else getattr(X, "index", None)  # lists have a method of this name
        return import_module("pandas").DataFrame(columns, index=index)

    def _columns(self, X: Any, level: float) -> dict[str, np.ndarray]:  # noqa: N803
        """Return what `predict_frame` says about each row, by name."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a .safetensors file: numbers and JSON, never code."""
        check_is_fitted(self)
        tensors: dict[str, Tensor] = {}
        fitted = {name: each for name, each in vars(self).items() if name.endswith("_") and name != "detector_"}
        parameters = {name: each for name, each in self.get_params().items() if name != "random_state"}
        state = {"parameters": parameters, "fitted": fitted, "novelty": self.detector_ and self.detector_.state()}
        header = {"format": FORMAT, "estimator": type(self).__name__, "state": packed(state, tensors)}
        write_tensors(path, tensors, {"batchbayes": json.dumps(header)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator that `save` has written."""
        try:
            header, tensors = read_json(path, "batchbayes"), TensorFile(path)
            if not tensors.is_intact():
                raise ValueError("a damaged file: its checksum is not that of its contents")
            if header["format"] != FORMAT or header["estimator"] != cls.__name__:
                old = " by batchbayes 0.2.0, which has other networks" if header["format"] == 1 else ""
                raise ValueError(f"format {header['format']} of {header['estimator']}{old}")
            state = unpacked(header["state"], tensors)
            estimator = cls(**state["parameters"])
            vars(estimator).update(state["fitted"], detector_=None)
            if state["novelty"]:
                numbers, arrays = state["novelty"]
                estimator.detector_ = Novelty.restore(numbers, arrays, estimator._first_network())
        except (*UNREADABLE, TypeError, RuntimeError) as error:
            raise BatchbayesError(
                expected=f"a {cls.__name__} that was saved by save() at {path}",
                got=f"{type(error).__name__}: {error}"[:300],
                fix="check the path and the class, or fit and save again",
            ) from error
        return estimator
