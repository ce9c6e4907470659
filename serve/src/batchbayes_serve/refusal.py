"""The error about what cannot be served: that of the library if it is installed, else one like it."""

from typing import TYPE_CHECKING

try:
    from batchbayes.errors import BatchbayesError
except ModuleNotFoundError:
    if TYPE_CHECKING:
        raise

    class BatchbayesError(ValueError):
        """The message says what was expected, what was given, and what to do."""

        def __init__(self, expected: str, got: str, fix: str) -> None:
            super().__init__(f"expected {expected}; got {got}. Do this: {fix}.")


__all__ = ["BatchbayesError"]
