"""The table of methods: a name and a kind belong to one method."""

import pytest
from own.jitter import JitterPosterior, jitter

import batchbayes as bb
from batchbayes.methods.table import METHODS


def registered(name, kind):
    """Try to register a new function and a new class of posterior under these names."""

    def fit(model, batches=None): ...

    fit.__name__ = fit.__qualname__ = name
    return bb.register(fit, type("Own", (JitterPosterior,), {"kind": kind}), label="Own", about="a test")


@pytest.mark.parametrize(("name", "kind"), [("mcbn", "own"), ("own", "batchnorm"), ("own", "batchnorm-query")])
def test_a_known_name_or_kind_is_refused(name, kind):
    before = dict(METHODS)
    with pytest.raises(bb.BatchbayesError, match=f"the name '{name}' and the kind '{kind}', of which one is taken"):
        registered(name, kind)
    assert before == METHODS


def test_a_module_may_be_imported_again():
    before = dict(METHODS)
    again = bb.register(jitter, JitterPosterior, label="Jitter", about="Gaussian noise in all weight matrices")
    assert again == before["jitter"]
    assert before == METHODS
    assert bb.jitter is jitter  # type: ignore[attr-defined]
