"""Which rows of a fit stand best for all of them, so that fewer draws say as much.

What a row does to the outputs of training examples is a vector v. Mean and covariance of the outputs over all rows are
averages of v and of its products, so rows are good if these averages over them are near those over all rows. The kernel
of two rows with the product $g = v^\\top w$ is $g + g^2$, and the distance between both averages is the maximum mean
discrepancy. Rows are added one by one (kernel herding: Chen, Welling and Smola, 2010), and then exchanged.
"""

import math

from torch import Tensor

SWEEPS = 3
"""How often each row is taken out again and replaced by the one that is best then, perhaps by itself."""


def chosen_rows(influence: Tensor, num_rows: int, first: int) -> list[int]:
    """Return the rows, from the Gram matrix (R, R) of what rows do to outputs, beginning with the row `first`."""
    kernel = influence.double() / influence.double().diagonal().mean()
    kernel = kernel + kernel.square()
    wanted, rows = kernel.mean(1), [first]
    for turn in range(num_rows - 1 + SWEEPS * num_rows):
        if turn >= num_rows - 1:
            rows.pop(0)
        away = (2 * kernel[rows].sum(0) + kernel.diagonal()) / (len(rows) + 1) - 2 * wanted
        away[rows] = math.inf
        rows.append(int(away.argmin()))
    return rows
