import math

import pytest

from batchbayes._common.tune import GOLDEN, tune


@pytest.mark.parametrize("best", [0.0, 0.31, 2.5, 4.99, 5.0])
@pytest.mark.parametrize("grid", [0, 2, 33])
def test_the_minimum_is_found_up_to_the_last_bracket(best, grid):
    x, value = tune(lambda x: abs(x - best), 0.0, 5.0, grid=grid, steps=30)
    bracket = 5.0 if grid < 3 else 2 * 5.0 / (grid - 1)
    assert x == pytest.approx(best, abs=bracket * GOLDEN**30)
    assert value == abs(x - best)


def test_the_grid_finds_the_lowest_of_several_minima():
    def function(x: float) -> float:
        return math.cos(3 * x) + 0.1 * (x - 3.2) ** 2

    x, value = tune(function, -5.0, 5.0)
    assert x == pytest.approx(math.pi, abs=0.01)
    assert value == function(x) < -0.99
    assert tune(function, -5.0, 5.0, grid=0).loss > -0.9  # golden section alone ends in another one


@pytest.mark.parametrize(("grid", "steps"), [(0, 12), (33, 20)])
def test_the_number_of_evaluations_is_known(grid, steps):
    seen = []

    def function(x: float) -> float:
        seen.append(x)
        return x * x

    tune(function, -1.0, 2.0, grid=grid, steps=steps)
    assert len(seen) == grid + 2 + steps
    assert -1 <= min(seen) < max(seen) <= 2


@pytest.mark.parametrize(("function", "end"), [(lambda x: x, -3.0), (lambda x: -x, 2.0), (lambda x: max(x, 0.0), -3.0)])
def test_a_minimum_at_an_end_of_the_range_is_that_end(function, end):
    assert tune(function, -3.0, 2.0) == (end, function(end))
