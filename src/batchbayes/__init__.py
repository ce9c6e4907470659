"""batchbayes: the uncertainty that a batch-normalised network already has.

posterior  = batchbayes.mcbn(model, training_batches)
predictive = batchbayes.predict(posterior, inputs, batchbayes.categorical())
predictive.probs, predictive.mutual_information
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from batchbayes.methods import METHODS, find_method, plugin_names, resolve

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """Return the module of each public name. `__init__.pyi` lists them, for us and for type checkers."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [line for line in listed if isinstance(line, ast.ImportFrom)]
    return {name.name: str(line.module) for line in imports for name in line.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `batchbayes --help` need not wait for torch."""
    if _HOMES.get(name) == __name__:
        found = import_module(f"{__name__}.{name}")
    elif name in _HOMES:
        found = resolve(f"{_HOMES[name]}:{name}")
    elif name in METHODS or name in plugin_names():  # a method of another package
        found = resolve(find_method(name).fit)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
