import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from batchbayes_papers.mcbn import toy
from batchbayes_papers.mcbn.scores import DrawnPredictions
from helpers.experiments import run_experiment
from torch import nn

SMOKE = toy.PRESETS["smoke"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_experiment(toy, SMOKE)


def test_every_method_is_less_certain_without_data(results: dict[str, Any]) -> None:
    rows = toy.toy_rows(SMOKE, results)
    assert [row.method for row in rows] == [method for methods in toy.METHODS.values() for method in methods]
    for row in rows:
        assert row.std_outside > 1.3 * row.std_inside > 0
        assert row.rmse_outside > row.rmse_inside


def test_tuning_the_batch_size_does_not_lower_the_likelihood(results: dict[str, Any]) -> None:
    as_trained, tuned = toy.toy_rows(SMOKE, results)[:2]
    assert as_trained.setting == "M = 32"
    assert tuned.pll_inside > as_trained.pll_inside - 0.1


def test_work_is_deterministic(results: dict[str, Any]) -> None:
    unit = toy.units(SMOKE)[0]
    assert json.loads(json.dumps(toy.work(SMOKE, unit, {}))) == results[unit.name]


def test_a_known_predictor_gets_the_scores_of_its_closed_form() -> None:
    """Two functions, 0.3 above and 0.3 below the truth: the std is 0.3 everywhere, and the only error is the noise."""

    def predict(inputs: torch.Tensor, targets: torch.Tensor) -> DrawnPredictions:
        from batchbayes.datasets import true_function

        truth = true_function(inputs)[:, 0].double()
        return DrawnPredictions(torch.stack([truth - 0.3, truth + 0.3]), targets[:, 0].double())

    row = toy.toy_row(0, "known", "", predict, with_curves=True)
    assert (row.std_inside, row.std_outside) == (pytest.approx(0.3), pytest.approx(0.3))
    noise_error = 4 * 0.1 / math.sqrt(2 * toy.NUM_TEST)
    assert row.rmse_inside == pytest.approx(0.1, abs=noise_error)
    assert row.rmse_outside == pytest.approx(0.1, abs=noise_error)
    assert set(row.std) == {0.3}
    assert row.constant_std == pytest.approx(0.1, abs=4 * 0.1 / math.sqrt(2 * toy.NUM_POINTS))


def test_dashed_lines_of_constant_uncertainty_are_two_deviations_from_the_mean(results: dict[str, Any]) -> None:
    figure, rows = toy.figures(SMOKE, results)["predictive-bands"], toy.toy_rows(SMOKE, results)
    for panel, row in zip(figure.axes, rows, strict=True):
        low, high = (np.asarray(line.get_ydata()) for line in panel.get_lines()[-2:])
        assert row.constant_std is not None
        assert np.allclose(high - low, 4 * row.constant_std)
        assert np.allclose((high + low) / 2, row.mean, atol=1e-6)


def test_the_setting_with_the_highest_likelihood_is_chosen() -> None:
    def shifted(shift: float):  # type: ignore[no-untyped-def]
        return lambda inputs, targets: DrawnPredictions((targets[:, 0].double() + shift)[None], targets[:, 0].double())

    assert toy.most_likely_setting({"far": shifted(1.0), "near": shifted(0.1), "off": shifted(-0.5)}, seed=0) == "near"


def test_dropout_leaves_the_single_input_unchanged() -> None:
    rates = [module.p for module in toy.dropout_network(0.1).modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.0, 0.1, 0.1, 0.1]


def test_the_figure_shows_each_method_on_the_same_axes(results: dict[str, Any]) -> None:
    panels = toy.figures(SMOKE, results)["predictive-bands"].axes
    rows = toy.toy_rows(SMOKE, results)
    assert [panel.get_title() for panel in panels] == [f"{row.method}: {row.setting}" for row in rows]
    for panel, row in zip(panels, rows, strict=True):
        mean = next(line for line in panel.get_lines() if line.get_label() == "mean")
        np.testing.assert_allclose(np.asarray(mean.get_ydata(), float), row.mean)
        assert panel.get_ylim() == panels[0].get_ylim()


def test_a_table_of_an_unfinished_run_has_empty_cells(results: dict[str, Any]) -> None:
    (table,) = toy.tables(SMOKE, {"seed 0, dropout": results["seed 0, dropout"]})
    assert [row[2] is None for row in table.rows] == [True, True, False, True]
    assert toy.tables(SMOKE, {})[0].rows[0] == ("MCBN", "", *[None] * 7)
