"""The shape of the code: who may import whom, and what an import costs."""

import subprocess
import sys
from importlib import import_module
from inspect import isroutine

import pytest
from helpers.source import LIBRARY, Module, modules, unpickled_or_evaluated

import batchbayes
from batchbayes.methods.table import METHODS, resolve

# From the inside out: a module may import those of its own layer and of the layers above it in this list.
LAYERS = [
    {"__version__", "errors", "_common"},
    {"network"},
    {"metrics", "patch", "posterior", "state", "sums", "engines", "predictive", "likelihoods", "outputs", "predict"},
    {"training", "models", "datasets"},
    {"methods"},
    {"novelty", "drift", "saving", "plots", "calibrate", "distill", "decisions", "detections"},
    {"tools"},
    {"report"},
    {"export"},
    {"cli", "sklearn", "__main__"},
]
# Within a layer these stand alone: a method knows no other folder of methods, a network or a data set nothing Bayesian.
ALONE = {"methods", "models", "datasets", "training"}
SHARED_BY_METHODS = {("table",), ("candidates",)}
OWN_NETWORK = {("network", "function"), ("network", "replicas"), ("methods", "samples", "svgd")}  # svgd makes its own


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def may_import(parts, target):
    """Say whether a module may import another one. Both are names below the package."""
    if layer(target[0]) > layer(parts[0]):
        return False
    same_layer = target[0] != parts[0] and layer(target[0]) == layer(parts[0])
    if same_layer and (parts[0] in ALONE or (parts[0] == "metrics" and parts != ("metrics", "evaluation"))):
        return False  # a score is a plain function of tensors; `evaluate` alone knows what a predictive is
    if parts[0] == target[0] == "methods" and len(parts) > 2 and target[1:] not in SHARED_BY_METHODS:
        return target[1:2] in ((), parts[1:2])  # a family of methods imports no other family
    return True


def test_imports_point_inwards():
    wrong = [
        f"{module} imports {'/'.join(target)}"
        for module in modules(LIBRARY)
        for target in module.imports_of("batchbayes")
        if not may_import(module.parts, target)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("parts", "target"),
    [
        ("network/function", "posterior"),
        ("metrics/regression", "predictive"),
        ("models", "training/loop"),
        ("methods/samples/swag", "methods/weights/noisy"),
        ("methods/samples/swag", "report/words/shared"),
        ("methods/mc_dropout", "plots"),
        ("report/assess", "export/export"),
        ("report/assess", "cli"),
    ],
)
def test_an_import_that_points_outwards_is_found(parts, target):
    assert not may_import(tuple(parts.split("/")), tuple(target.split("/")))


def test_the_library_imports_no_papers():
    files = [*modules(LIBRARY), Module(LIBRARY / "__init__.py", ("__init__",))]
    assert not [str(module) for module in files if module.imports_of("batchbayes_papers", whole=True)]


def test_modes_buffers_and_hooks_belong_to_the_network():
    wrong = [
        f"{module} has {word}"
        for module in modules(LIBRARY)
        if module.parts not in OWN_NETWORK
        for word in ("register_forward", "_forward_hooks", ".train()", ".running_mean =", "functional_call")
        if word in module.text and not (word == ".train()" and module.parts[0] == "training")
    ]
    assert not wrong


def test_nothing_is_unpickled_or_evaluated():
    # The weights of a user's network are read by torch's own reader of tensors alone.
    reader = ("report", "read", "factories")
    assert not [each for module in modules(LIBRARY) for each in unpickled_or_evaluated(module, may_load=reader)]


def test_every_tool_is_explained():
    tools = import_module("batchbayes.tools")
    values = {name: getattr(tools, name) for name in tools.__all__}
    assert not [name for name, value in values.items() if isroutine(value) and not value.__doc__]


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
        "import types, batchbayes.predict, batchbayes.engines.linear, batchbayes.metrics, batchbayes as bb; "
        "from batchbayes.methods.table import METHODS; "
        "assert set(METHODS) < set(bb.__all__), set(METHODS) - set(bb.__all__); "
        "assert all(hasattr(bb, name) for name in bb.__all__); "
        "print(*sorted(name for name in bb.__all__ if isinstance(getattr(bb, name), types.ModuleType)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = ["calibrate", "decisions", "distill", "metrics", "plots", "tools"]
    assert done.stdout.split() == modules


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_line_of_the_table_of_methods_holds_what_it_says(method):
    posterior = resolve(method.posterior)
    assert resolve(method.fit).__name__ == method.name
    assert posterior.kind == method.kind
    assert method.candidates is None or callable(resolve(method.candidates))
    assert not method.about.endswith(".")
