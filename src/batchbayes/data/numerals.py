"""Numbers that are written as text."""

from collections.abc import Sequence

import numpy as np

CHARACTERS = frozenset("0123456789+-.eE")
LARGEST = float(np.finfo(np.float32).max)
"""Inputs and real targets are 32-bit floats."""
LARGEST_INTEGER = 2**63 - 1
MOST_DIGITS = 20
"""The length of the longest 64-bit integer, with its sign. Python refuses to convert very long ones."""


def as_numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return plain decimal numbers as float64, or None if a cell is no such number or too large for 32 bits.

    Python itself accepts more, such as underscores, digits of other scripts, `nan` and `infinity`.

    >>> as_numbers(["1", "-2.5e3", ".5"])
    array([ 1.0e+00, -2.5e+03,  5.0e-01])
    >>> [as_numbers([cell]) for cell in ("1_0", "nan", "1,5", "", "e", "1e39")]
    [None, None, None, None, None, None]
    """
    if not CHARACTERS.issuperset("".join(cells)):
        return None
    try:
        values = np.array([float(cell) for cell in cells])
    except ValueError:
        return None
    return values if np.abs(values).max(initial=0) <= LARGEST else None


def are_integers(cells: Sequence[str]) -> bool:
    """Say whether all numbers are written without point and exponent and fit into 64 bits.

    >>> are_integers(["1", "-2"]), are_integers(["1", "2.0"]), are_integers(["1" + "0" * 20])
    (True, False, False)
    """
    if not CHARACTERS.difference(".eE").issuperset("".join(cells)) or max(map(len, cells)) > MOST_DIGITS:
        return False
    return all(abs(int(cell)) <= LARGEST_INTEGER for cell in cells)
