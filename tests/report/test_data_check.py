"""Data that is not prepared as in training is called so, first; data that is right is not."""

import json

import numpy as np
import pytest
import torch
from helpers import assess_cases
from torch import nn

from batchbayes import cli
from batchbayes.methods.batchnorm.like_training import LEVEL, LOOSE, STRICT, difference, shifts
from batchbayes.report.read.data_check import MARGIN, NORMALISED, Sight, is_closer, unfamiliar
from batchbayes.report.read.examples import Examples, from_tensors


@pytest.fixture(scope="module")
def network():
    made = assess_cases.regressor()
    made.load_state_dict(assess_cases.trained("regression"))
    return made


def said(network, inputs, classes=False):
    return unfamiliar(network, from_tensors("rows", inputs), classes=classes) or ""


@pytest.mark.parametrize("count", [12, 40, 240, 2000])
def test_no_alarm_on_data_like_that_of_training(count, network):
    assert [said(network, assess_cases.wave(count, seed)[0]) for seed in range(1, 41)] == [""] * 40


@pytest.mark.parametrize("tolerance", [LOOSE, STRICT])
@pytest.mark.parametrize("edge", ["shift", "large", "small"])
def test_the_rate_of_false_alarms_at_the_edge_of_what_is_tolerated(edge, tolerance):
    """The worst case that is no alarm: the true difference is exactly the tolerance."""
    random, alarms, trials = torch.Generator().manual_seed(0), 0, 2000
    scale = {"shift": 1.0, "large": tolerance.spread**0.5, "small": tolerance.spread**-0.5}[edge]
    for _ in range(trials):
        values = scale * torch.randn(60, 16, generator=random, dtype=torch.float64)
        values += tolerance.shift if edge == "shift" else 0
        found = difference(values, values.square(), tolerance)
        alarms += found is not None and ("lie" in found) == (edge == "shift")
    assert alarms / trials <= LEVEL + 4 * (LEVEL / trials) ** 0.5  # four standard errors


def test_one_channel_that_is_far_away_is_enough():
    random = torch.Generator().manual_seed(0)
    values = torch.randn(300, 30, generator=random, dtype=torch.float64)
    assert difference(values, values.square(), LOOSE) is None
    values[:, 7] -= 1
    assert shifts(values).mean() < LOOSE.shift
    assert "lie up to 1" in (difference(values, values.square(), LOOSE) or "")


def test_shifts_are_a_naive_loop():
    means = torch.randn(7, 4, dtype=torch.float64) + 1
    found = shifts(means)
    for i in range(7):
        rest = torch.cat([means[:i], means[i + 1 :]]).mean(0)
        assert found[i] == pytest.approx(float(means[i] @ rest / rest.norm() / 2), abs=1e-12)


CHANGES = {"100 times": lambda x: 100 * x, "divided": lambda x: x / 10, "moved": lambda x: x + 1.5,
           "three times": lambda x: 3 * x}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_data_on_another_scale_is_noticed(change, network):
    for seed in range(1, 41):
        inputs, _ = assess_cases.wave(100, seed)
        assert "Check the preprocessing first" in said(network, CHANGES[change](inputs))


