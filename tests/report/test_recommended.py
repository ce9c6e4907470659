"""What is recommended is what is saved: `batchbayes predict` says exactly what the assessment said, whoever wins."""

import json
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers import assess_cases
from PIL import Image
from safetensors.torch import save_file

import batchbayes as bb
from batchbayes import cli
from batchbayes.methods.table import METHODS

NEEDS_TARGETS = {"target", "target_2", "accuracy", "error_rate"}
JITTER = ("--views", "jitter:0.05")
WINNERS = [
    ("classification", "deterministic", ("--method", "none")),
    ("classification", "temperature scaling", ("--method", "none")),
    ("classification", "4 views + temperature", ("--method", "none", *JITTER)),
    ("classification", "16 views", ("--method", "none", *JITTER)),
    ("classification", "MCBN, M = 16", ()),
    ("classification", "MCBN tuned + temperature", ("--engine", "linear")),
    ("classification", "MCBN tuned with 8 views + temperature", (*JITTER, "--budget", "8")),
    ("classification", "Stochastic BN tuned", ("--method", "stochastic-bn")),
    ("classification", "Correlated BN, M = 16", ("--method", "correlated-bn")),
    ("classification", "Variational + temperature", ("--method", "variational")),
    ("classification", "Last-layer Laplace + temperature", ("--method", "last-layer-laplace")),
    ("pictures", "4 views", ("--method", "none")),
    ("pictures", "MCBN with 16 views + temperature", ()),
    ("binary", "temperature scaling", ("--method", "none")),
    ("binary", "MCBN with 16 views + temperature", JITTER),
    ("regression", "deterministic", ("--method", "none")),
    ("regression", "16 views", ("--method", "none", *JITTER)),
    ("regression", "MCBN tuned", ()),
    ("regression", "MCBN with 16 views", JITTER),
    ("regression", "Last-layer Laplace", ("--method", "last-layer-laplace")),
    ("two outputs", "deterministic", ("--method", "none")),
    ("two outputs", "MCBN tuned", ()),
    ("segmentation", "2 views + temperature", ("--method", "none")),
    ("segmentation", "MCBN tuned", ()),
    ("segmentation", "MCBN with 16 views", ()),
]
DRAWN = {"classification": "mutual_information", "pictures": "mutual_information",
         "binary": "mutual_information", "segmentation": "mutual_information",
         "regression": "epistemic_std", "two outputs": "epistemic_std_2"}  # fmt: skip


@pytest.fixture
def forgotten_toy():
    """Forget the toy method before and after the test, as if its module had never been imported."""

    def forget():
        METHODS.pop("ripple", None)
        sys.modules.pop("helpers.toy_method", None)

    forget()
    yield forget
    forget()


def assess(folder, arguments, winner=None):
    """Assess, and let the simplest contender whose name starts so win. Figures are left out, to save time."""
    wanted = [] if winner is None else ["--recommend", winner]
    assert cli.main(["assess", *arguments, *wanted, "--no-figures", "--out", str(folder / "out")]) == 0
    return json.loads((folder / "out" / "metrics.json").read_text()), assess_cases.rows_in(
        folder / "out" / "predictions.csv"
    )


def predict(folder, arguments, source, *more):
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    given = ["--model", options["--model"], "--posterior", str(folder / "out" / "posterior.safetensors"), *more]
    given += ["--weights", options["--weights"]] if "--weights" in options else []
    given += ["--target", options["--target"]] if "--target" in options else []
    out = folder / f"predicted-{source}.csv"
    code = cli.main(["predict", *given, "--input", options[f"--{source}"], "--out", str(out), "--quiet"])
    return assess_cases.rows_in(out) if code == 0 else code


def assert_same_text(told, new):
    """The rows of an assessment are among those of the whole file, letter by letter."""
    assert told
    for row in told:
        same = new[int(row["row"])]
        assert list(same) == list(row)
        assert {key: same[key] for key in row.keys() - NEEDS_TARGETS - {"source"}} == {
            key: row[key] for key in row.keys() - NEEDS_TARGETS - {"source"}
        }
        assert same["source"] == "new"
        assert all(same[key] == "" for key in NEEDS_TARGETS & same.keys())


@pytest.mark.parametrize(("task", "name", "options"), WINNERS, ids=[f"{task}: {name}" for task, name, _ in WINNERS])
def test_predict_says_what_the_assessment_said(task, name, options, tmp_path):
    arguments = assess_cases.write_case(task, tmp_path)
    metrics, rows = assess(tmp_path, [*arguments[:-1], *options, "--quiet"], name)
    assert metrics["recommended"].startswith(name)
    new = predict(tmp_path, arguments, "test")
    assert len(new) == (18 if task == "segmentation" else 240)
    assert_same_text([row for row in rows if row["source"] == "test"], new)
    if "--ood" in arguments:
        assert_same_text([row for row in rows if row["source"] == "ood"], predict(tmp_path, arguments, "ood"))
    is_point = name in ("deterministic", "temperature scaling") or name.startswith(("4 views", "2 views"))
    assert [row[DRAWN[task]] == "" for row in rows] == [is_point] * len(rows)
    assert [row["novelty"] == "" for row in rows] == [task == "segmentation"] * len(rows)  # 32 scenes are too few


