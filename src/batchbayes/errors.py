"""The one error and the one warning that batchbayes raises about its inputs."""

import difflib
import sys
import warnings
from collections.abc import Iterable


class BatchbayesError(ValueError):
    """An input that cannot be used. The message says what was expected, what was given, and what to do.

    >>> raise BatchbayesError(expected="a batch of two or more", got="one example", fix="raise batch_size")
    Traceback (most recent call last):
    batchbayes.errors.BatchbayesError: expected a batch of two or more; got one example. Do this: raise batch_size.
    """

    def __init__(self, expected: str, got: str, fix: str) -> None:
        super().__init__(f"expected {expected}; got {got}. Do this: {fix}.")
        self.expected, self.got, self.fix = expected, got, fix

    def __reduce__(self) -> tuple[type["BatchbayesError"], tuple[str, str, str]]:
        """Make the error picklable, so that it can be passed between processes."""
        return type(self), (self.expected, self.got, self.fix)


def unknown_name(what: str, name: object, choices: Iterable[str]) -> BatchbayesError:
    """Return an error that lists the choices and suggests the one that is most similar to `name`.

    >>> print(unknown_name("a data set", "bosten", ["boston", "yacht"]))
    expected a data set, one of: boston, yacht; got 'bosten'. Do this: choose one of them (did you mean boston?).
    """
    names = list(choices)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return BatchbayesError(f"{what}, one of: {', '.join(names)}", repr(name), f"choose one of them{hint}")


class BatchbayesWarning(UserWarning):
    """A result that there is a reason to doubt."""


def warn(message: str) -> None:
    """Issue a `BatchbayesWarning` that points at the first line of the call stack outside of batchbayes."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("batchbayes."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, BatchbayesWarning, stacklevel=depth)
