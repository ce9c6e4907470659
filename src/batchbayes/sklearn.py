"""The door to the scikit-learn estimators, which are in the package batchbayes-tables."""

import sys

try:
    import batchbayes_tables as _tables
    from batchbayes_tables import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("sklearn", "batchbayes_tables"):
        raise
    from batchbayes._common.checks import install_command

    _top = error.name.partition(".")[0]
    _missing = "scikit-learn" if _top == "sklearn" else "batchbayes-tables"
    raise ModuleNotFoundError(
        f"expected {_missing} for the estimators of batchbayes.sklearn; got no {_top}. Do this: "
        f"{install_command(package='batchbayes-tables')}.",
        name=error.name,
    ) from error

__all__ = _tables.__all__  # pyright: ignore[reportUnsupportedDunderAll]
for _name in [name for name in sys.modules if name.startswith("batchbayes_tables.")]:  # where old pickles look for them
    _old = _name.replace("batchbayes_tables", __name__).replace("sklearn.stack", "training.stack")
    sys.modules.setdefault(_old, sys.modules[_name])
