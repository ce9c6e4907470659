"""Data is read as in training: columns by name, classes by name, and the same preprocessing, up to `predict`."""

import csv
import json

import numpy as np
import pytest
import torch
from helpers import assess_cases
from PIL import Image
from safetensors.torch import save_file

from batchbayes import cli
from batchbayes.saving import load_notes

WORDS = ("mid", "high", "low")
"""The classes of the network, in the order of its outputs, which is not that of the alphabet."""


def write_table(path, columns, order=None):
    names = order or list(columns)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*(columns[name] for name in names), strict=True))
    return str(path)


def waves(seed, scale=1.0, **more):
    x, y = assess_cases.wave(240, seed)
    left, right = (x * torch.tensor([scale, 1.0])).T.tolist()
    return {"left": left, "right": right, "height": y.tolist(), **more}


def words(seed):
    x, y = assess_cases.blobs(240, seed)
    left, right = x.T.tolist()
    return {"code": [f"n-{i}" for i in range(240)], "left": left, "right": right, "kind": [WORDS[k] for k in y]}


def arguments_for(folder, task, **files):
    save_file(assess_cases.trained(task), folder / "weights.safetensors")
    model = "helpers.assess_cases:" + ("regressor" if task == "regression" else "classifier")
    given = ["--model", model, "--weights", str(folder / "weights.safetensors"), "--quiet"]
    options = {"--batch-size": "16", "--draws": "6", "--out": str(folder / "out")}
    options |= {f"--{key}": str(value) for key, value in files.items()}
    return given, [word for pair in options.items() for word in pair]


def assess(given, options, *more):
    assert cli.main(["assess", *given, *options, *more]) == 0
    folder = options[options.index("--out") + 1]
    with open(f"{folder}/metrics.json", encoding="utf-8") as file:
        metrics = json.load(file)
    return metrics, assess_cases.rows_in(f"{folder}/predictions.csv")


def predict(folder, given, source, *more):
    out = folder / "new.csv"
    out.unlink(missing_ok=True)
    posterior = ["--posterior", str(folder / "out" / "posterior.safetensors")]
    code = cli.main(["predict", *given, *posterior, "--input", str(source), "--out", str(out), *more])
    return assess_cases.rows_in(out) if code == 0 else code


def told(rows, column):
    return {row["row"]: row[column] for row in rows if row["source"] != "ood"}


@pytest.fixture
def table_case(tmp_path):
    train, test = (write_table(tmp_path / f"{n}.csv", waves(seed)) for n, seed in (("train", 0), ("test", 1)))
    return arguments_for(tmp_path, "regression", train=train, test=test, target="height")


def test_columns_are_found_by_name(tmp_path, table_case, capsys):
    given, options = table_case
    _, rows = assess(given, options)
    turned = write_table(tmp_path / "turned.csv", waves(1), ["height", "right", "left"])
    for source in (turned, write_table(tmp_path / "inputs.csv", waves(1), ["right", "left"])):
        new = told(predict(tmp_path, given, source), "mean")
        assert {row: new[row] for row in told(rows, "mean")} == told(rows, "mean")
    assert "warning" not in capsys.readouterr().err
    options[options.index("--out") + 1] = str(tmp_path / "again")
    options[options.index("--test") + 1] = turned
    _, again = assess(given, options)
    assert told(again, "mean") == told(rows, "mean")


def test_missing_columns_are_refused_and_others_are_named(tmp_path, table_case, capsys):
    given, options = table_case
    _, rows = assess(given, options)
    assert predict(tmp_path, given, write_table(tmp_path / "less.csv", waves(1), ["right", "height"])) == 2
    assert "no left; it has right" in capsys.readouterr().err
    more = write_table(tmp_path / "more.csv", waves(1, depth=range(240)), ["depth", "left", "right"])
    new = told(predict(tmp_path, given, more), "mean")
    assert {row: new[row] for row in told(rows, "mean")} == told(rows, "mean")
    assert "columns that the training table did not have: depth" in capsys.readouterr().err


def test_a_column_in_another_unit_is_named(tmp_path, table_case, capsys):
    given, options = table_case
    assess(given, options)
    columns = waves(1)
    predict(tmp_path, given, write_table(tmp_path / "same.csv", columns))
    assert "same unit" not in capsys.readouterr().err
    columns["right"] = [1.5 * value for value in columns["right"]]  # a third of them is outside
    predict(tmp_path, given, write_table(tmp_path / "wide.csv", columns))
    said = capsys.readouterr().err
    assert "wide.csv has values that the training table did not have (right: " in said
    assert "left" not in said
    assert "Are these columns in the same unit as in training?" in said
    few = {name: values[:3] for name, values in waves(1).items()} | {"left": [0.1, 1700000000, 0.2]}
    predict(tmp_path, given, write_table(tmp_path / "few.csv", few))
    assert "few.csv has values that the training table did not have (left: 1.7e+09 is far outside" in (
        capsys.readouterr().err
    )