def test_an_epsilon_above_the_variance_and_a_dead_channel_are_no_alarm():
    """Some networks divide inputs by 255 twice, so that their first variance is far below epsilon."""
    layer = nn.BatchNorm1d(3, eps=1e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        layer(1e-3 * torch.randn(32, 3, generator=random) * torch.tensor([1.0, 1.0, 0.0]))
    inputs = 1e-3 * torch.randn(100, 3, generator=random) * torch.tensor([1.0, 1.0, 0.0])
    assert said(layer.eval(), inputs) == ""
    assert "spread 2" in said(layer, 255 * inputs)
    assert "standard deviations away" in said(layer, inputs + 1e-3)
    inputs[0, 2] = 1e-3  # what never varied in training has no scale
    assert said(layer, inputs) == ""
    layer.running_var.zero_()
    assert said(layer, 255 * inputs) == ""  # nothing to compare with


def test_few_examples_and_networks_that_cannot_tell_are_not_judged(network):
    inputs, _ = assess_cases.wave(9, 1)
    assert said(network, 100 * inputs) == ""
    assert said(assess_cases.with_dropout(), 100 * assess_cases.blobs(100, 1)[0], classes=True) == ""
    assert said(assess_cases.regressor(), 100 * assess_cases.wave(100, 1)[0]) == ""  # never trained


def test_all_of_the_data_is_looked_at(network):
    """Files are often sorted. The first rows alone would be an alarm."""
    inputs, _ = assess_cases.wave(4000, 1)
    inputs = inputs[inputs.sum(1).argsort()]
    assert said(network, inputs[:400]) != ""
    assert said(network, inputs) == ""


# Colours


def photos(count, seed):
    """Images with more red than blue, three classes by their brightest colour."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=random)
    images = 0.5 * torch.randn(count, 3, 8, 8, generator=random) + torch.tensor([0.4, 0.0, -0.4])[:, None, None]
    images[torch.arange(count), labels] += 0.8
    return images, labels


@pytest.fixture(scope="module")
def seer():
    torch.manual_seed(0)
    blocks = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    adam = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(80):
        images, labels = photos(64, 1000 + step)
        adam.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        adam.step()
    return network.eval()


def test_colour_channels_in_the_wrong_order_are_noticed(seer):
    for seed in range(20):
        images, _ = photos(150, seed)
        assert said(seer, images, classes=True) == ""
        assert "wrong order (RGB or BGR)" in said(seer, images.flip(1), classes=True)


@pytest.mark.parametrize(("mean", "std"), NORMALISED, ids=["none", "ImageNet", "CIFAR-10"])
def test_a_wrong_order_before_the_normalisation_is_noticed(mean, std, seer):
    """The usual mistake: a file is read as BGR, and then normalised by constants for RGB."""
    shift, scale = (torch.tensor(numbers)[:, None, None] for numbers in (mean, std))
    images, _ = photos(150, 0)
    read = images * scale + shift
    assert said(seer, (read - shift) / scale, classes=True) == ""
    assert "wrong order (RGB or BGR)" in said(seer, (read.flip(1) - shift) / scale, classes=True)


def test_grey_images_and_a_network_without_classes(seer):
    images, _ = photos(150, 0)
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    assert "wrong order" not in said(seer, grey, classes=True)
    assert "wrong order" in said(seer, images.flip(1), classes=False)


def test_one_class_may_look_closer_but_the_network_must_not_be_less_sure():
    random = torch.Generator().manual_seed(0)
    near, far = (torch.randn(200, 4, generator=random, dtype=torch.float64) + shift for shift in (0.1, 0.3))
    sure, unsure = torch.zeros(200, dtype=torch.float64), torch.ones(200, dtype=torch.float64)
    assert is_closer(Sight(near, near.square(), sure), Sight(far, far.square(), unsure))
    assert is_closer(Sight(near, near.square(), sure), Sight(far, far.square(), sure))
    assert not is_closer(Sight(near, near.square(), unsure), Sight(far, far.square(), sure))
    assert not is_closer(Sight(far, far.square(), sure), Sight(near, near.square(), unsure))
    assert MARGIN > 1
    assert not is_closer(Sight(far, far.square(), sure), Sight(far, far.square(), unsure))


def test_a_layer_that_not_all_batches_reach_is_not_judged():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.rare = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.rare(x) if x.mean() > 0 else self.norm(x)

    network = Routed()
    for layer in (network.norm, network.rare):
        layer.running_var += 1
    data = Examples("rows", [torch.randn(20, 2) - 5, torch.randn(20, 2) + 5])
    assert unfamiliar(network.eval(), data, classes=False) is None


def test_one_logit_without_an_axis_of_its_own(network):
    class Flat(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, 0]

    assert said(Flat(network), assess_cases.wave(100, 1)[0], classes=True) == ""


def test_it_is_said_first_in_the_verdict_and_by_predict(tmp_path, capsys):
    arguments = assess_cases.write_case("classification", tmp_path)
    x, y = assess_cases.blobs(240, 1)
    np.savez(tmp_path / "test.npz", X=100 * x.numpy(), y=y.numpy())
    assert cli.main(["assess", *arguments, "--out", str(tmp_path / "out")]) == 0
    verdict = json.loads((tmp_path / "out" / "metrics.json").read_text())["verdict"]
    assert verdict["headline"].startswith("WARNING: this data does not look like the training data.")
    assert next(iter(verdict)) == "headline"
    capsys.readouterr()
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    given = ["--model", options["--model"], "--weights", options["--weights"], "--input", str(tmp_path / "test.npz")]
    assert cli.main(["predict", *given, "--posterior", str(tmp_path / "out" / "posterior.safetensors")]) == 0
    assert "does not look like the training data" in capsys.readouterr().err
