"""Data that is not scaled as in training is called so, first; data that is right is not."""

import json

import numpy as np
import pytest
import torch
from helpers import assess_cases

from batchbayes import cli
from batchbayes.assessment.familiar import FALSE_ALARMS, SHIFT, SPREAD, excess, unfamiliar


@pytest.fixture(scope="module")
def network():
    made = assess_cases.regressor()
    made.load_state_dict(assess_cases.trained("regression"))
    return made


@pytest.mark.parametrize("count", [40, 240, 2000])
def test_no_alarm_on_data_like_that_of_training(count, network):
    said = [unfamiliar(network, [assess_cases.wave(count, seed)]) for seed in range(1, 41)]
    assert said == [None] * 40


def test_the_rate_of_false_alarms_at_the_edge_of_what_is_tolerated():
    random = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(1000):
        values = torch.randn(100, 16, generator=random, dtype=torch.float64) + SHIFT
        shift, ratio = excess(values, values.square())
        alarms += shift > SHIFT or not 1 / SPREAD <= ratio <= SPREAD
    assert alarms / 1000 <= 2 * FALSE_ALARMS


CHANGES = {"100 times": lambda x: 100 * x, "divided": lambda x: x / 10, "moved": lambda x: x + 3,
           "three times": lambda x: 3 * x}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_data_on_another_scale_is_noticed(change, network):
    for seed in range(1, 41):
        inputs, targets = assess_cases.wave(100, seed)
        assert "not look like the training data" in (unfamiliar(network, [(CHANGES[change](inputs), targets)]) or "")


def test_few_examples_and_networks_without_batch_norm_are_not_judged(network):
    inputs, targets = assess_cases.wave(20, 1)
    assert unfamiliar(network, [(100 * inputs, targets)]) is None
    assert unfamiliar(assess_cases.with_dropout(), [assess_cases.blobs(100, 1)]) is None


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
