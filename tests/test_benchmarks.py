"""Benchmarks are run by hand. Here each of them is read, so that it does not ask for names that no longer exist."""

import ast
import runpy
import sys
from pathlib import Path

import pytest
from helpers.source import ROOT, public_modules

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


STUDIED = {
    "assess_memory": {"report.assess", "report.options"},  # the command, without its process
    "cifar_tuning": {"_common.tune", "methods.batchnorm.tuning_family"},  # NLL over batch size and temperature
    "data_check": {"report.read.data_check", "report.read.examples", "report.read.schema"},  # its false alarms
    "detection": {"metrics.detection"},  # average precision of single classes
    "drift_tables": {"drift.detector", "drift.monitor", "novelty.windows"},  # thousands of streams at once
    "gradient_variance": {"methods.weights.sites", "methods.weights.sparse"},  # gradients of single layers
    "interval_groups": {"report.compare.groups"},  # the groups of a report
    "laplace_oracle": {"methods.laplace.last_layer_laplace"},  # the evidence at any prior
    "linear_cost": {"engines.linear"},  # passes of the engine
    "novelty_imagenet": {"novelty.detector", "novelty.looks", "novelty.scores", "novelty.whole"},  # parts of the score
    "novelty_networks": {"novelty.scores"},  # p-values of other detectors
    "novelty_yardstick": {"novelty.scores"},  # p-values of other detectors
    "passes_needed": {
        "engines.check", "engines.choose", "engines.linear", "methods.batchnorm.facts",
        "methods.batchnorm.leading", "methods.batchnorm.thinning", "report.compare.price",
    },  # what each engine needs
    "seen": {"network.function", "novelty.detector", "novelty.scores", "novelty.statistics"},  # parts of the score
    "third_party": {"_common.rng", "network.function"},  # which row a draw is
    "view_choice": {"_common.rng"},  # which view a draw has
    "weights_cost": {"_common.machine", "engines.sample", "methods.weights.variational"},  # a step of training
    "weights_peers": {"methods.weights.variational"},  # a step of training
}  # fmt: skip
"""Private modules that a benchmark may import: each studies a part of the library, and no call of users."""


def private_imports(path):
    """Return the private modules of the library that a program imports, and private names of any of its modules."""
    tree, public = ast.parse(path.read_text(encoding="utf-8")), public_modules()
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [(node.module.removeprefix("batchbayes."), node) for node in nodes if node.module.startswith("batchbayes.")]
    return {name for name, _ in ours if name not in public}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_figures_are_measured_by_public_calls(path):
    """What is published is what users get. The list has what studies a part of the library, and nothing else."""
    assert private_imports(path) == STUDIED.get(path.stem, set())


def test_pages_import_public_names():
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[rt]*/*.md"), ROOT / "README.md"]:
        code = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        named = {line.split()[1] for line in code if line.startswith("from batchbayes.")}
        assert {name.removeprefix("batchbayes.") for name in named} <= public_modules(), path
