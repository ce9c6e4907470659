import math
from typing import Any

import pytest
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.samples import ensembles
from batchbayes_papers.samples.ensembles import DEEP, MethodCurve, equivalent
from helpers.experiments import run_experiment

SMOKE = ensembles.PRESETS["smoke"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_experiment(ensembles, SMOKE)


def test_every_method_has_a_curve(results: dict[str, Any]) -> None:
    found = ensembles.curves(SMOKE, results)
    assert len(found) == 19
    assert found[DEEP][0].passes == [1, 2, 3]
    assert found["network"][0].passes == [1]
    assert found[f"{DEEP} with views"][0].passes == [1, 2, 3]
    assert all(0 < value < 20 for each in found.values() for value in each[0].calibrated_nll)


def test_the_first_member_is_the_network_of_the_other_methods(results: dict[str, Any]) -> None:
    found = ensembles.curves(SMOKE, results)
    accuracies = {found[DEEP][0].accuracy[0], found["network"][0].accuracy[0]}
    assert max(accuracies) - min(accuracies) < 0.3  # dealt like cards: the first may be another member
    assert equivalent(found[DEEP], found[DEEP]) <= 3  # itself, or fewer if a smaller ensemble is as good


def test_tables_and_figures(results: dict[str, Any]) -> None:
    text = to_markdown(ensembles.tables(SMOKE, results)[0])
    assert DEEP in text
    assert "SWAG" in text
    assert set(ensembles.figures(SMOKE, results)) == {"calibrated-NLL-against-passes"}
    assert ensembles.tables(SMOKE, {})[0].rows == ()
    assert len(ensembles.notes(SMOKE)) == 3


@pytest.mark.parametrize(("value", "expected"), [(0.9, 1.0), (0.45, 1.5), (0.4, 2.0), (0.31, 3.8), (0.2, math.inf)])
def test_equivalents_are_read_off_the_mean_curve(value: float, expected: float) -> None:
    def curve(shift: float, nll: tuple[float, ...], passes: tuple[int, ...]) -> MethodCurve:
        return MethodCurve(0, "", passes, nll, tuple(each + shift for each in nll), nll, 1.0)

    deep = [curve(shift, (0.5, 0.4, 0.3), (1, 2, 4)) for shift in (-0.1, 0.1)]
    own = [curve(shift, (9.0, value), (1, 8)) for shift in (-0.2, 0.2)]
    assert equivalent(own, deep) == pytest.approx(expected)
