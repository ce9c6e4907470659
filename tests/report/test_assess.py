"""The front door, from end to end, on small networks."""

import csv
import json

import numpy as np
import pytest
import torch
from helpers import assess_cases
from safetensors.torch import load_file

import batchbayes as bb
from batchbayes import cli
from batchbayes._common.text import number

FILES = {"report.html", "posterior.safetensors", "predictions.csv", "metrics.json", "figures"}
TUNED = "MCBN tuned, M ="
TASKS = ["classification", "regression", "segmentation"]


@pytest.fixture(scope="module")
def assessed(tmp_path_factory):
    """Output folders by task, each made once."""
    torch.set_num_threads(1)
    made = {}

    def get(task):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            arguments = assess_cases.write_case(task, folder)
            if task == "classification":  # the test data cannot tell the methods apart, and these tests need draws
                arguments += ["--recommend", TUNED]
            assert cli.main(["assess", *arguments, "--out", str(folder / "out")]) == 0
            made[task] = folder, arguments
        return made[task][0] / "out", made[task][1]

    return get


def rows_of(folder):
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def by_name(folder):
    """Metrics by method, without the price, which is measured by a clock."""
    return {
        method["name"]: {key: value for key, value in method["metrics"].items() if key != "passes"}
        for method in metrics_of(folder)["methods"]
    }