def as_csv(folder, x, y):
    assess_cases.write_csv(folder.with_suffix(".csv"), x, y)
    return folder.with_suffix(".csv")


def as_npz(folder, x, y):
    np.savez(folder.with_suffix(".npz"), X=x.numpy(), height=y.numpy())
    return folder.with_suffix(".npz")


def as_parquet(folder, x, y):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = dict(zip(("left", "right", "height"), (*x.T.numpy(), y.numpy()), strict=True))
    parquet.write_table(pyarrow.table(columns), folder.with_suffix(".parquet"))
    return folder.with_suffix(".parquet")


@pytest.mark.parametrize("write", [as_csv, as_npz, as_parquet])
def test_any_kind_of_table(write, tmp_path):
    """Folders of images are in test_sources.py, functions and arrays without names are above."""
    save_file(assess_cases.trained("regression"), tmp_path / "weights.safetensors")
    files = {name: write(tmp_path / name, *assess_cases.wave(120, seed)) for seed, name in enumerate(("train", "test"))}
    arguments = ["--model", "helpers.assess_cases:regressor", "--weights", str(tmp_path / "weights.safetensors")]
    arguments += ["--target", "height"] + [word for name, file in files.items() for word in (f"--{name}", str(file))]
    _, rows = assess(tmp_path, [*arguments, "--batch-size", "16", "--draws", "6", "--quiet"], "MCBN")
    assert_same_text(rows, predict(tmp_path, arguments, "test"))


def write_scenes(folder, count, seed):
    """Write images and masks of scenes to the two sub-folders that `assess` knows."""
    for i, (image, mask) in enumerate(zip(*assess_cases.scenes(count, seed), strict=True)):
        for name, pixels in (("images", (40 * image + 100).clamp(0, 255).movedim(0, -1)), ("masks", mask)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy().astype(np.uint8)).save(folder / name / f"scene_{i:02}.png")
    return str(folder)


def test_folders_of_images_and_masks(tmp_path):
    files = {name: write_scenes(tmp_path / name, 16, seed) for seed, name in enumerate(("train", "test"))}
    save_file(assess_cases.trained("segmentation"), tmp_path / "weights.safetensors")
    arguments = ["--model", "helpers.assess_cases:segmenter", "--weights", str(tmp_path / "weights.safetensors")]
    arguments += [word for name, file in files.items() for word in (f"--{name}", file)]
    scale = ["--mean", f"{100 / 255}", "--std", f"{40 / 255}", "--ignore-label", "255", "--method", "none"]
    metrics, rows = assess(
        tmp_path, [*arguments, *scale, "--maps", str(tmp_path / "maps"), "--quiet"], "temperature scaling"
    )
    assert metrics["methods"][0]["metrics"]["accuracy"] > 0.7
    assert (tmp_path / "maps" / "scene_00_classes.png").exists() == any(row["id"] == "scene_00.png" for row in rows)
    new = predict(tmp_path, arguments, "test")
    assert [row["id"] for row in new] == [f"scene_{i:02}.png" for i in range(16)]
    assert_same_text(rows, new)


def test_novelty_and_uncertainty_say_why_a_row_is_marked(tmp_path):
    arguments = assess_cases.write_case("classification", tmp_path)
    metrics, rows = assess(tmp_path, [*arguments, "--method", "none"], "deterministic")
    threshold, level = metrics["data"]["threshold"], 1 / 90  # 89 calibration examples
    for row in rows:
        uncertain, novel = float(row["entropy"]) > threshold, float(row["novelty"]) <= max(0.01, level + 1e-9)
        words = [word for word, holds in (("uncertain", uncertain), ("novel", novel)) if holds]
        assert row["why"] == " and ".join(words)
        assert row["flag"] == str(int(bool(words)))
    assert {row["why"] for row in rows if row["source"] == "ood"} & {"novel", "uncertain and novel"}
    (tmp_path / "out" / "novelty.safetensors").unlink()
    assert predict(tmp_path, arguments, "test") == 2


