"""Benchmarks are run by hand. Here each of them is read, so that it does not ask for names that no longer exist."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PEERS = {"laplace"}
"""Other libraries that some of them need, in an environment of their own."""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_names_exist(path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for other in FOLDER.glob("*.py"):  # what it imports from its own folder is read again
        monkeypatch.delitem(sys.modules, other.stem, raising=False)
    try:
        assert runpy.run_path(str(path), run_name="read")["__doc__"]
    except ModuleNotFoundError as error:
        if error.name not in PEERS:
            raise
        pytest.skip(f"{error.name} is not installed")
