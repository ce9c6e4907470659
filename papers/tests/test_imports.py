"""Who may import whom in the papers: public names of the library, and a short list of what experiments study."""

import pytest
from helpers.source import PAPERS, modules, public_modules, unpickled_or_evaluated

# From the inside out, as in the library. Folders of papers stand side by side in the third layer.
INNER = ({"data", "models"}, {"runner"})
STUDIED = {
    "engines.check": "how far a network is from linear",
    "methods.batchnorm.omega": "the statistics of batches, site by site",
    "methods.batchnorm.sites": "the layers that they belong to",
    "methods.batchnorm.prior": "the prior that weight decay implies for them",
    "methods.laplace.curvature": "curvatures of the loss, for learning part by part",
    "methods.samples.schedules": "steps of chains",
    "methods.samples.sg_mcmc": "samplers as optimisers, on a posterior that is known",
    "methods.samples.weight_samples": "weights as rows of a table",
    "methods.weights.family": "distributions of weights",
    "methods.weights.sites": "the layers that they belong to",
    "methods.weights.variational": "the loss that an ELBO is made of",
    "network.function": "what batch-norm layers see in a training",
}
"""Private modules of the library that experiments may import, and what they study in them."""
MACHINERY = {"_common.cluster", "_common.files", "_common.machine", "_common.page", "_common.progress"}
"""Private modules that the runner and the demonstration share with the report: workers, clusters, pages and bars."""
PLAIN = {"tools", "datasets", "models"}
"""All that data sets and networks know of the library: there is nothing Bayesian in them."""
READERS = {"report.read.arrays"}
"""Private modules that data sets are read with."""


def may_use(parts, name, public):
    """Say whether a module of the papers may import a module of the library."""
    if parts[0] in ("runner", "demo"):
        return name in public | MACHINERY
    if parts[0] in ("data", "models"):
        return name in PLAIN | READERS
    return name in public | STUDIED.keys()


def layer(name):
    return next((i for i, names in enumerate(INNER) if name in names), 3 if name == "commands" else 2)


def test_experiments_import_public_names():
    public = public_modules()
    wrong = [
        f"{module} imports {name} of {path}"
        for module in modules(PAPERS)
        for path, name in module.imports()
        if path.startswith("batchbayes.") and not may_use(module.parts, path.removeprefix("batchbayes."), public)
    ]
    assert not wrong


def test_no_private_module_is_on_the_list_without_need():
    used = {path.removeprefix("batchbayes.") for module in modules(PAPERS) for path, _ in module.imports()}
    assert used >= STUDIED.keys() | MACHINERY | READERS


@pytest.mark.parametrize("name", ["_common.rng", "network.replicas", "report.assess", "methods.weights.noisy"])
def test_other_private_modules_are_refused(name):
    assert not any(may_use((folder, "some"), name, public_modules()) for folder in ("mcbn", "runner", "data"))


def test_imports_point_inwards():
    wrong = [
        f"{module} imports {'/'.join(target)}"
        for module in modules(PAPERS)
        for target in module.imports_of("batchbayes_papers")
        if layer(target[0]) > layer(module.parts[0])
    ]
    assert not wrong


def test_nothing_is_unpickled_or_evaluated():
    assert not [each for module in modules(PAPERS) for each in unpickled_or_evaluated(module)]


def test_modes_buffers_and_hooks_are_left_alone():
    words = ("register_forward", "_forward_hooks", ".running_mean =", "functional_call")
    assert not [f"{module} has {word}" for module in modules(PAPERS) for word in words if word in module.text]