@pytest.mark.parametrize("task", TASKS)
def test_all_files_are_there_and_nothing_else(assessed, task):
    folder, _ = assessed(task)
    novelty = set() if task == "segmentation" else {"novelty.safetensors"}  # 32 training scenes are too few
    assert {path.name for path in folder.iterdir()} == FILES | novelty
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    assert {f"figures/{p.name}" for p in (folder / "figures").glob("*.png")} == {
        figure["file"] for figure in metrics_of(folder)["figures"]
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_numbers(assessed, task, tmp_path):
    folder, arguments = assessed(task)
    assert cli.main(["assess", *arguments, "--out", str(tmp_path / "again")]) == 0
    assert rows_of(tmp_path / "again") == rows_of(folder)
    assert by_name(tmp_path / "again") == by_name(folder)


def test_the_table_of_a_classifier_agrees_with_its_metrics(assessed):
    folder, _ = assessed("classification")
    metrics, rows = metrics_of(folder), rows_of(folder)
    chosen = by_name(folder)[metrics["recommended"]]
    tested = [row for row in rows if row["source"] == "test"]
    assert len(tested) == metrics["data"]["test_count"]
    assert len(tested) + metrics["data"]["calibration_count"] == 240
    assert np.mean([row["prediction"] == row["target"] for row in tested]) == pytest.approx(chosen["accuracy"])
    confidence = np.mean([float(row["confidence"]) for row in tested])
    assert confidence == pytest.approx(chosen["mean_confidence"], abs=1e-6)
    assert all(float(row["entropy"]) >= 0 and float(row["mutual_information"]) >= 0 for row in rows)
    threshold = metrics["data"]["threshold"]
    assert all(("uncertain" in row["why"]) == (float(row["entropy"]) > threshold) for row in rows)


def test_the_deterministic_row_is_the_network_itself(assessed):
    folder, _ = assessed("classification")
    network = assess_cases.classifier()
    network.load_state_dict(assess_cases.trained("classification"))
    inputs, labels = assess_cases.blobs(240, 1)
    kept = [int(row["row"]) for row in rows_of(folder) if row["source"] == "test"]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(network.eval()(inputs[kept]), labels[kept])
    assert by_name(folder)["deterministic"]["nll"] == pytest.approx(float(loss), abs=1e-6)


def test_the_posterior_file_is_the_recommended_one(assessed):
    folder, _ = assessed("classification")
    network = assess_cases.classifier()
    network.load_state_dict(assess_cases.trained("classification"))
    posterior = bb.load(folder / "posterior.safetensors", network)
    name = f"MCBN tuned, M = {number(posterior.batch_size)}"
    assert metrics_of(folder)["recommended"] == name
    engine = next(method["settings"]["engine"] for method in metrics_of(folder)["methods"] if method["name"] == name)
    inputs, labels = assess_cases.blobs(240, 1)
    rows = [row for row in rows_of(folder) if row["source"] == "test"]
    kept = [int(row["row"]) for row in rows]
    seen = bb.predict(
        posterior, inputs[kept], bb.categorical(), num_samples=12, engine=engine.split(",")[0].split(":")[0]
    )
    assert -float(seen.log_prob(labels[kept]).mean()) == pytest.approx(by_name(folder)[name]["nll"], abs=1e-5)
    evaluated = bb.metrics.evaluate(seen, labels[kept])
    assert evaluated == pytest.approx({key: by_name(folder)[name][key] for key in evaluated}, abs=1e-5)
    told = [float(row["mutual_information"]) for row in rows]
    np.testing.assert_allclose(told, seen.mutual_information.numpy(), atol=1e-5)


def test_the_table_of_a_regression_agrees_with_its_metrics(assessed):
    folder, _ = assessed("regression")
    metrics, rows = metrics_of(folder), rows_of(folder)
    chosen = by_name(folder)[metrics["recommended"]]
    error = np.array([float(row["mean"]) - float(row["target"]) for row in rows])
    assert np.sqrt(np.mean(error**2)) == pytest.approx(chosen["rmse"], rel=1e-5)
    inside = [float(row["lower"]) <= float(row["target"]) <= float(row["upper"]) for row in rows]
    assert np.mean(inside) == pytest.approx(chosen["conformal_coverage"])
    assert all(float(row["std"]) >= 0 for row in rows)
    assert metrics["data"]["unit"] == ""  # the name of the target has no unit in brackets


def test_the_pixels_of_a_segmentation_are_all_counted(assessed):
    folder, _ = assessed("segmentation")
    rows = rows_of(folder)
    network = assess_cases.segmenter()
    network.load_state_dict(load_file(folder.parent / "weights.safetensors"))
    images, labels = assess_cases.scenes(18, 1)
    kept = [int(row["row"]) for row in rows]
    with torch.no_grad():
        log_probs = network.eval()(images[kept]).log_softmax(1).double()
    counted = labels[kept] != 255
    loss = torch.nn.functional.nll_loss(log_probs, labels[kept], ignore_index=255)
    own = by_name(folder)["deterministic"]
    assert own["nll"] == pytest.approx(float(loss), abs=1e-6)
    right = (log_probs.argmax(1) == labels[kept])[counted].double().mean()
    assert own["accuracy"] == pytest.approx(float(right))
    seen = bb.predict(bb.deterministic(network), images[kept], bb.categorical(ignore_index=255))
    evaluated = bb.metrics.evaluate(seen, labels[kept])
    assert evaluated == pytest.approx({key: own[key] for key in evaluated}, abs=1e-4)  # an AUROC is of rounded scores


def test_json_is_printed_and_can_be_read(assessed, tmp_path, capsys):
    _, arguments = assessed("regression")
    assert cli.main(["assess", *arguments, "--json", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "regression"


def test_calibration_data_leaves_the_test_data_whole(assessed, tmp_path):
    folder, arguments = assessed("regression")
    given = [*arguments, "--calibration", str(folder.parent / "train.csv"), "--out", str(tmp_path / "out")]
    assert cli.main(["assess", *given]) == 0
    data = metrics_of(tmp_path / "out")["data"]
    assert (data["test_count"], data["calibration_count"], data["split_off"]) == (240, 300, False)
    assert "split off" not in (tmp_path / "out" / "report.html").read_text()


def test_several_methods_endless_training_and_named_classes(tmp_path):
    arguments = assess_cases.write_case("classification", tmp_path)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    given = ["--model", options["--model"], "--weights", options["--weights"], "--draws", "6", "--quiet"]
    given += ["--train", "helpers.assess_cases:endless_training", "--test", "helpers.assess_cases:named_test"]
    given += ["--method", "mcbn,correlated-bn", "--engine", "sample", "--center", "batches"]
    assert cli.main(["assess", *given, "--out", str(tmp_path / "out")]) == 0
    names = list(by_name(tmp_path / "out"))
    assert names[:2] == ["deterministic", "temperature scaling"]
    assert {"MCBN, M = 32", "Correlated BN, M = 32", "Correlated BN tuned + temperature"} <= set(names)
    assert {row["prediction"] for row in rows_of(tmp_path / "out")} == set(assess_cases.CLASS_NAMES)
