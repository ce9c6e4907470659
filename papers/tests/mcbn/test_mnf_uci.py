"""Flows on regression data: early stopping against a simple version, and what the tables compare."""

import math
from dataclasses import replace

import pytest
import torch
from batchbayes_papers.mcbn import mnf_uci
from batchbayes_papers.mcbn.splits import load_split
from helpers.experiments import run_experiment

SMOKE, QUICK = mnf_uci.PRESETS["smoke"], mnf_uci.PRESETS["quick"]


@pytest.fixture(scope="module")
def fold():
    return load_split("synthetic", 1, None).folds[0]


def mean_squared_error_at_means(posterior, part):
    network = posterior.network.module
    network.load_state_dict(posterior.means())
    with torch.no_grad():
        return float((part.in_units(network(part.others)) - part.truth).square().mean())


def test_training_stops_when_the_error_has_not_fallen_for_some_epochs(fold):
    """The errors of all epochs, by the network with its mean weights, give the same epoch by the rule in words."""
    config = replace(SMOKE, max_epochs=60, patience=4, learning_rate=0.03)
    errors = []
    mnf_uci.train(
        config,
        fold,
        1.0,
        60,
        1,
        lambda step: errors.append(mean_squared_error_at_means(step.network.posterior(), fold)),
    )
    assert (len(errors), mnf_uci.steps_in_epoch(fold)) == (60, 1)
    best = next(
        epoch for epoch in range(1, 61)
        if errors[epoch - 1] == min(errors[:epoch]) and min(errors[epoch : epoch + 4]) >= errors[epoch - 1]
    )  # fmt: skip
    assert 1 < best < 50, "the case has no early stop, or a trivial one"
    assert min(errors[best + 4 :]) < errors[best - 1], "without patience the choice would be another one"
    stopped = mnf_uci.stop_early(config, fold, 1.0)
    assert stopped.epochs == best
    assert stopped.error == pytest.approx(errors[best - 1], rel=1e-4)
    assert mean_squared_error_at_means(stopped.posterior, fold) == pytest.approx(stopped.error, rel=1e-4)


def test_held_out_rows_are_looked_at_once_in_an_epoch(fold, monkeypatch):
    monkeypatch.setattr(mnf_uci, "BATCH_SIZE", 40)
    best, steps = mnf_uci.BestEpoch(fold, patience=2), []

    def look(step):
        before = best.error
        best.look(step)
        if best.error != before:
            steps.append(step.number)

    mnf_uci.train(SMOKE, fold, 1.0, 5, 1, look)
    assert mnf_uci.steps_in_epoch(fold) == 4
    assert steps
    assert all(step % 4 == 0 for step in steps)


def test_the_limit_of_steps_counts_whole_epochs(fold):
    assert mnf_uci.steps_in_epoch(fold) == 1
    assert mnf_uci.most_epochs(mnf_uci.PRESETS["paper"], fold) == 2000
    assert mnf_uci.most_epochs(replace(QUICK, max_steps=70), fold) == 70
    wide = replace(fold, inputs=torch.zeros(330, 2))
    assert mnf_uci.most_epochs(replace(QUICK, max_steps=70), wide) == 24


def test_networks_for_the_test_have_the_epochs_that_held_out_rows_choose(monkeypatch):
    calls, train = [], mnf_uci.train

    def recorded(config, part, precision, epochs, *rest, **options):
        calls.append((len(part.inputs), precision, epochs))
        return train(config, part, precision, epochs, *rest, **options)

    monkeypatch.setattr(mnf_uci, "train", recorded)
    config = replace(SMOKE, seeds=2, max_epochs=20, patience=3, learning_rate=0.03)
    found = mnf_uci.work(config, mnf_uci.units(config)[0], {}, None)
    unit, matched = (found["epochs"][method] for method in mnf_uci.METHODS)
    assert 0 < unit < 20
    assert 0 < matched < 20
    assert [(rows, epochs) for rows, _, epochs in calls] == [
        (192, 20), (240, unit), (240, unit), (192, 20), (240, matched), (240, matched)
    ]  # fmt: skip
    assert {precision for _, precision, _ in calls[:3]} == {1.0}
    assert {precision for _, precision, _ in calls[3:]} == {calls[3][1]}
    assert calls[3][1] > 1


def test_only_unit_noise_is_compared_with_the_paper():
    """Published for yacht: RMSE 2.13, normalised CRPS 24.92 ± 3.77."""
    scores = {"rmse": 2.13, "crps": 1.0, "pll": -2.0, "crps_norm": 30.0, "pll_norm": 40.0}
    results = {
        f"yacht, split {split}": {
            "runs": {method: [{**scores, "crps_norm": 30.0 + 2 * split}] for method in mnf_uci.METHODS},
            "epochs": dict.fromkeys(mnf_uci.METHODS, 10 * split),
            "points": {},
        }
        for split in (1, 2)
    }
    rmse, crps, _, _, _, epochs = mnf_uci.tables(replace(QUICK, datasets=("yacht",)), results)
    assert [row[:3] for row in rmse.rows] == [("yacht", "MNF", 2.13), ("yacht", "MNF, matched noise", None)]
    assert [row[6] for row in rmse.rows] == [pytest.approx(0), None]
    gap = (33 - 24.92) / math.hypot(1, 3.77)
    assert [row[8] for row in crps.rows] == [pytest.approx(gap), None]
    assert "0 of 1 are within two standard errors of the paper." in crps.notes
    assert epochs.rows[0] == ("yacht", "MNF", 10, 20, None, None, None)


def test_the_figure_has_a_panel_for_each_data_set():
    (figure,) = mnf_uci.figures(SMOKE, run_experiment(mnf_uci, SMOKE)).values()
    assert [panel.get_title() for panel in figure.axes] == ["synthetic"]
    assert any(panel.get_lines() for panel in figure.axes)
