"""What is predicted: its name and its unit, so that every number in a sentence keeps its unit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from batchbayes._common.text import number
from batchbayes.errors import BatchbayesError

UNIT = re.compile(r"(.*\S)\s*[(\[]([^()\[\]]+)[)\]]\s*")
"""A name with a unit in brackets at its end: "strength (MPa)", "time [s]"."""


@dataclass(frozen=True)
class Quantity:
    """One output of a regression."""

    name: str
    unit: str = ""
    """Empty if it is not known."""

    def text(self, value: float) -> str:
        """Write a number with its unit.

        >>> Quantity("strength", "MPa").text(10.21), Quantity("strength").text(10.21)
        ('10.2 MPa', '10.2')
        """
        return f"{number(value)} {self.unit}".rstrip()

    @property
    def label(self) -> str:
        """What stands in the brackets of an axis."""
        return self.unit or self.name


def quantities(name: str | None, units: Sequence[str] | None, outputs: int) -> list[Quantity]:
    """Return the quantities of a network with so many outputs. Units that are not given are read from the name.

    >>> quantities("strength (MPa)", None, 1)
    [Quantity(name='strength', unit='MPa')]
    >>> [quantity.name for quantity in quantities(None, ("m", "s"), 2)]
    ['output 1', 'output 2']
    """
    found = UNIT.fullmatch(name or "")
    base, unit = (found[1], found[2]) if found else (name, "")
    if units is not None and len(units) not in (1, outputs):
        raise BatchbayesError(
            expected=f"one unit, or {outputs} with commas between them", got=", ".join(units), fix="check --unit"
        )
    each = [unit] * outputs if units is None else list(units) * (outputs if len(units) == 1 else 1)
    if outputs == 1:
        return [Quantity(base or "target", each[0])]
    return [Quantity(f"{base or 'output'} {i}", unit) for i, unit in enumerate(each, start=1)]
