"""A ready transform of tables: jitter in units of the training standard deviations."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes._common.checks import as_tensor, finite_number
from batchbayes.errors import BatchbayesError
from batchbayes.methods.views.transform import Transform, require_floating


@dataclass(frozen=True)
class TableJitter(Transform):
    """Add Gaussian noise to each column of a table (N, D): `amount` times the column's training standard deviation.

    All rows get the same noise in a view. `TableJitter.of(training_inputs, 0.1)` computes the standard deviations.
    """

    amount: float
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        finite_number("an amount", self.amount, above=0, fix="pass for example 0.05")
        known = isinstance(self.std, tuple | list)
        if not (known and self.std and all(0 <= std < math.inf for std in self.std) and any(self.std)):
            raise BatchbayesError(
                expected="finite standard deviations that are not all 0, one for each training column",
                got=f"{self.std}",
                fix="make the jitter by TableJitter.of(training_inputs, amount), from a table (N, D) without NaN",
            )

    @classmethod
    def of(cls, inputs: Tensor, amount: float) -> "TableJitter":
        """Return the jitter for training inputs (N, D)."""
        table = as_tensor(inputs, "the training inputs").double()
        return cls(amount, tuple(table.std(0, correction=0).tolist()) if table.ndim == 2 else ())

    @property
    def size(self) -> int:
        return len(self.std)

    def apply(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        if inputs.shape[1:] != (self.size,):
            raise BatchbayesError(
                expected=f"a table (N, {self.size}), one column for each standard deviation",
                got=f"shape {tuple(inputs.shape)}",
                fix="make the jitter from the training inputs, by TableJitter.of(inputs, amount)",
            )
        require_floating(self, inputs)
        noise = torch.special.ndtri(numbers.clamp(1e-9, 1 - 1e-9))  # standard normal
        return inputs + (self.amount * torch.tensor(self.std, dtype=torch.float64) * noise).to(inputs)
