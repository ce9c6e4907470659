"""The protocol of the regression tables: its parts against simple versions, and a small run."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batchbayes_papers.mcbn import batch_size as mcbn_batch_size
from batchbayes_papers.mcbn import passes as mcbn_passes
from batchbayes_papers.mcbn import tables
from batchbayes_papers.mcbn import uci as mcbn_uci
from batchbayes_papers.mcbn.methods import at_effective_batch_size, correlated
from batchbayes_papers.mcbn.protocol import (
    GridPoint,
    UciProtocol,
    ValidationHistory,
    best_candidate,
    cross_validate,
    new_network,
    train_candidate,
)
from batchbayes_papers.mcbn.published import published_value, published_values
from batchbayes_papers.mcbn.scores import DrawnPredictions, score_runs, scores_of, tune_fold_precision
from batchbayes_papers.mcbn.splits import PRECISIONS, load_split, standardised, synthetic_data
from batchbayes_papers.runner.experiment import Unit
from batchbayes_tables.stack.stack import stack_networks
from helpers.experiments import run_experiment
from helpers.shared import FOLDER
from scipy import stats

import batchbayes as bb
from batchbayes._common.rng import generator
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig, half_squared_error, supervised, train

SMOKE = mcbn_uci.PRESETS["smoke"]


@pytest.fixture(scope="module")
def smoke():
    return run_experiment(mcbn_uci, SMOKE)


def test_every_method_beats_the_constant_predictor(smoke):
    whole = load_split("synthetic", 1, None).whole
    constant = float((whole.truth - whole.center).square().mean().sqrt())
    runs = mcbn_uci.tested_runs(SMOKE, smoke)["synthetic"]
    assert set(runs) == {*tables.BEYOND, "BN", "MCDO", "DO"}
    for method, found in runs.items():
        assert len(found) == (1 if method == "ensemble" else SMOKE.seeds)
        for scores in found:
            assert scores["rmse"] < 0.7 * constant, method
            assert all(map(math.isfinite, scores.values()))


def test_a_unit_gives_the_same_result_again(smoke):
    unit = mcbn_uci.units(SMOKE)[0]
    assert json.loads(json.dumps(mcbn_uci.work(SMOKE, unit, {}, None))) == smoke[unit.name]


def test_tables_of_unfinished_runs_have_empty_cells(smoke):
    whole, empty = mcbn_uci.tables(SMOKE, smoke), mcbn_uci.tables(SMOKE, {})
    assert [table.title for table in whole] == [table.title for table in empty]
    assert whole[0].rows[0][4] == pytest.approx(
        np.mean([r["rmse"] for r in mcbn_uci.tested_runs(SMOKE, smoke)["synthetic"]["MCBN"]])
    )
    assert empty[0].rows[0][4] is None
    assert set(mcbn_uci.figures(SMOKE, smoke)) == {"errors-against-uncertainty-MCBN", "errors-against-uncertainty-MCDO"}


def test_a_tuned_batch_size_beats_the_paper_by_two_standard_errors_or_not():
    """Published for boston: CRPS 8.50 ± 0.86, PLL 10.49 ± 1.35."""
    runs = {"boston": {"MCBN, tuned by CRPS": [{"crps_norm": v} for v in (10.0, 12.0)],
                       "MCBN, tuned by PLL": [{"pll_norm": v} for v in (7.0, 7.2)]}}  # fmt: skip
    table = tables.tuned_table(["boston", "yacht"], runs)
    assert table.rows[0][1:4] == ("8.50 ± 0.86", "11.00 ± 1.00", "no different")  # by 2.5, twice 1.32 are 2.64
    assert table.rows[0][4:] == ("10.49 ± 1.35", "7.10 ± 0.10", "worse")
    assert table.rows[1][2:4] == (None, None)


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_sweeps_have_their_own_batch_sizes_on_every_data_set(preset):
    passes, sizes = mcbn_passes.PRESETS[preset], mcbn_batch_size.PRESETS[preset]
    assert {passes.of(dataset).batch_sizes for dataset in passes.datasets} == {(128,)}
    assert all(8 in sizes.of(dataset).batch_sizes for dataset in sizes.datasets)
    assert (passes.num_samples, sizes.num_samples) == (500, 100)


def test_notes_name_every_reduction_of_a_preset():
    quick = "\n".join(mcbn_uci.notes(mcbn_uci.PRESETS["quick"]))
    for words in ("boston", "protein", "splits 2", "splits 1", "max epochs 300", "batch sizes 32 128 512", "seeds 3"):
        assert words in quick
    assert len(mcbn_uci.notes(mcbn_uci.PRESETS["paper"])) == 1


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_the_batch_size_sweep_has_every_published_cell(preset):
    config = mcbn_batch_size.PRESETS[preset]
    cells = {(unit.arguments["dataset"], unit.arguments["batch_size"]) for unit in mcbn_batch_size.units(config)}
    published = {
        (p.dataset, p.batch_size) for p in published_values() if p.table in (8, 9) and p.dataset in config.datasets
    }
    assert {("concrete", 1024), ("energy", 512), ("wine", 1024)} <= cells
    assert cells == published


def test_a_batch_as_large_as_the_data_has_no_noise_and_no_normalised_score():
    config = replace(mcbn_batch_size.PRESETS["smoke"], seeds=1, max_epochs=20)
    unit = Unit("synthetic, split 1, batch 1024", {"dataset": "synthetic", "split": 1, "batch_size": 1024})
    (scores,) = mcbn_batch_size.work(config, unit, {}, None)["runs"]
    assert (scores["crps_norm"], scores["pll_norm"]) == pytest.approx((0, 0), abs=1e-9)
    assert scores["rmse"] > 0


def test_notes_of_a_sweep_compare_with_its_own_protocol():
    said = {mcbn_batch_size: "splits 1; seeds 3; ", mcbn_passes: ""}  # the others have three splits and five seeds
    for module, words in said.items():
        assert not any("splits" in note or "boston" in note for note in module.notes(module.PRESETS["paper"]))
        quick = "\n".join(module.notes(module.PRESETS["quick"]))
        assert f"boston: {words}weight decays 0.01 0.0001; selection draws 32." in quick
        assert "dropout" not in quick


def test_cross_validation_agrees_with_networks_trained_one_by_one():
    """RMSE and epochs of two weight decays, by the plain loop, network after network."""
    protocol = UciProtocol(
        ("synthetic",), weight_decays=(1e-1, 1e-4), max_epochs=60, every=20, patience=10, selection_draws=4
    )
    folds = load_split("synthetic", 1, None).folds
    found = cross_validate(protocol, "synthetic", folds, "BN", 1000)  # all rows in a batch: no noise, MCBN is BN
    for number, decay in enumerate(protocol.weight_decays):
        by_epoch = {}
        for epochs in (20, 40, 60):
            scores = []
            for fold, part in enumerate(folds):
                network = new_network(5, "synthetic", 0.0, generator(1, "weights", fold))
                config = TrainingConfig(epochs, 1000, weight_decay=decay, seed=1)
                batches = shuffled(part.inputs, part.targets, 1000, seed=1)
                train(network, batches, supervised(half_squared_error), config)
                outputs = bb.predict(bb.population(network, part.inputs), part.others, bb.gaussian(1.0)).mean
                scores.append(float((part.in_units(outputs) - part.truth).square().mean().sqrt()))
            by_epoch[epochs] = sum(scores) / len(scores)
        best = min(by_epoch, key=lambda epochs: by_epoch[epochs])
        for way in ("MCBN", "BN"):
            assert found[way][number]["epochs"] == best
            assert found[way][number]["rmse"] == pytest.approx(by_epoch[best], rel=1e-3)


def test_training_stops_after_the_last_improvement_of_either_way():
    protocol = UciProtocol(("synthetic",), every=20, patience=2, selection_draws=4)
    history = ValidationHistory(protocol, load_split("synthetic", 1, None).folds, "BN", 32, 1)
    curve = iter([(3.0, 3.0), (2.0, 3.5), (2.5, 3.6), (2.6, 2.9), (2.7, 3.7), (2.8, 3.8)])
    history._scores = lambda stack, fold: current  # type: ignore[method-assign]
    stack = stack_networks([new_network(5, "synthetic", 0.0, generator(0, "weights", 0)) for _ in range(5)])
    numbers, ended = torch.arange(5), None

    for epoch, scores in zip(range(20, 140, 20), curve, strict=True):
        current = torch.tensor(scores, dtype=torch.float64)[:, None]
        if not history.observe(epoch, stack, numbers).any():
            ended = epoch
            break
    assert ended == 120  # the second way had its best at 80
    assert [history.best_of(way, [GridPoint(0.1, 32)])[0]["epochs"] for way in ("MCBN", "BN")] == [40, 80]


def test_of_equal_candidates_the_last_is_chosen():
    common = {"batch_size": 32, "dropout_rate": 0.0, "epochs": 20}
    found = [{"weight_decay": decay, "rmse": rmse, **common} for decay, rmse in ((1.0, 2.0), (2.0, 1.0), (3.0, 1.0))]
    assert best_candidate(found).weight_decay == 3


def test_standardisation_is_by_the_rows_that_are_trained_on():
    inputs, targets = synthetic_data(40)
    inputs[:, 4] = 7
    rows, others = np.arange(30), np.arange(30, 40)
    part = standardised(inputs, targets, rows, others)
    torch.testing.assert_close(part.inputs.mean(0), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(part.inputs.std(0, correction=0)[:4], torch.ones(4))
    assert (part.others[:, 4] == 0).all()
    np.testing.assert_allclose(part.in_units(part.targets).numpy(), targets[rows], rtol=1e-6)
    np.testing.assert_allclose(part.truth.numpy(), targets[others])


def test_networks_start_as_published():
    network = new_network(50, "protein", 0.1, generator(0, "weights", 0))
    weight, bias = network.hidden[0].linear.weight, network.hidden[0].linear.bias
    assert weight.shape == (100, 50)
    assert weight.abs().max() <= 0.2
    assert float(weight.detach().std()) == pytest.approx(0.088, rel=0.05)
    assert (bias >= 0).all()
    assert new_network(5, "boston", 0.0, generator(0, "weights", 0)).hidden[0].norm.eps == 1e-10


def test_final_networks_are_those_of_the_plain_loop():
    part = load_split("synthetic", 1, None).whole
    (network,) = train_candidate("synthetic", [part], GridPoint(1e-3, 32, 0.05, 10), [3], ["whole"])
    alone = new_network(5, "synthetic", 0.05, generator(3, "weights", "whole"))
    batches, config = shuffled(part.inputs, part.targets, 32, seed=3), TrainingConfig(10, 32, weight_decay=1e-3, seed=3)
    train(alone, batches, supervised(half_squared_error), config)
    for ours, theirs in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def normal(source, *shape):
    return torch.randn(shape, generator=source, dtype=torch.float64)


def test_scores_against_scipy_and_sums():
    source = torch.Generator().manual_seed(0)
    drawn = DrawnPredictions(normal(source, 7, 9), normal(source, 9))
    scores = scores_of(drawn, 4.0, 0.5)
    draws, truth = drawn.draws.numpy(), drawn.truth.numpy()
    pll = np.mean(np.log(stats.norm.pdf(truth, draws, 0.5).mean(0)))
    constant = np.mean(stats.norm.logpdf(truth, draws.mean(0), 0.5**-0.5))
    optimum = np.mean(-0.5 - 0.5 * np.log(2 * np.pi) - np.log(np.abs(truth - draws.mean(0))))
    assert scores["pll"] == pytest.approx(pll)
    assert scores["pll_norm"] == pytest.approx(100 * (pll - constant) / (optimum - constant))
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((truth - draws.mean(0)) ** 2)))


@pytest.mark.parametrize("objective", ["CRPS", "PLL"])
def test_precision_is_the_best_of_a_fine_grid(objective):
    source = torch.Generator().manual_seed(1)
    folds = [DrawnPredictions(0.3 * normal(source, 5, count), normal(source, count)) for count in (20, 30)]

    def cost(tau):
        scores = [scores_of(fold, tau, 1.0) for fold in folds]
        return np.mean([s["crps"] if objective == "CRPS" else -s["pll"] for s in scores])

    tau, value = tune_fold_precision(folds, objective)
    assert value == pytest.approx(cost(tau))
    assert value <= min(cost(t) for t in np.geomspace(0.05, 50, 400)) + 1e-6
    for limits in ((2 * tau, 4 * tau), (tau / 4, tau / 2)):
        bounded, value = tune_fold_precision(folds, objective, limits)
        assert value == pytest.approx(cost(bounded))
        assert value <= min(cost(t) for t in np.geomspace(*limits, 100)) + 1e-6
        assert limits[0] <= bounded <= limits[1]


@pytest.mark.parametrize("objective", ["CRPS", "PLL"])
def test_predictions_without_error_are_refused(objective):
    exact = DrawnPredictions(torch.ones(3, 4), torch.ones(4))
    with pytest.raises(bb.BatchbayesError, match="errors whose squares are finite and not all zero"):
        tune_fold_precision([exact, exact], objective)


def test_the_published_limit_is_the_precision_if_draws_scatter_widely():
    source = torch.Generator().manual_seed(1)
    wide = DrawnPredictions(3 * normal(source, 50, 30), normal(source, 30))
    (run,) = score_runs([wide], [wide], PRECISIONS["yacht"])
    assert run["precision"] == 100
    assert 0.5 < run["constant_precision"] < 5


def test_correlated_is_what_stochastic_bn_fits():
    network = new_network(5, "synthetic", 0.0, generator(0, "weights", 0)).eval()
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    ours = correlated(bb.mcbn(network, x, batch_size=20, num_samples=16))
    theirs = bb.stochastic_bn(network, x, batch_size=20, num_samples=16, covariance="correlated")
    assert torch.equal(ours.draw(1, 2)(x[:3]), theirs.draw(1, 2)(x[:3]))


@pytest.mark.parametrize("module", [mcbn_batch_size, mcbn_passes])
def test_sweeps_run_and_fill_their_tables(module):
    config = replace(module.PRESETS["smoke"], seeds=1, max_epochs=20)
    results = run_experiment(module, config)
    for table in module.tables(config, results):
        ours = [row for row in table.rows if row[1] == "ours"]
        assert any(isinstance(cell, float) for cell in ours[0][2:])
    rows = [row for table in module.tables(config, {}) for row in table.rows]
    assert all(cell is None for row in rows if row[1] != "paper" for cell in row[2:])
    assert any(isinstance(cell, float) for row in rows if row[:2] == ("yacht", "paper") for cell in row[2:])


def test_signs_are_compared_only_if_both_are_significant():
    assert tables.verdict(-5, True, -1, True) == "agree"
    assert tables.verdict(0.1, False, -3, False) == tables.verdict(0.1, False, 3, False) == "neither significant"
    assert tables.summary([1.0, 3.0]) == (2.0, pytest.approx(1.0), 2)


def test_results_without_a_test_are_counted_separately():
    """Published for MCBN, normalised CRPS: boston 8.50, energy 5.75, wine 2.91, all significant."""
    values = {"boston": [8.0, 9.0, 8.5], "energy": [5.0], "wine": [3.0, 3.0], "power": [1.0, -1.0, 0.1]}
    runs = {dataset: {"MCBN": [{"crps_norm": v} for v in found]} for dataset, found in values.items()}
    table = tables.normalised_table("T", list(runs), runs, 4, "crps_norm")
    said = {row[0]: row[9] for row in table.rows if row[1] == "MCBN"}
    assert said == {
        "boston": "agree", "energy": "too few runs", "wine": "too few runs", "power": "ours not significant",
    }  # fmt: skip
    assert table.notes[1].startswith("1 of 4 agree with the paper in sign and significance (p < 0.05); in 2 more there")


def test_normalised_scores_have_p_values_and_differences_in_standard_errors():
    """Published for MCBN on boston, normalised CRPS: 8.50 ± 0.86, p = 4.6e-10 or so."""
    values = [8.0, 10.0, 12.0]  # 10 ± 1.155: t = 8.66 with two degrees of freedom
    table = tables.normalised_table(
        "T", ["boston"], {"boston": {"MCBN": [{"crps_norm": v} for v in values]}}, 4, "crps_norm"
    )
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["our p"] == "0.013 *"
    paper = published_value(4, "boston", "MCBN", "crps_norm")
    assert row["paper's p"] == f"{paper.p_value:.2g} ****"
    expected = (10 - 8.5) / math.sqrt(4 / 3 + 0.86**2)
    assert row["difference / s.e."] == pytest.approx(expected)
    assert table.notes[2] == "1 of 1 are within two standard errors of the paper."
    far = tables.normalised_table(
        "T", ["boston"], {"boston": {"MCBN": [{"crps_norm": v + 9} for v in values]}}, 4, "crps_norm"
    )
    assert far.notes[2] == "0 of 1 are within two standard errors of the paper."


def test_means_over_fewer_runs_say_so():
    run = {"rmse": 1.0, "crps": 2.0, "pll": 3.0, "crps_norm": 4.0}
    runs = {"boston": {"MCBN": [run] * 3, "correlated SBN": [run] * 2, "MCBN, linear": [run] * 3, "ensemble": [run]}}
    (row,) = tables.beyond_table("T", ["boston"], runs, 4, "crps_norm").rows
    assert row[2:] == ("4.00 ± 0.00", "4.00 ± 0.00", "4.00 ± 0.00 (2 runs)", None, None, "4.00 (1 run)")
    assert [row[-1] for row in tables.raw_scores_table(["boston"], runs).rows] == [3, 3, 2, 1]


def test_published_numbers_are_complete():
    assert published_value(4, "yacht", "MCBN", "crps_norm").value == -56.39
    assert published_value(8, "boston", "MCBN", "crps_norm", batch_size=1024) is None
    counts = {n: sum(p.table == n for p in published_values()) for n in range(4, 12)}
    assert counts == {4: 24, 5: 24, 6: 48, 7: 40, 8: 58, 9: 58, 10: 24, 11: 24}


@pytest.mark.shared
@pytest.mark.skipif(
    not (FOLDER and (FOLDER.parent / "reference").is_dir()), reason="needs the reference tables beside the data folder"
)
def test_published_numbers_are_those_of_the_reference_files():
    columns = {"batch_size": "batch_size", "n_passes": "passes"}
    for number in range(4, 12):
        with (FOLDER.parent / "reference" / f"mcbn_table{number}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                dataset = next(name for name in mcbn_uci.DATASETS if row["dataset"].startswith(name))
                options = {ours: int(row[theirs]) for theirs, ours in columns.items() if row.get(theirs)}
                found = published_value(number, dataset, row["method"], row["metric"], **options)
                assert (found and found.value) == (float(row["value"]) if row["value"] else None)


def test_a_tuned_batch_size_scales_variances_by_one_over_m() -> None:
    """As in the paper, sigma^2 / M, also above the number of rows: M is a scale of the noise here."""
    torch.manual_seed(0)
    network, inputs = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)), torch.randn(50, 2)
    network(inputs)
    fitted = bb.mcbn(network, inputs, batch_size=20, num_samples=8, center="batches")
    for size in (5, 80):
        torch.testing.assert_close(at_effective_batch_size(fitted, size).omega_var(), fitted.omega_var() * 20 / size)
