"""The door to the scikit-learn estimators, which are in the package batchbayes-tables."""

import sys

try:
    import batchbayes_tables as _tables
    from batchbayes_tables import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("sklearn", "batchbayes_tables"):
        raise
    from batchbayes._common.checks import install_command

    _missing = "scikit-learn" if error.name.startswith("sklearn") else "batchbayes-tables"
    raise ModuleNotFoundError(
        f"expected {_missing} for the estimators of batchbayes.sklearn; got no {error.name}. Do this: "
        f"{install_command(package='batchbayes-tables')}.",
        name=error.name,
    ) from error

__all__ = _tables.__all__  # pyright: ignore[reportUnsupportedDunderAll]
for _name in ("around", "classifier", "regressor"):  # estimators that were pickled before they had a package
    sys.modules[f"{__name__}.{_name}"] = sys.modules[f"{_tables.__name__}.{_name}"]
