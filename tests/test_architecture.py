"""The shape of the code: who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import batchbayes
from batchbayes.methods.table import METHODS, resolve

SOURCE = Path(__file__).resolve().parents[1] / "src" / "batchbayes"

# From the inside out: a module may import those of its own layer and of the layers above it in this list.
LAYERS = [
    {"errors", "_common"},
    {"scores"},
    {
        "metrics",
        "copying",
        "restoring",
        "stale",
        "shadow",
        "network",
        "batches",
        "inputs",
        "posterior",
        "predictive",
        "running_sums",
        "likelihoods",
        "engines",
        "prediction",
    },
    {"training", "models", "data"},
    {"methods"},
    {"saving", "plots", "calibrate", "detection", "distill", "online", "attacks", "decisions"},
    {"reproduce"},
    {"demo", "assessment", "experiments", "deploy", "sklearn"},
    {"cli", "__main__"},
]
# Within a layer these stand alone: a method knows no other folder of methods, a network or a data set nothing Bayesian.
ALONE = {"methods", "models", "data", "scores", "training"}


def modules():
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]
    parts = [path.relative_to(SOURCE).with_suffix("").parts for path in paths]
    return [pytest.param(path, names, id="/".join(names)) for path, names in zip(paths, parts, strict=True)]


def imported(path):
    """Modules of ours that a file imports, as tuples of names below the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (tuple(n.split(".")[1:]) for n in names if n.split(".")[0] == "batchbayes" and "." in n)


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


@pytest.mark.parametrize(("path", "parts"), modules())
def test_imports_point_inwards(path, parts):
    for target in imported(path):
        assert layer(target[0]) <= layer(parts[0]), f"{'/'.join(parts)} imports {'/'.join(target)}"
        if parts[0] in ALONE and layer(target[0]) == layer(parts[0]):
            assert target[0] == parts[0], f"{'/'.join(parts)} imports {'/'.join(target)}"
        if (
            parts[0] == target[0] == "methods"
            and len(parts) > 2
            and target[1:] not in ((), ("table",), ("candidates",))
        ):
            assert target[1] == parts[1], f"{'/'.join(parts)} imports another family's {'/'.join(target)}"


@pytest.mark.parametrize(("path", "parts"), modules())
def test_modes_buffers_and_hooks_belong_to_the_network(path, parts):
    text = path.read_text()
    if parts not in (("network",), ("shadow",)):
        for word in ("register_forward", "_forward_hooks", ".train()", ".running_mean =", "functional_call"):
            allowed = word == ".train()" and parts[0] in ("training", "experiments", "demo")
            assert allowed or word not in text, f"{'/'.join(parts)} has {word}"


@pytest.mark.parametrize(("path", "parts"), modules())
def test_nothing_is_unpickled_or_evaluated(path, parts):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "joblib"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "pickle.load", "pickle.loads"}
            if called == "torch.load":  # the weights of a user's network, read by torch's own reader of tensors alone
                assert parts == ("data", "weights")
                assert "weights_only=True" in [ast.unparse(keyword) for keyword in node.keywords]


def test_importing_brings_no_heavy_package():
    script = (
        "import torch, numpy, safetensors.torch, sys; before = set(sys.modules); import batchbayes; "
        "[getattr(batchbayes, name) for name in batchbayes.__all__]; "
        "roots = lambda names: {name.split('.')[0] for name in names}; "
        "print(*sorted(roots(sys.modules) - roots(before) - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["batchbayes"]


def test_help_does_not_wait_for_torch():
    script = "import sys, batchbayes.cli as cli; cli.build_parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_look_at_the_package_shows_public_names_only():
    assert [name for name in dir(batchbayes) if not name.startswith("__")] == batchbayes.__all__


def test_public_names_are_all_there_whatever_was_imported_before():
    script = (
        "import batchbayes.prediction, batchbayes.engines.linear, batchbayes.metrics, batchbayes as bb; "
        "from batchbayes.methods.table import METHODS; "
        "assert set(METHODS) < set(bb.__all__), set(METHODS) - set(bb.__all__); "
        "assert all(hasattr(bb, name) for name in bb.__all__); "
        "print(*sorted(name for name in bb.__all__ if isinstance(getattr(bb, name), type(bb))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = ["attacks", "calibrate", "decisions", "distill", "metrics", "online", "plots", "scores"]
    assert done.stdout.split() == modules


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_line_of_the_table_of_methods_holds_what_it_says(method):
    posterior = resolve(method.posterior)
    assert resolve(method.fit).__name__ == method.name
    assert posterior.kind == method.kind
    assert method.candidates is None or callable(resolve(method.candidates))
    assert not method.about.endswith(".")
