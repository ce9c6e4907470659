import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import assess_cases
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from batchbayes import BatchbayesError
from batchbayes.cli import main
from batchbayes.report.read.examples import from_tensors
from batchbayes.report.read.preprocess import Preprocessing, Standardise, resized
from batchbayes.report.read.reading import Reading
from batchbayes.report.read.sources import read_examples


@given(seed=st.integers(0, 999), rows=st.integers(1, 400), shape=st.sampled_from([(3,), (2, 5, 4)]))
def test_learnt_moments_are_those_of_all_values(seed, rows, shape):
    values = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed)) * 3 + 50
    learnt = Standardise.fit(from_tensors("x", values))  # read in batches of 128
    others = [axis for axis in range(values.ndim) if axis != 1]
    torch.testing.assert_close(torch.tensor(learnt.mean), values.double().mean(others).float())
    if rows > 1:
        torch.testing.assert_close(torch.tensor(learnt.std), values.double().var(others, correction=0).sqrt().float())


def test_a_constant_column_becomes_zero():
    values = torch.stack([torch.full((300,), 0.1), torch.arange(300.0)], 1)
    learnt = Standardise.fit(from_tensors("x", values))
    assert learnt.std[0] == 1
    assert learnt(values)[:, 0].abs().max() < 1e-7
    assert learnt(values)[:, 1].std(correction=0) == pytest.approx(1)


def test_a_mean_far_above_the_spread_is_exact():
    values = torch.arange(16_000_000.0, 16_000_010.0)[:, None]
    standardised = Standardise.fit(from_tensors("x", values))(values)
    torch.testing.assert_close(standardised[:, 0], (torch.arange(10.0) - 4.5) / 8.25**0.5)


def test_examples_are_preprocessed_when_they_are_read(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,y\n0,100,1.5\n2,300,2.5\n")
    (tmp_path / "new.csv").write_text("b,a\n500,1\n")
    train = read_examples(tmp_path / "train.csv", Reading("y"))
    learnt = Preprocessing(standardise=Standardise.fit(train))
    kept = Preprocessing.from_json(json.loads(json.dumps(learnt.to_json())))
    assert kept == learnt
    new = read_examples(tmp_path / "new.csv", Reading(schema=train.schema, preprocessing=kept))
    assert [inputs.tolist() for inputs, _ in new] == [[[0, 3]]]
    assert new.take([0]).tolist() == [[0, 3]]
    assert replace(train, preprocessing=kept).targets().tolist() == [1.5, 2.5]


def test_images_are_resized_and_then_scaled(tmp_path):
    Image.new("RGB", (8, 6), (255, 0, 51)).save(tmp_path / "1.png")
    Image.new("RGB", (5, 5), (255, 0, 51)).save(tmp_path / "2.png")
    scale = Standardise((0.5, 0.5, 0.2), (0.5, 0.25, 1))
    ((inputs, _),) = read_examples(tmp_path, Reading(preprocessing=Preprocessing((4, 3), scale)))
    assert inputs.shape == (2, 3, 4, 3)
    torch.testing.assert_close(inputs, torch.tensor([1.0, -2.0, 0.0]).reshape(1, 3, 1, 1).expand(2, 3, 4, 3))


def test_resizing_averages():
    board = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(8, 8).reshape(1, 1, 16, 16)
    assert (resized(board, (4, 4)) - 0.5).abs().max() < 0.05  # without antialiasing this would be 0 or 1
    assert resized(board, (16, 16)) is board


def test_one_number_serves_all_channels():
    assert Standardise((0.5,), (0.5,))(torch.ones(2, 3, 4, 4)).unique().tolist() == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Standardise((0.5, 0.5), (1.0,)), "as many numbers for the mean as for the std; got 2 and 1"),
        (lambda: Standardise((), ()), "as many numbers"),
        (lambda: Standardise((0.5,), (0.0,)), "a std above zero"),
        (lambda: Standardise((float("nan"),), (1.0,)), "finite numbers"),
        (lambda: Standardise((0.5,) * 3, (1.0,) * 3)(torch.zeros(2, 4)), r"3 columns or channels.*shape \(2, 4\)"),
        (lambda: Standardise((0.5,), (1.0,))(torch.zeros(2)), r"shape \(2,\)"),
        (lambda: Standardise.fit([]), "examples to learn the standardisation from; got none"),
        (lambda: Preprocessing(resize=(0, 4)), "a height and a width"),
        (lambda: Preprocessing(resize=(2.5, 4)), "a height and a width"),
        (lambda: Preprocessing(resize=(2, 4))(torch.zeros(3, 5)), r"images .* to resize; got shape \(3, 5\)"),
        (lambda: Preprocessing.from_json({}), "description of a preprocessing"),
        (lambda: Preprocessing.from_json({"resize": 3, "mean": None, "std": None}), "description of a preprocessing"),
        (lambda: Preprocessing.from_json({"resize": [3], "mean": None, "std": None}), "a height and a width"),
        (lambda: Preprocessing.from_json({"resize": None, "mean": [1], "std": None}), "as many numbers"),
        (lambda: Preprocessing.from_json({"resize": None, "mean": ["a"], "std": [1]}), "description of"),
    ],
)
def test_what_cannot_be_done_is_refused(make, message):
    with pytest.raises(BatchbayesError, match=message):
        make()


