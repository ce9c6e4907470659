"""The one error and the one warning that batchbayes raises about what it was given."""

import sys
import warnings


class BatchbayesError(ValueError):
    """An input that cannot be worked with. The message says what was expected, what came, and what to do.

    >>> raise BatchbayesError(expected="a batch of two or more", got="one example", fix="raise batch_size")
    Traceback (most recent call last):
    batchbayes.errors.BatchbayesError: expected a batch of two or more; got one example. Do this: raise batch_size.
    """

    def __init__(self, expected: str, got: str, fix: str) -> None:
        super().__init__(f"expected {expected}; got {got}. Do this: {fix}.")
        self.expected, self.got, self.fix = expected, got, fix


class BatchbayesWarning(UserWarning):
    """An answer was given, and there is a reason to doubt it."""


def warn(message: str) -> None:
    """Issue a `BatchbayesWarning` that points at the first line outside of batchbayes, not at our insides."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("batchbayes."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, BatchbayesWarning, stacklevel=depth)
