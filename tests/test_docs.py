"""The documentation: every block of every page runs, and what pages say about names, extras and targets is true."""

import doctest
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

import batchbayes as bb
from batchbayes._common.machine import single_threaded
from batchbayes.methods.table import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "tools"))

import blocks  # noqa: E402
import charts  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402
import versions  # noqa: E402
from blocks import find_blocks, run_page  # noqa: E402

PAGES = [
    ROOT / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if path.parent in (DOCS, DOCS / "tutorials")),
]
FENCE = re.compile(r"^```([^\n]*)\n.*?^```$", re.DOTALL | re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in PAGES if find_blocks(path.read_text())], ids=_name)
def test_every_block_runs(path, tmp_path):
    known = dict(METHODS)
    try:
        with single_threaded(), torch.random.fork_rng():
            shown = [each for _, found in run_page(path, tmp_path.resolve()) for each in found]
        if path.parent.name == "tutorials":
            assert any(isinstance(each, Figure) for each in shown), "a tutorial begins with its first figure"
    finally:
        METHODS.clear()
        METHODS.update(known)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_no_block_hides_from_the_test(path):
    kinds = {match[1] for match in FENCE.finditer(path.read_text(encoding="utf-8"))}
    assert all(kind in ("python", "sh", "text") or kind.startswith(("{", "bibtex")) for kind in kinds), kinds


@pytest.mark.parametrize("module", [blocks, charts, pages, versions], ids=lambda module: module.__name__)
def test_examples_of_the_tools(module):
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=1)


def test_extras_and_targets_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        for extras in re.findall(r"batchbayes\[([\w,]+)\]", text):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), path
        for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", text, re.MULTILINE):
            assert (target[0] or target[1]) in targets, (path, target)
            seen += 1
    assert seen >= 2


def test_names_in_the_text_exist():
    for path in PAGES:
        for name in re.findall(r"`bb\.([\w.]+)", path.read_text(encoding="utf-8")):
            found = bb
            for part in name.rstrip(".").split("."):
                if part == "wobble":  # the method that the tutorial registers
                    break
                found = getattr(found, part)


def test_every_method_is_in_the_table_of_methods():
    own = {name for name, method in METHODS.items() if str(method.fit).startswith("batchbayes.")}
    assert set(pages.method_facts(DOCS)) == own
    table = pages.methods_table(DOCS)
    assert all(f"`bb.{name}`" in table for name in own)


def test_the_reference_has_every_public_name(tmp_path):
    reference.write_reference(tmp_path)
    written = "\n".join(path.read_text() for path in tmp_path.glob("*.md"))
    for name in bb.__all__:
        directive = "automodule" if isinstance(getattr(bb, name), ModuleType) else "auto"
        assert re.search(rf"{directive}\w*:: batchbayes\.{name}\n", written), name
        if directive == "auto":
            own = [path for path in tmp_path.glob("batchbayes.*.md") if f":: batchbayes.{name}\n" in path.read_text()]
            assert [path.stem.removesuffix("-class") for path in own] == [f"batchbayes.{name}"]


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {bb.__version__}\n" in citation
    assert f"## [{bb.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_lock_has_the_versions_that_were_chosen_and_nothing_of_one_machine():
    lock = (ROOT / "constraints-lock.txt").read_text(encoding="utf-8")
    pins = [line.partition(" ;")[0].split("==") for line in lock.splitlines() if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "only versions, no places"
    locked = dict(pins)
    assert locked.keys() >= {"dask", "docutils", "hatchling", "protobuf", "torch", "twine"}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name in locked:
            assert locked[name] == version, "constraints.txt was changed: run `make lock`"


def test_the_lock_is_used_by_make_but_not_by_the_run_on_newest_versions():
    assert "PIP_CONSTRAINT=constraints-lock.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    newest = workflow.partition("\n  newest:\n")[2].partition("\n  docs:\n")[0]
    assert "pip install -e" in newest
    assert "make" not in newest
    assert "PIP_CONSTRAINT" not in workflow