def test_arrays_without_names_are_taken_in_the_order_of_training_and_this_is_told(tmp_path, table_case, capsys):
    given, options = table_case
    assess(given, options)
    np.savez(tmp_path / "plain.npz", X=np.zeros((3, 2), dtype=np.float32))
    predict(tmp_path, given, str(tmp_path / "plain.npz"))
    assert "plain.npz has no array features" in capsys.readouterr().err


def test_the_training_file_as_test_data_is_told(table_case, capsys):
    given, options = table_case
    options[options.index("--test") + 1] = options[options.index("--train") + 1]
    assess(given, options)
    assert "most test examples are training examples too" in capsys.readouterr().err


@pytest.mark.parametrize("order", [None, ",".join(WORDS)])
def test_classes_may_be_words_and_rows_have_ids(order, tmp_path):
    train, test = (write_table(tmp_path / f"{n}.csv", words(seed)) for n, seed in (("train", 0), ("test", 1)))
    strange = words(2) | {"kind": ["unheard"] * 240}
    ood = write_table(tmp_path / "ood.csv", strange, ["kind", "right", "left"])
    given, options = arguments_for(
        tmp_path, "classification", train=train, test=test, ood=ood, target="kind", id="code"
    )
    metrics, rows = assess(given, options, *(["--class-names", order] if order else []))
    tested = [row for row in rows if row["source"] == "test"]
    assert {row["target"] for row in tested} == set(WORDS)
    assert all(row["id"] == f"n-{row['row']}" for row in tested)
    assert [row["id"] for row in rows if row["source"] == "ood"] == [""] * 240
    accuracy = np.mean([row["target"] == row["prediction"] for row in tested])
    assert accuracy > 0.6 if order else accuracy < 0.5  # without an order, classes are numbered by the alphabet
    chosen = next(method for method in metrics["methods"] if method["name"] == metrics["recommended"])
    assert chosen["metrics"]["accuracy"] == pytest.approx(accuracy)
    new = predict(tmp_path, given, test)
    assert [row["id"] for row in new] == [f"n-{i}" for i in range(240)]
    assert {row: told(new, "prediction")[row] for row in told(tested, "prediction")} == told(tested, "prediction")


def test_parts_of_a_table_with_words_ids_and_a_scale_are_read_as_in_training(tmp_path, capsys):
    files = {name: write_table(tmp_path / f"{name}.csv", words(seed)) for name, seed in (("train", 0), ("test", 1))}
    more = write_table(tmp_path / "more.csv", words(1) | {"colour": ["red"] * 240})
    named = {"target": "kind", "id": "code", "method": "none"}
    given, options = arguments_for(tmp_path, "classification", **files, **named)
    assess(given, options, "--standardise", "--class-names", ",".join(WORDS))
    rows = predict(tmp_path, given, more)
    posterior = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", more]
    capsys.readouterr()
    assert cli.main(["predict", *given, *posterior, "--parts", str(tmp_path / "parts")]) == 0
    assert capsys.readouterr().err.count("columns that the training table did not have") == 1
    assert [row | {"source": "new"} for row in assess_cases.rows_in(tmp_path / "parts" / "part-00000.csv")] == rows


def test_the_scale_of_columns_is_learnt_and_kept(tmp_path):
    train, test = (write_table(tmp_path / f"{n}.csv", waves(s, 1000.0)) for n, s in (("train", 0), ("test", 1)))
    given, options = arguments_for(tmp_path, "regression", train=train, test=test, target="height")
    metrics, rows = assess(given, options, "--standardise")
    x, _ = assess_cases.wave(240, 0)
    learnt = load_notes(tmp_path / "out" / "posterior.safetensors")["reading"]["preprocessing"]
    np.testing.assert_allclose(learnt["mean"], (x.mean(0) * torch.tensor([1000, 1])).numpy(), rtol=1e-4)
    np.testing.assert_allclose(learnt["std"], (x.std(0, correction=0) * torch.tensor([1000, 1])).numpy(), rtol=1e-4)
    assert metrics["methods"][0]["metrics"]["rmse"] < 1
    new = told(predict(tmp_path, given, test), "mean")
    assert {row: new[row] for row in told(rows, "mean")} == told(rows, "mean")
    shown = [line for lines in metrics["details"].values() for line in lines if line.startswith("left")]
    assert not shown or max(abs(float(line.split("=")[1])) for line in shown) > 100  # people see their own numbers