def test_what_is_printed_is_what_is_written(tmp_path, capsys):
    arguments = assess_cases.write_case("classification", tmp_path)
    assess(tmp_path, arguments)
    predict(tmp_path, arguments, "test")
    given = ["--model", arguments[1], "--weights", str(tmp_path / "weights.safetensors"), "--quiet"]
    given += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", str(tmp_path / "test.npz")]
    capsys.readouterr()
    assert cli.main(["predict", *given]) == 0
    assert capsys.readouterr().out == (tmp_path / "predicted-test.csv").read_text()
    assert cli.main(["predict", *given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [{key: str(cell) for key, cell in row.items()} for row in rows] == assess_cases.rows_in(
        tmp_path / "predicted-test.csv"
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("temperature scaling", bb.PointPosterior), ("MCBN, M = 16", bb.BatchNormPosterior)]
)
def test_the_file_holds_the_winner(name, kind, tmp_path):
    metrics, _ = assess(tmp_path, assess_cases.write_case("classification", tmp_path), name)
    network = assess_cases.classifier()
    network.load_state_dict(assess_cases.trained("classification"))
    posterior = bb.load(tmp_path / "out" / "posterior.safetensors", network)
    assert isinstance(posterior, kind)
    assert metrics["recommended"] == name
    assert kind is bb.PointPosterior or posterior.batch_size == 16


def without_batch_norm(tmp_path, *more):
    """Arguments for a network with dropout, without batch norm, and without a batch size."""
    arguments = assess_cases.write_case("classification", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    kept = [word for key in ("--train", "--test", "--ood") for word in (key, options[key])]
    return ["--model", "helpers.assess_cases:with_dropout", *kept, *more, "--draws", "6", "--quiet"]


@pytest.mark.parametrize("name", ["temperature scaling", "MC dropout", "MC dropout with 16 views + temperature"])
def test_a_network_without_batch_norm(name, tmp_path):
    arguments = without_batch_norm(tmp_path, *JITTER)
    metrics, rows = assess(tmp_path, arguments, name)
    names = [method["name"] for method in metrics["methods"]]
    assert names[:2] == ["deterministic", "temperature scaling"]
    assert {"MC dropout", "MC dropout + temperature", "16 views", "MC dropout with 16 views"} < set(names)
    assert not any("tuning" in figure["file"] for figure in metrics["figures"])
    assert metrics["recommended"] == name
    assert metrics["data"]["no_novelty"] == ""
    assert (tmp_path / "out" / "novelty.safetensors").exists()
    assert_same_text([row for row in rows if row["source"] == "test"], predict(tmp_path, arguments, "test"))


def test_novelty_needs_40_calibration_examples_and_says_so_before_any_pass():
    network, (x, y) = assess_cases.trained_network(), assess_cases.blobs(240, 1)
    options = {"batch_size": 16, "method": "none", "no_figures": True}
    found = bb.assess(network, x[:100], (x, y), calibration=(x[:39] + 0.01, y[:39]), **options)
    assert found.facts["no_novelty"] == (
        "Novelty could not be measured: expected at least 40 calibration examples; got 39."
    )


def test_a_registered_method_is_offered_and_compared(tmp_path, forgotten_toy, capsys):
    toy_method = import_module("helpers.toy_method")

    with pytest.raises(SystemExit):
        cli.main(["assess", "--help"])
    assert "ripple" in capsys.readouterr().out
    arguments = without_batch_norm(tmp_path, "--method", "ripple")
    metrics, rows = assess(tmp_path, arguments, "Ripple")
    assert metrics["recommended"] == "Ripple"
    toy = next(method for method in metrics["methods"] if method["name"] == "Ripple")
    assert toy["about"] == "a random number is added to each output"
    assert "error_auroc_mi" in toy["metrics"]
    network = assess_cases.with_dropout()
    assert isinstance(bb.load(tmp_path / "out" / "posterior.safetensors", network), toy_method.RipplePosterior)
    posterior = toy_method.ripple(network, None)
    seen = bb.predict(posterior, assess_cases.blobs(240, 1)[0], bb.categorical(), num_samples=6)
    told = [float(row["mutual_information"]) for row in rows if row["source"] == "test"]
    kept = [int(row["row"]) for row in rows if row["source"] == "test"]
    torch.testing.assert_close(torch.tensor(told), seen.mutual_information[kept], atol=1e-6, rtol=1e-5)


def test_a_method_is_imported_by_the_name_of_its_module(tmp_path, forgotten_toy, capsys):
    arguments = without_batch_norm(tmp_path, "--method", "helpers.toy_method:ripple")
    metrics, rows = assess(tmp_path, arguments, "Ripple")
    assert metrics["recommended"] == "Ripple"
    forgotten_toy()
    assert predict(tmp_path, arguments, "test") == 2
    assert "a posterior of a known kind" in capsys.readouterr().err
    new = predict(tmp_path, arguments, "test", "--method", "helpers.toy_method:ripple")
    assert_same_text([row for row in rows if row["source"] == "test"], new)
