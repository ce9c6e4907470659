from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from batchbayes_papers.data import mnist
from batchbayes_papers.image_networks import Course
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.sbn import batch_size_collapse as collapse
from batchbayes_papers.sbn import collapse_networks as networks
from batchbayes_papers.sbn.collapse_networks import AS_TRAINED, DETERMINISTIC, REFITTED, TUNED, CollapseRow
from helpers.experiments import run_experiment

import batchbayes as bb

SMOKE = collapse.PRESETS["smoke"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_experiment(collapse, SMOKE)


@pytest.fixture(scope="module")
def rows(results: dict[str, Any]) -> list[CollapseRow]:
    return collapse.collapse_rows(SMOKE, results, "synthetic")


def chosen(rows: list[CollapseRow], batch_size: int, method: str) -> CollapseRow:
    return next(row for row in rows if (row.batch_size, row.method) == (batch_size, method))


def test_each_network_has_four_methods(rows: list[CollapseRow]) -> None:
    assert [(row.batch_size, row.method) for row in rows] == [
        (size, method) for size in (16, 256) for method in networks.METHODS
    ]


def test_at_the_smallest_batch_size_both_ways_of_tuning_are_the_same(rows: list[CollapseRow]) -> None:
    assert chosen(rows, 16, REFITTED) == replace(chosen(rows, 16, TUNED), method=REFITTED)
    scaled, refitted = chosen(rows, 256, TUNED), chosen(rows, 256, REFITTED)
    assert refitted.noise_batch_size != scaled.noise_batch_size
    assert refitted.information_out == pytest.approx(scaled.information_out, rel=0.5)


def test_mutual_information_collapses_with_the_batch_size(rows: list[CollapseRow]) -> None:
    small, large = chosen(rows, 16, AS_TRAINED), chosen(rows, 256, AS_TRAINED)
    assert (small.noise_batch_size, large.noise_batch_size) == (16, 256)
    for name in ("information_in", "information_out"):
        assert getattr(large, name) < 0.1 * getattr(small, name)


def test_tuning_restores_mutual_information_and_improves_the_likelihood(rows: list[CollapseRow]) -> None:
    as_trained, tuned = chosen(rows, 256, AS_TRAINED), chosen(rows, 256, TUNED)
    assert tuned.noise_batch_size is not None
    assert tuned.noise_batch_size < 32
    assert tuned.information_out > 10 * as_trained.information_out
    assert tuned.information_out > tuned.information_in
    assert tuned.nll < as_trained.nll


def test_the_network_without_noise_has_no_mutual_information(rows: list[CollapseRow]) -> None:
    for row in rows:
        if row.method == DETERMINISTIC:
            assert (row.information_in, row.information_out, row.auroc_information) == (None, None, None)
            assert row.accuracy > 0.5


def test_table_and_figure_show_every_row(results: dict[str, Any], rows: list[CollapseRow]) -> None:
    (table,) = collapse.tables(SMOKE, results)
    assert [cells[:2] for cells in table.rows] == [(row.batch_size, row.method) for row in rows]
    assert [cells[4] for cells in table.rows] == [row.nll for row in rows]
    as_trained, tuned, _, auroc = collapse.figures(SMOKE, results)[
        "mutual-information-against-batch-size-on-synthetic"
    ].axes
    outside, inside = (line.get_ydata() for line in tuned.get_lines())
    assert list(outside) == [chosen(rows, size, TUNED).information_out for size in (16, 256)]
    assert list(inside) == [chosen(rows, size, TUNED).information_in for size in (16, 256)]
    assert as_trained.get_ylim() == tuned.get_ylim()
    assert [line.get_ydata()[1] for line in auroc.get_lines()] == [  # type: ignore[index]
        *(chosen(rows, 256, method).auroc_information for method in (AS_TRAINED, TUNED, REFITTED)),
        chosen(rows, 256, DETERMINISTIC).auroc_novelty,
    ]


def test_a_table_of_an_unfinished_run_has_empty_cells(results: dict[str, Any]) -> None:
    (table,) = collapse.tables(SMOKE, {"synthetic, seed 0, M = 16": results["synthetic, seed 0, M = 16"]})
    assert table.notes == ()
    assert [cells[3] is None for cells in table.rows] == [False] * 4 + [True] * 4
    assert collapse.tables(SMOKE, {})[0].rows[0] == (16, DETERMINISTIC, "", *[None] * 7, "", None)


def test_largest_and_smallest_batch_sizes_are_compared_for_each_seed() -> None:
    def record(seed: int, batch_size: int, method: str, auroc: float) -> dict[str, Any]:
        return asdict(CollapseRow(seed, batch_size, 0.1, method, 8.0, 0.1, 0.9, 0.3, 0.1, 0.2, auroc, 0.8))

    config = replace(SMOKE, seeds=(0, 1), batch_sizes=(8, 64))
    results = {
        f"synthetic, seed {seed}, M = {size}": [
            record(seed, size, method, auroc + 0.01 * seed * (size == 64)) for method, auroc in pairs
        ]
        for seed in (0, 1)
        for size, pairs in (
            (8, ((AS_TRAINED, 0.8), (TUNED, 0.9), (REFITTED, 0.9))),
            (64, ((AS_TRAINED, 0.1), (TUNED, 0.85), (REFITTED, 0.87))),
        )
    }
    (table,) = collapse.tables(config, results)
    assert [note.removeprefix("AUROC by MI, ") for note in table.notes] == [
        "tuned MCBN at M = 64 minus MCBN at M = 8: +0.055 (+0.050 +0.060)",
        "tuned MCBN at M = 64 minus tuned MCBN at M = 8: -0.045 (-0.050 -0.040)",
        "tuned MCBN, small batches at M = 64 minus MCBN at M = 8: +0.075 (+0.070 +0.080)",
        "tuned MCBN, small batches at M = 64 minus tuned MCBN at M = 8: -0.025 (-0.030 -0.020)",
    ]
    line = "| 8 | MCBN | 8 | 0.900 | 0.300 | 0.1 | 0.2 | 0.800 | 0.800 |  | 0.800 0.800 | 10% |"
    assert line in to_markdown(table)


def test_training_and_held_out_images_differ() -> None:
    data = networks.load_images(collapse.PRESETS["smoke"], seed=3)
    assert [len(part[0]) for part in (data.train, data.held_out, data.test)] == [512, 200, 100]
    every = torch.cat([data.train[0], data.held_out[0], data.test[0]]).flatten(1)
    assert len(every.unique(dim=0)) == 812
    assert torch.equal(data.strange.flatten(1).sort(1).values, data.test[0].flatten(1).sort(1).values)


def test_images_show_the_patterns_of_their_labels() -> None:
    images, labels = mnist.noisy_patterns(4000, seed=0, part="train")
    other, other_labels = mnist.noisy_patterns(4000, seed=0, part="test")
    for label in (0, 7):
        first, second = images[labels == label].mean(0), other[other_labels == label].mean(0)  # of 400: noise of 0.3
        assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1] > 0.8