def write_images(folder, classes, seed, side=6):
    random = np.random.default_rng(seed)
    for label, name in enumerate(("ape", "bee", "cat")):
        if name not in classes:
            continue
        (folder / name).mkdir(parents=True)
        for i in range(24):
            pixels = random.integers(0, 120, (side, side, 3))
            pixels[..., label] += 100
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return str(folder)


@pytest.fixture
def image_case(tmp_path):
    train = write_images(tmp_path / "train", ("ape", "bee", "cat"), 0)
    test = write_images(tmp_path / "test", ("ape", "cat"), 1, side=9)
    given = ["--model", "helpers.assess_cases:colours", "--quiet"]
    options = ["--train", train, "--test", test, "--batch-size", "16", "--draws", "6", "--out", str(tmp_path / "out")]
    return given, [*options, "--mean", "0.3,0.3,0.3", "--std", "0.2,0.2,0.2", "--resize", "6"]


def test_a_folder_that_lacks_a_class_does_not_shift_labels(tmp_path, image_case):
    given, options = image_case
    metrics, rows = assess(given, options)
    assert {row["target"] for row in rows} == {"ape", "cat"}
    assert all(row["id"].startswith(f"{row['target']}/") for row in rows)
    assert metrics["methods"][0]["metrics"]["accuracy"] == 1
    kept = load_notes(tmp_path / "out" / "posterior.safetensors")["reading"]["preprocessing"]
    assert kept == {"resize": [6, 6], "mean": [0.3] * 3, "std": [0.2] * 3}
    new = predict(tmp_path, given, tmp_path / "test")
    for row in rows:
        assert {key: new[int(row["row"])][key] for key in ("id", "prediction", "confidence")} == {
            key: row[key] for key in ("id", "prediction", "confidence")
        }
    [alone] = predict(tmp_path, given, tmp_path / "test" / "cat" / "3.png")
    assert (alone["id"], alone["prediction"]) == ("3.png", "cat")


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_weights_from_torch_save(suffix, tmp_path, table_case):
    given, options = table_case
    _, rows = assess(given, options)
    torch.save({"model": assess_cases.trained("regression"), "epoch": 3}, tmp_path / f"weights.{suffix}")
    given[given.index("--weights") + 1] = str(tmp_path / f"weights.{suffix}")
    new = told(predict(tmp_path, given, tmp_path / "test.csv"), "mean")
    assert {row: new[row] for row in told(rows, "mean")} == told(rows, "mean")


def test_equal_targets_have_no_variance(tmp_path):
    columns = {"train": waves(0), "test": waves(1) | {"height": [1.0] * 240}}
    files = {name: write_table(tmp_path / f"{name}.csv", each) for name, each in columns.items()}
    given, options = arguments_for(tmp_path, "regression", **files, target="height")
    metrics, _ = assess(given, options)
    assert "All test targets are equal" in metrics["verdict"]["How good is it?"]


def test_printed_json_says_null_where_an_interval_has_no_end(tmp_path, table_case, capsys):
    given, options = table_case
    few = {name: column[:6] for name, column in waves(2).items()}
    assess(given, options, "--method", "none", "--calibration", write_table(tmp_path / "few.csv", few))
    capsys.readouterr()
    assert len(predict(tmp_path, given, tmp_path / "test.csv", "--json")) == 240
    first = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]
    assert (first["lower"], first["upper"]) == (None, None)


def test_formulas_are_written_as_text(tmp_path, capsys):
    evil = ("=1+1", "@x", "-2+3")
    for name, seed in (("train", 0), ("test", 1)):
        x, y = assess_cases.blobs(240, seed)
        np.savez(tmp_path / f"{name}.npz", X=x.numpy(), y=y.numpy(), class_names=np.array(evil))
    given, options = arguments_for(tmp_path, "classification", train=tmp_path / "train.npz", test=tmp_path / "test.npz")
    _, rows = assess(given, options)
    assert {row["target"] for row in rows} == {f"'{name}" for name in evil}
    assert {row["prediction"] for row in rows} == {f"'{name}" for name in evil}
    posterior = str(tmp_path / "out" / "posterior.safetensors")
    capsys.readouterr()
    assert cli.main(["predict", *given, "--posterior", posterior, "--input", str(tmp_path / "test.npz")]) == 0
    printed = capsys.readouterr().out
    assert ",'=1+1," in printed
    assert ",=1+1," not in printed
    code = predict(tmp_path, given, tmp_path / "test.npz", "--out", str(tmp_path / ("x" * 250)))
    assert code == 2
    assert "a place to write to" in capsys.readouterr().err
