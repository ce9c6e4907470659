"""The experiments on images: their smallest presets, and each measure against something simpler."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from batchbayes_papers.data.camvid import camvid_frames
from batchbayes_papers.data.cifar10 import load_cifar10
from batchbayes_papers.mcbn import camvid, cifar, frame_sums
from batchbayes_papers.mcbn.novelty_map import fit_novelty_map
from batchbayes_papers.mcbn.query import FRESH, INSIDE, SHARED, fresh_logits, same_marginals
from batchbayes_papers.models.atanov import AtanovLeNet5, ResNet18
from batchbayes_papers.models.pretrained import cifar_resnet
from batchbayes_papers.runner.records import pack_tensors, pack_weights, unpack_tensors
from batchbayes_papers.runner.tables import to_markdown
from batchbayes_papers.sbn import networks as sbn_networks
from batchbayes_papers.sbn import sbn
from batchbayes_papers.sbn import tables as sbn_tables
from helpers.experiments import run_experiment
from PIL import Image
from torch import nn

from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import categorical
from batchbayes.methods.batchnorm.mcbn import mcbn
from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn
from batchbayes.methods.mc_dropout import mc_dropout

FIGURES = {
    cifar: {"log-likelihood-against-passes"},
    camvid: {"maps-of-prediction-error-and-uncertainty", "uncertainty-and-wrong-pixels"},
    sbn: {"entropy-of-unknown-images"},
}


@pytest.fixture(scope="module", params=FIGURES, ids=lambda module: module.__name__.rpartition(".")[2])
def finished(request):
    module = import_module(request.param.__name__)
    return module, run_experiment(module, module.PRESETS["smoke"])


def test_tables_of_finished_and_unfinished_runs(finished):
    module, results = finished
    config = module.PRESETS["smoke"]
    for table, empty in zip(module.tables(config, results), module.tables(config, {}), strict=True):
        assert to_markdown(table)
        assert empty.columns == table.columns
        assert table.rows
    assert all(note.endswith(".") for note in module.notes(config))
    assert set(module.figures(config, results)) == FIGURES[module]


def test_a_unit_that_is_done_again_has_the_same_result(finished):
    module, results = finished
    config = module.PRESETS["smoke"]
    unit = module.units(config)[0]
    assert module.work(config, unit, {}, None) == results[unit.name]


def test_missing_data_is_named(tmp_path):
    for module, name in ((cifar, "cifar10"), (camvid, "espnet"), (sbn, "mnist")):
        config = module.PRESETS["quick"]
        with pytest.raises(BatchbayesError, match=name):
            module.work(config, module.units(config)[0], {}, tmp_path)


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "camvid").mkdir()
    (tmp_path / "camvid" / "full_360x480.zip").write_bytes(b"no archive")
    with pytest.raises(BatchbayesError, match="copy that file again"):
        next(camvid_frames("test", tmp_path))


def test_damaged_images_and_labels_are_named(tmp_path):
    (tmp_path / "cifar10").mkdir()
    mosaic, labels = tmp_path / "cifar10" / "test_batch.webp", tmp_path / "cifar10" / "labels.npz"
    mosaic.write_bytes(b"no image")
    with pytest.raises(BatchbayesError, match="test_batch"):
        load_cifar10("test", tmp_path)
    Image.new("RGB", (64, 32)).save(mosaic, lossless=True)
    labels.write_bytes(b"no labels")
    with pytest.raises(BatchbayesError, match="labels of CIFAR-10"):
        load_cifar10("test", tmp_path)


def test_damaged_tensors_are_refused():
    text = pack_tensors({"a": torch.arange(4)})
    for damaged in (text[: len(text) // 2], "?" + text, text[:20] + "AAAA" + text[24:]):
        with pytest.raises(ValueError, match="cannot be read"):
            unpack_tensors(damaged)


def test_log_likelihood_of_groups_is_that_of_a_loop():
    draws, labels = torch.randn(7, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    probs = draws.softmax(-1)
    expected = [np.mean([np.log(np.mean([probs[s, n, labels[n]] for s in group])) for group in ((0, 1, 2), (3, 4, 5))])
                for n in range(5)]  # fmt: skip
    np.testing.assert_allclose(cifar.grouped_log_likelihood(draws, labels, 3), expected)


def test_a_moving_average_is_that_of_a_loop():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).eval()
    posterior = mcbn(network, torch.randn(64, 3, 8, 8), batch_size=8, num_samples=12)
    found = cifar.moving_average(posterior, seed=5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    rows = (posterior.center + posterior.deviations)[order]
    mean, variance = rows[0, :4], (2 * rows[0, 4:]).exp()
    for row in rows[1:]:
        mean, variance = 0.9 * mean + 0.1 * row[:4], 0.9 * variance + 0.1 * (2 * row[4:]).exp()
    torch.testing.assert_close(found.center, torch.cat([mean, variance.log() / 2]))
    assert found.is_point


def test_fresh_batches_have_the_law_of_shared_ones_and_others_do_not():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    images, labels = torch.randn(20, 3, 8, 8), torch.randint(0, 3, (20,))
    train = torch.randn(400, 3, 8, 8)
    fresh = fresh_logits(mcbn(network, train, batch_size=8, num_samples=20 * 30, seed=1), images)
    assert fresh.shape == (30, 20, 3)
    shared = torch.stack([
        posterior.draw(0, s)(images) for posterior in [mcbn(network, train, batch_size=8, num_samples=200, seed=2)]
        for s in range(200)
    ]).detach()  # fmt: skip
    same = same_marginals(fresh, shared, labels)
    assert abs(same["mean_z"]) < 3 / 20**0.5  # three standard errors
    assert 0.5 < same["std_z"] < 1.6
    assert same["variance_ratio"] == pytest.approx(1, abs=0.3)
    assert same_marginals(2 * fresh, shared, labels)["variance_ratio"] > 3


def test_the_three_ways_are_in_the_table():
    ways = {name: {"pll": -0.5, "error": 0.1, "information": 0.01} for name in (INSIDE, FRESH, SHARED)}
    result = {"ways": ways, "passes": 4, "mean_z": 0.1, "std_z": 1.1, "outside_two": 0.04, "variance_ratio": 1.0}
    table = cifar.query_table(result)
    assert [row[0] for row in table.rows] == [SHARED, FRESH, INSIDE]
    assert "mean +0.10" in table.notes[0]


def predictive(height: int, width: int, draws: int = 4):
    logits = 2 * torch.randn(draws, 1, 5, height, width, generator=torch.Generator().manual_seed(1))
    summary = categorical().summary()
    summary.add(logits)
    return summary.finish(None)


def test_measures_of_frames_are_those_of_plain_pixels():
    seen, labels = predictive(12, 16), torch.randint(0, 5, (12, 16), generator=torch.Generator().manual_seed(2))
    labels[:6, :8] = 2
    total = frame_sums.frame_sums(seen, labels, ignored=4)
    found = frame_sums.measures(total, ignored=4)
    keep = (labels != 4).numpy()
    probs = seen.probs[0].numpy()[keep]
    truth, answer = labels.numpy()[keep], probs.argmax(-1)
    wrong, entropy = answer != truth, seen.entropy[0].numpy()[keep]
    overlaps = [np.sum((answer == k) & (truth == k)) / np.sum((answer == k) | (truth == k)) for k in range(4)]
    assert found["iou"] == pytest.approx(np.mean(overlaps))
    assert found["accuracy"] == pytest.approx(np.mean(~wrong))
    assert found["nll"] == pytest.approx(-np.mean(np.log(probs[np.arange(len(truth)), truth])), rel=1e-5)
    pairs = [(a > b) + 0.5 * (a == b) for a in entropy[wrong] for b in entropy[~wrong]]
    assert found["auroc"] == pytest.approx(np.mean(pairs), abs=0.01)
    most = np.argsort(-entropy)[: round(0.05 * len(entropy))]
    assert found["precision"] == pytest.approx(np.mean(wrong[most]), abs=0.1)
    assert found["recall"] == pytest.approx(0.05 * found["precision"] / np.mean(wrong))
    edge = frame_sums.near_boundary(labels).numpy()[keep]
    assert found["error_edge"] == pytest.approx(np.mean(wrong[edge]))
    assert found["entropy_inside"] == pytest.approx(np.mean(entropy[~edge]), rel=1e-5)


def test_patches_are_accurate_and_certain_or_neither():
    entropy = torch.full((8, 8), 0.1)
    wrong, keep = torch.zeros(8, 8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool)
    entropy[:4, :4], wrong[:4, :4] = 1.0, True  # not accurate and uncertain
    wrong[4:, 4:] = True  # not accurate, but certain
    keep[:4, 4:] = False  # nothing counts
    counts = frame_sums.patch_counts(entropy, wrong, keep, 2.0)
    assert counts.sum(1).tolist() == [2, 1]
    assert frame_sums.patch_accuracy_against_uncertainty(counts) == pytest.approx(2 / 3)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = torch.tensor([1.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    pairs = {"x": torch.stack([values, torch.ones(4, dtype=torch.float64)], 1)}
    found = frame_sums.with_standard_errors(pairs, lambda total: {"mean": float(total["x"][0] / total["x"][1])})
    assert found["mean"] == (pytest.approx(3.0), pytest.approx(float(values.std()) / 2))


def test_the_novelty_map_shows_the_place_that_is_unusual():
    network = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    random = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 16, 16, generator=random)
    detector = fit_novelty_map(network, lambda: images.split(2), ["1"])
    strange = images[:1].clone()
    strange[..., 4:8, 8:12] += 5
    found = detector(strange)[0]
    assert int(found.argmax()) in {16 * row + column for row in range(3, 9) for column in range(7, 13)}
    assert abs(float(detector(images).mean())) < 0.01


def test_masks_and_statistics_are_drawn_together():
    torch.manual_seed(0)
    network = AtanovLeNet5(dropout=0.5)
    network.eval()
    images = torch.rand(96, 1, 28, 28)
    statistics: Any = stochastic_bn(network, images, batch_size=16, num_samples=6)
    before = [tensor.clone() for tensor in network.state_dict().values()]
    with torch.no_grad():
        first, again = (sbn_networks.dropped_draw(network, statistics, 0)(images[:4]) for _ in range(2))
        other = sbn_networks.dropped_draw(network, statistics, 1)(images[:4])
        masks_alone = mc_dropout(network).draw(0, 0)(images[:4])
    assert torch.equal(first, again)
    for different in (other, masks_alone):
        assert not torch.allclose(first, different)
    assert all(torch.equal(a, b) for a, b in zip(before, network.state_dict().values(), strict=True))


def test_an_ensemble_is_the_mean_of_its_members_and_areas_are_those_of_the_curve():
    config = sbn.PRESETS["smoke"]
    labels = torch.tensor([0, 1])
    members = [(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.5, 0.5]])),
               (torch.tensor([[0.3, 0.7], [0.4, 0.6]]), torch.tensor([[0.9, 0.1]]))]  # fmt: skip
    results = {
        f"LeNet-5, member {k}": sbn.packed({sbn_networks.NETWORK: pair, sbn_networks.SBN: pair}, labels)
        for k, pair in enumerate(members)
    }
    seen = sbn_tables.NetworkResults("LeNet-5", sbn.units(config), results)
    ((known, unknown),) = seen.methods[sbn_networks.ENSEMBLE]
    torch.testing.assert_close(known.float(), torch.tensor([[0.6, 0.4], [0.3, 0.7]]))
    grid = torch.linspace(0, float(np.log(2)), 100_001).double()
    curve = (sbn_tables.entropies(unknown)[None] <= grid[:, None]).double().mean(1)
    assert sbn_tables.area_under_ecdf(unknown) == pytest.approx(float(curve.mean()), abs=1e-4)


def test_pooling_before_relu_is_the_same_as_after_it():
    torch.manual_seed(0)
    quick = AtanovLeNet5().eval()
    parts = dict(quick.named_children())
    x = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        h = parts["pool1"](parts["norm1"](parts["conv1"](x)).relu())
        h = parts["pool2"](parts["norm2"](parts["conv2"](h)).relu())
        h = parts["dense2"](parts["norm3"](parts["dense1"](h.flatten(1))).relu())
        torch.testing.assert_close(quick(x), h)


def test_scales_start_between_zero_and_one_and_no_norm_stands_before_the_last_mean():
    network = ResNet18(classes=5, width=8)
    scales = torch.cat([m.weight.detach() for m in network.modules() if isinstance(m, nn.BatchNorm2d)])
    assert 0 <= float(scales.min()) < 0.05
    assert float(scales.mean()) == pytest.approx(0.5, abs=0.06)
    assert len([m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]) == 17


@pytest.mark.shared
def test_known_and_unknown_classes_differ(data_folder):
    setting = sbn_networks.NetworkSetting(sbn.PRESETS["quick"].settings["VGG-11"].recipe, num_train=50, num_held_out=5,
                                      num_known=20, num_unknown=10)  # fmt: skip
    data = sbn_networks.load_sbn("VGG-11", "real", setting, data_folder)
    assert set(data.train[1].tolist()) <= set(range(5))
    assert data.known[0].shape == (20, 3, 32, 32)
    assert data.unknown.shape == (10, 3, 32, 32)
    letters = sbn_networks.load_sbn("LeNet-5", "real", setting, data_folder)
    assert letters.unknown.shape == (10, 1, 28, 28)
    assert 0 <= float(letters.unknown.min()) <= float(letters.unknown.max()) <= 1


def test_the_public_network_is_also_judged_after_fine_tuning_at_the_batch_size_of_the_paper():
    config = cifar.PRESETS["paper"]
    made = {unit.name: unit for unit in cifar.units(config)}
    assert made[f"{cifar.FINE_TUNED}, MCBN"].needs == (f"training, {cifar.FINE_TUNED}",)
    assert made[f"{cifar.PUBLIC}, MCBN"].needs == ()
    assert cifar.BATCH_SIZES[cifar.FINE_TUNED] == config.fine_tuning.batch_size == 32
    assert [table.title for table in cifar.tables(config, {})][1].endswith("fine-tuned at M = 32")
    assert not any(cifar.FINE_TUNED in unit.name for unit in cifar.units(cifar.PRESETS["quick"]))
    alone = cifar.PRESETS["fine-tuned"]
    assert all(cifar.FINE_TUNED in unit.name for unit in cifar.units(alone))
    assert [table.title for table in cifar.tables(alone, {})][-1] == "Every method with all its passes"
    assert not any("Trained here" in note for note in cifar.notes(alone))


@pytest.mark.shared
def test_a_fine_tuned_network_has_a_curve(data_folder):
    """The weights here are those of the public network itself."""
    changes = {"num_test": 16, "num_held_out": 4, "passes": (1, 2, 4), "num_population": 64, "num_train": 500}
    config = replace(cifar.PRESETS["paper"], networks=(cifar.FINE_TUNED,), **changes)
    training, unit = cifar.units(config)
    network = cifar_resnet(32, data_folder / "weights/resnet32_cifar10_akamaster.safetensors")
    curves = cifar.work(config, unit, {training.name: {"weights": pack_weights(network)}}, data_folder)
    assert {curve["network"] for curve in curves} == {cifar.FINE_TUNED}
    by_method = {curve["method"]: curve for curve in curves}
    assert by_method["MCBN"]["passes"] == (1, 2, 4)
    assert by_method["running statistics"]["accuracy"] > 0.8