def test_a_mean_from_0_to_255_is_refused_for_images(tmp_path):
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "1.png")
    scale = Preprocessing(standardise=Standardise((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)))
    with pytest.raises(BatchbayesError, match=r"images with values from 0 to 1; got a mean \(123.7.*divide .* by 255"):
        read_examples(tmp_path, Reading(preprocessing=scale))


def command(*words):
    assert main([*map(str, words), "--quiet"]) == 0


def test_a_network_of_standardised_targets_answers_in_the_unit_of_the_targets(tmp_path):
    """Assess, predict and export: outputs times the std of the training targets, plus their mean."""
    words = assess_cases.write_case("regression", tmp_path)
    targets = {}
    for name, count, seed in (("train", 300, 0), ("test", 240, 1)):
        x, targets[name] = assess_cases.wave(count, seed)
        targets[name] = 1000 * targets[name] + 5000
        assess_cases.write_csv(tmp_path / f"{name}.csv", x, targets[name])
    other = {k: v + (0.01 if v.is_floating_point() else 0) for k, v in assess_cases.trained("regression").items()}
    save_file(other, tmp_path / "other.safetensors")
    at = words.index("--weights") + 2
    words[at:at] = [str(tmp_path / "other.safetensors")]
    recommended = ("--standardise-targets", "--recommend", "deterministic", "--no-figures")
    command("assess", *words, *recommended, "--out", tmp_path / "out")
    model = ["--model", "helpers.assess_cases:regressor", "--weights", tmp_path / "weights.safetensors"]
    model += ["--posterior", tmp_path / "out" / "posterior.safetensors", "--input", tmp_path / "test.csv"]
    command("predict", *model, "--out", tmp_path / "new.csv")

    network = assess_cases.regressor()
    network.load_state_dict(assess_cases.trained("regression"))
    with torch.no_grad():
        outputs = network.eval()(x).double().flatten()
    wanted = outputs * targets["train"].double().std(correction=0) + targets["train"].double().mean()
    rows = assess_cases.rows_in(tmp_path / "new.csv")
    assert [float(row["mean"]) for row in rows] == pytest.approx(wanted.tolist(), rel=1e-5)
    inside = [float(r["lower"]) <= y <= float(r["upper"]) for r, y in zip(rows, targets["test"].tolist(), strict=True)]
    assert sum(inside) > 0.8 * len(inside)

    options = ["export", *model, "--out", tmp_path / "a.pt2"]
    command(*options)
    exported = torch.export.load(tmp_path / "a.pt2").module()(x)
    assert exported["pred_mean"].flatten().tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_what_has_no_values_has_no_scale_of_targets(tmp_path, capsys):
    words = assess_cases.write_case("classification", tmp_path)
    for change, message in (
        ((), "values in the target column of train.npz, for --standardise-targets; got names of classes"),
        (("--task", "classification"), "a training file with values .*; got --task classification"),
        (("--train", "helpers.assess_cases:scene_training"), "a training file .*; got helpers.assess_cases"),
    ):
        assert main([*map(str, ["assess", *words, "--standardise-targets", "--out", tmp_path / "out", *change])]) == 2
        assert re.search(message, capsys.readouterr().err)
