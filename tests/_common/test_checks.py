import ast
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from batchbayes import BatchbayesError
from batchbayes._common import checks
from batchbayes._common.checks import as_tensor, check_labels, install_command, require_packages
from batchbayes.calibrate import conformal_sets, tune_temperature
from batchbayes.errors import BatchbayesWarning, warn
from batchbayes.likelihoods import categorical
from batchbayes.predictive import fitting_labels


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), r"integer truth of shape \(3,\); got shape \(2,\)"),
        (torch.zeros(3), "integer truth; got torch.float32"),
        (torch.zeros(3, dtype=torch.complex64), "integer truth; got torch.complex64"),
        (torch.zeros(3, dtype=torch.bool), "integer truth; got torch.bool"),
        (torch.tensor([0, 1, 3]), "truth from 0 to 2; got 0 to 3"),
        (torch.tensor([0, -100, 1]), "truth from 0 to 2; got -100 to 1"),
    ],
)
def test_labels_that_do_not_fit_are_named(labels, message):
    with pytest.raises(BatchbayesError, match=message):
        check_labels(labels, (3,), 3, "truth")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_integer_type_fit(dtype):
    logits = torch.tensor([[[0.0, 2.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]]], dtype=torch.float64)
    summary, labels = categorical().summary(), torch.tensor([1, 0, 0, 0])
    summary.add(logits)
    predictive = summary.finish(logits)
    check_labels(labels.to(dtype), [4], 2)
    assert torch.equal(fitting_labels(labels.to(dtype), torch.Size([4]), 2), labels)
    assert conformal_sets(predictive, labels.to(dtype), 0.7) == conformal_sets(predictive, labels, 0.7)
    assert tune_temperature(predictive, labels.to(dtype)) == tune_temperature(predictive, labels)


def test_a_likelihood_takes_bool_labels_as_two_classes():
    assert fitting_labels(torch.tensor([True, False]), torch.Size([2]), 2).tolist() == [1, 0]
    with pytest.raises(BatchbayesError, match="labels from 0 to 0; got 0 to 1"):
        fitting_labels(torch.tensor([True, False]), torch.Size([2]), 1)


class Column:
    """A column of a table, as pandas and other packages have it: no array, but numpy can read it."""

    def __array__(self, dtype=None, copy=None):
        return np.array([0, 1, 1], dtype)


@pytest.mark.parametrize("values", [Column(), (0, 1, 1), [0, 1, 1], np.array([0, 1, 1]), np.ma.array([0, 1, 1])])
def test_numbers_in_any_container_become_a_tensor(values):
    assert as_tensor(values).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ma.array([1.0, 2.0], mask=[False, True]), "labels without masked numbers; got 1"),
        ([[1.0], [1.0, 2.0]], "got a list. Do this: pass numbers, in rows of one length"),
        (["cat", "dog"], "number classes from 0 if they have names"),
        ([torch.ones(2, requires_grad=True)], "got a list"),
        (None, "got a NoneType"),
    ],
)
def test_what_is_not_numbers_is_refused_in_words(values, message):
    with pytest.raises(BatchbayesError, match=message):
        as_tensor(values, "labels")


def test_a_warning_points_at_the_first_line_outside_of_the_package():
    with pytest.warns(BatchbayesWarning, match="doubt") as caught:
        warn("doubt")
    assert caught[0].filename == __file__


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"batchbayes": ROOT} | {f"batchbayes-{name}": ROOT / name for name in ("tables", "serve", "papers")}
SOURCES = [path for pattern in ("src", "*/src") for path in ROOT.glob(f"{pattern}/**/*.py")]


def advised() -> list[tuple[str, str]]:
    """Return the extra and the package of every call that tells how to install one, in all sources."""
    found = []
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
            place = {"require_packages": 1, "install_command": 0}.get(name)
            named_extra = place is not None and isinstance(call, ast.Call) and len(call.args) > place
            if named_extra and isinstance(call.args[place], ast.Constant):
                named = [key.value.value for key in call.keywords if key.arg == "package"]  # type: ignore[attr-defined]
                found.append((call.args[place].value, *(named or ["batchbayes"])))
    return found


def test_every_extra_that_an_error_names_exists_and_brings_the_packages() -> None:
    extras = {
        package: tomllib.loads((folder / "pyproject.toml").read_text())["project"].get("optional-dependencies", {})
        for package, folder in PACKAGES.items()
    }
    assert {extra for extra, _ in advised()} >= {"cluster", "export", "parquet", "report", "rl"}
    for extra, package in advised():
        assert extras[package][extra]


def test_no_error_names_an_extra_without_that_command() -> None:
    for path in SOURCES:
        assert "pip install 'batchbayes" not in path.read_text(encoding="utf-8"), path


def test_the_command_works_as_printed_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout pip needs its place; an installed package is found by its name."""
    for package, folder in PACKAGES.items():
        *words, place = shlex.split(install_command("x", package))
        assert (words, place) == (["pip", "install", "-e"], f"{folder}[x]")
    assert shlex.split(install_command(package="batchbayes-papers"))[-1] == str(ROOT / "papers")
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "lib/site-packages/batchbayes/_common/checks.py"))
    assert install_command("report") == "pip install 'batchbayes[report]'"
    assert install_command(package="batchbayes-papers") == "pip install batchbayes-papers"
    with pytest.raises(BatchbayesError, match=r"no no_such. Do this: pip install 'batchbayes-papers\[rl\]'\."):
        require_packages("this", "rl", package="batchbayes-papers", no_such="no-such")
