"""Tensors as numpy arrays and as a pandas table."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchbayes.errors import BatchbayesError


def to_array(values: Tensor) -> np.ndarray:
    """Return a numpy array. Numpy has no bfloat16, so that becomes float32.

    >>> to_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def to_frame(columns: Mapping[str, Tensor]) -> Any:
    """Return a pandas DataFrame with one row for each example.

    A tensor (N,) or (N, 1) is one column. A tensor (N, D) becomes D columns, name_0 to name_{D-1}.
    """
    try:
        import pandas as pd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BatchbayesError(
            expected="the package pandas, which to_pandas() needs", got="none", fix="pip install pandas, or to_numpy()"
        ) from error
    found = {}
    for name, values in columns.items():
        if values.ndim > 2:
            raise BatchbayesError(
                expected="a few numbers for each example, for a table",
                got=f"{name} of shape {tuple(values.shape)}",
                fix="use to_numpy(), which keeps the shape",
            )
        if values.ndim == 1 or values.shape[1] == 1:
            found[name] = to_array(values.reshape(len(values)))
        else:
            found.update({f"{name}_{k}": to_array(column) for k, column in enumerate(values.unbind(1))})
    return pd.DataFrame(found)
