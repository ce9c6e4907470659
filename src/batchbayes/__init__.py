"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.3.0"


def _homes() -> dict[str, str]:
    """Return the module of each public name. `__init__.pyi` lists them, for us and for type checkers."""
    homes, module = {}, ""
    words = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").replace(",", " ").split()
    for before, word in pairwise(words):
        if before == "from":
            module = word
        elif before == "as":
            homes[word] = module
    return homes


_HOMES = _homes()
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


_MOVED = {
    "scores": "batchbayes.metrics",
    "attacks": "batchbayes_papers.attacks.attacks",
    "online": "batchbayes_papers.online",
    "batch_norm_regulariser": "batchbayes_papers.sbn.regulariser:batch_norm_regulariser",
}
"""Public names of earlier versions that live elsewhere now: modules, or names in them."""


class _Package(ModuleType):
    """This package. A public function keeps its name when the module or folder of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) or _HOMES.get(name, __name__) == __name__:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `batchbayes --help` need not wait for torch."""
    if _HOMES.get(name) == __name__:
        found = import_module(f"{__name__}.{name}")
    elif name in _MOVED:
        from batchbayes._common.checks import moved

        found = moved(_MOVED[name])
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        found = import_module(f"{__name__}.methods.table").fit_function(name)  # a method of another package
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
