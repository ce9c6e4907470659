"""Numbers that are written as text."""

import math
from collections.abc import Sequence

import numpy as np

CHARACTERS = frozenset("0123456789+-.eE")
LARGEST = float(np.finfo(np.float32).max)
"""Inputs and real targets are 32-bit floats."""
LARGEST_INTEGER = 2**63 - 1
MOST_DIGITS = 20
"""The length of the longest 64-bit integer, with its sign. Python refuses to convert very long ones."""


def is_number(cell: str) -> bool:
    """Say whether a text is a plain decimal number.

    Python itself accepts more, such as underscores, digits of other scripts, `nan` and `infinity`.

    >>> [is_number(cell) for cell in ("1", "-2.5e3", ".5", "1_0", "nan", "1,5", "", "e")]
    [True, True, True, False, False, False, False, False]
    """
    if not cell or not CHARACTERS.issuperset(cell):
        return False
    try:
        float(cell)
    except ValueError:
        return False
    return True


def fits(cell: str) -> bool:
    """Say whether a number is small enough for a 32-bit float.

    >>> fits("1e38"), fits("1e39")
    (True, False)
    """
    return math.isfinite(float(cell)) and abs(float(cell)) <= LARGEST


def are_integers(cells: Sequence[str]) -> bool:
    """Say whether all numbers are written without point and exponent and fit into 64 bits.

    >>> are_integers(["1", "-2"]), are_integers(["1", "2.0"]), are_integers(["1" + "0" * 20])
    (True, False, False)
    """
    return all(
        len(cell) <= MOST_DIGITS and not {".", "e", "E"} & set(cell) and abs(int(cell)) <= LARGEST_INTEGER
        for cell in cells
    )