def test_bytes_are_scaled_by_the_moments_of_the_training_images() -> None:
    black, white = mnist.scale_pixels(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    assert (black, white) == (pytest.approx(-0.2860 / 0.3530), pytest.approx(0.7140 / 0.3530))


@pytest.mark.shared
def test_fashion_images_of_a_seed(data_folder) -> None:
    data = networks.load_images(collapse.PRESETS["quick"].of("fashion"), 0, data_folder)
    assert data.train[0].shape[1:] == data.strange.shape[1:] == (1, 28, 28)
    assert abs(float(data.train[0].mean())) < 0.02
    assert float(data.train[0].std()) == pytest.approx(1, abs=0.02)


@pytest.mark.shared
def test_colour_images_of_a_seed(data_folder) -> None:
    config = replace(collapse.PRESETS["quick"].of("cifar10"), num_train=300, num_held_out=50, num_test=40)
    data = networks.load_images(config, 0, data_folder)
    assert data.pixels is not None
    assert data.pixels.shape == data.train[0].shape == (300, 3, 32, 32)
    assert data.strange.shape == data.test[0].shape == (40, 3, 32, 32)
    assert float(data.train[0].std()) == pytest.approx(1, abs=0.2)


def test_each_data_set_has_settings_and_published_values_of_its_own() -> None:
    config = collapse.PRESETS["quick"]
    assert config.of("fashion").seeds == (0, 1, 2, 3, 4)
    assert config.of("cifar10").batch_sizes == (32, 64, 128, 256, 512)
    titles = [table.title for table in collapse.tables(config, {})]
    assert sum("Table 1" in title for title in titles) == 4
    accuracy = collapse.tables(config, {})[-1]
    assert (512, None, 0.9545, None) in accuracy.rows
    assert len(collapse.units(config)) == 20 + (1 + 7) + 2 * 5
    assert [config.of(name).depth for name in ("cifar10", "cifar10-deeper")] == [20, 32]


def residual(**changes: Any) -> networks.CollapseConfig:
    """Return the settings of a small ResNet for made-up grey images."""
    return replace(SMOKE, datasets=("fashion-resnet",), depth=8, epochs=1, **changes)


def test_half_precision_trains_to_about_the_same_loss() -> None:
    data, losses = networks.load_images(SMOKE, seed=0), []
    for half in (False, True):
        config = residual(bfloat16=half)
        losses.append(networks.train_network(config, 0, 32, data, networks.new_network(config, 0)))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_a_residual_network_is_trained_in_place_and_scored() -> None:
    config = residual(refit=False)
    data = networks.load_images(SMOKE, seed=0)
    network, untouched = (networks.new_network(config, 0) for _ in range(2))
    rows = networks.network_rows(config, 0, 16, data, network)
    assert [row.method for row in rows] == [DETERMINISTIC, AS_TRAINED, TUNED]
    inputs = data.test[0]
    assert not torch.allclose(network.eval()(inputs), untouched.eval()(inputs))
    assert rows[1].information_out is not None


@pytest.mark.filterwarnings("ignore::batchbayes.BatchbayesWarning")
def test_networks_of_all_batch_sizes_begin_with_one_that_was_trained_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "load_images", lambda config, seed, folder: networks.load_images(SMOKE, seed))
    config = residual(refit=False, learning_rate=0.0, start=Course(5, 16, 0.05))
    start, small, large = collapse.units(config)
    assert small.needs == large.needs == (start.name,)
    results = run_experiment(collapse, config)
    losses = [row.training_loss for row in collapse.collapse_rows(config, results, "fashion-resnet")]
    fresh = networks.train_network(config, 0, 16, networks.load_images(SMOKE, 0), networks.new_network(config, 0))
    assert len(losses) == 6  # three methods at each size; the start has no row
    assert max(losses) < 0.7 * fresh  # a learning rate of zero keeps the weights of the start
    assert "trained for 5 epochs at M = 16" in collapse.notes(config)[0]


@pytest.mark.shared
def test_fine_tuning_begins_with_the_public_network(data_folder) -> None:
    config = replace(collapse.PRESETS["quick"].of("cifar10"), num_train=64, num_held_out=20, num_test=200)
    data = networks.load_images(config, 0, data_folder)
    network = networks.new_network(config, 0, data_folder)
    assert networks.measure(bb.deterministic(network), 1, 0, data)["accuracy"] > 0.88
    assert networks.train_network(config, 0, 32, data, network) < 1.0
