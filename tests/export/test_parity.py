"""One answer everywhere: the table of an assessment, `batchbayes predict`, the ONNX file and the service.

For every task, every method that may be recommended, and both engines, on 1,000 rows that took no part in any choice
(200 images of a segmentation). Numbers are equal to 1e-5 of the spread of the targets, and flags are equal.
"""

import json
import warnings

import numpy as np
import pytest
from helpers import assess_cases, parity
from helpers.served import answer, served

import batchbayes as bb
from batchbayes import cli
from batchbayes.engines.linear import BACKWARD_COST

onnx = pytest.importorskip("onnx", reason="needs the extra export")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")

WINNERS = {
    "network": {"method": ("none",), "recommend": "deterministic"},
    "temperature": {"method": ("none",), "recommend": "temperature scaling"},
    "mcbn": {"method": ("mcbn",), "recommend": "MCBN"},
    "stochastic_bn": {"method": ("stochastic-bn",), "recommend": "Stochastic BN"},
    "correlated_bn": {"method": ("correlated-bn",), "recommend": "Correlated BN"},
    "mc_dropout": {"method": ("mc-dropout",), "recommend": "MC dropout"},
    "laplace": {"method": ("last-layer-laplace",), "recommend": "Last-layer Laplace"},
    "variational": {"method": ("variational",), "recommend": "Variational"},
    "ensemble": {"method": ("none",), "recommend": "ensemble of 3"},
    "views": {"method": ("none",), "recommend": "16 views"},
    "mcbn with views": {"method": ("mcbn",), "recommend": "MCBN with 16 views"},
    "views of maps": {"method": ("none",), "recommend": "2 views", "views": "flip"},
    "mcbn with views of maps": {"method": ("mcbn",), "recommend": "MCBN with 16 views", "views": "flip"},
}
CLASSES = ["network", "temperature", "mcbn", "stochastic_bn", "correlated_bn", "mc_dropout", "laplace", "ensemble"]
CLASSES += ["variational", "views", "mcbn with views"]
VALUES = [name for name in CLASSES if name != "temperature"]
MAPS = ["network", "temperature", "mcbn", "stochastic_bn", "mc_dropout", "ensemble", "views of maps"]
MAPS += ["mcbn with views of maps"]
POSSIBLE = {
    "classification": CLASSES, "binary": CLASSES, "regression": VALUES, "two_outputs": VALUES, "segmentation": MAPS,
}  # fmt: skip
LINEAR = ("mcbn", "stochastic_bn", "correlated_bn", "laplace")
"""What the linear engine can draw."""
ALL = [(task, name, "sample") for task, names in POSSIBLE.items() for name in names]
ALL += [(task, name, "linear") for task, names in POSSIBLE.items() for name in names if name in LINEAR]
QUICK = [
    ("classification", "temperature", "sample"), ("regression", "mcbn", "linear"), ("two_outputs", "laplace", "sample"),
    ("segmentation", "mcbn", "sample"),
]  # fmt: skip


SHARE, OF_LAPLACE = 1e-5, 5e-4
"""How far answers may differ, in units of the spread of the targets; and for exact draws of last-layer Laplace, whose
weights of up to 200 almost cancel, so that the last digits of float32 features count."""


def case_of(task, winner, engine):
    marks = () if (task, winner, engine) in QUICK else (pytest.mark.slow,)
    return pytest.param(task, winner, engine, marks=marks, id=f"{task}-{winner}-{engine}")


def assessed(task, winner, engine, inputs, targets):
    """Return what an assessment says about a network, with the winner that is asked for."""
    is_map = task == "segmentation"
    train, held_out = (parity.data(task, 48 if is_map else 400, seed) for seed in (0, 1))
    model = [parity.trained(task, seed) for seed in range(3)] if winner == "ensemble" else parity.trained(task)
    options = {"views": "none" if is_map or "views" not in winner else "jitter:0.1"} | WINNERS[winner]
    if is_map:
        options["ignore_label"] = 255
    return bb.assess(
        model, train, (inputs, targets), calibration=held_out, engine=engine, draws=8, batch_size=16, no_figures=True,
        **options,
    )  # fmt: skip


def by_columns(found, task):
    """Return the columns of predictions.csv from the outputs of a file, by name."""
    found = {name: np.asarray(values) for name, values in found.items()}
    if task in ("regression", "two_outputs"):
        names = {"mean": "pred_mean", "std": "pred_std", "epistemic_std": "epistemic_std", "lower": "lower"}
        names["upper"] = "upper"
        endings = ("", "_2")[: found["pred_mean"].shape[1]]
        columns = {f"{a}{end}": found[b][:, i] for a, b in names.items() for i, end in enumerate(endings)}
    elif task == "segmentation":
        columns = {"confidence": found["probs"].max(-1).mean((1, 2)), "entropy": found["entropy"].mean((1, 2))}
    else:
        columns = {name: found[name] for name in ("entropy", "mutual_information")}
        columns["confidence"], columns["prediction"] = found["probs"].max(-1), found["probs"].argmax(-1)
    return columns | {name: found[name] for name in ("novelty", "flag")}


def assert_equal(columns, rows, units):
    """Compare columns with rows of predictions.csv, which are empty if nothing was drawn."""
    for name, values in columns.items():
        cells = [row[name] for row in rows]
        if cells[0] == "":
            assert not np.any(values), name
            continue
        given = np.array(cells, dtype=float)
        if name == "novelty":  # ranks: the last digit of a score may swap two neighbours
            assert np.mean(np.abs(values - given) > 1e-5) < 0.01
        else:
            np.testing.assert_allclose(values, given, rtol=0, atol=units.get(name, 1e-5), err_msg=name)


def passes_in(path, task):
    """Count the passes of a file: the draws of its loop, or how often it runs the last layer but one, also backward.

    The detector of novelty has a pass of its own, which is not counted.
    """
    graph = onnx.load(path).graph
    held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "Loop":
            return int(held[node.input[0]])
    weight = parity.trained(task)[4].weight.detach().numpy()
    own = {name for name, values in held.items() if np.array_equal(values, weight) or np.array_equal(values.T, weight)}
    count = sum(not node.name.startswith("detector/") and bool(own & set(node.input)) for node in graph.node)
    return count if task == "segmentation" else 1 + BACKWARD_COST * (count - 1)


@pytest.mark.parametrize(("task", "winner", "engine"), [case_of(*each) for each in ALL])
def test_one_answer_everywhere(task, winner, engine, tmp_path):
    inputs, targets = parity.data(task, 200 if task == "segmentation" else 1000, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = assessed(task, winner, engine, inputs, targets)
        found.save(tmp_path / "report")
        np.savez(tmp_path / "new.npz", X=inputs.numpy())
        common = ["--model", f"helpers.parity:{task}", "--posterior", str(tmp_path / "report/posterior.safetensors")]
        common += ["--input", str(tmp_path / "new.npz"), "--quiet"]
        assert cli.main(["predict", *common, "--out", str(tmp_path / "new.csv")]) == 0
        if (task, winner, engine) in QUICK:
            assert cli.main(["export", *common, "--out", str(tmp_path / "network.onnx")]) == 0
        else:
            bb.export(found, tmp_path / "network.onnx", inputs[:50])
    assert found.recommended.name.startswith(WINNERS[winner]["recommend"])
    assert found.notes["engine"] == engine
    price, told = passes_in(tmp_path / "network.onnx", task), found.recommended
    assert price <= 1.25 * max(told.passes, told.file_passes)  # a file of last layers needs one pass for all draws
    if winner != "laplace":
        assert price == pytest.approx(told.file_passes, rel=0.25)
    rows = assess_cases.rows_in(tmp_path / "new.csv")
    units = {}
    if task in ("regression", "two_outputs"):
        for i, spread in enumerate(targets.std(0).tolist()):
            for name in ("mean", "std", "epistemic_std", "lower", "upper"):
                share = OF_LAPLACE if (winner, engine) == ("laplace", "sample") else SHARE
                units[f"{name}{('', '_2')[i]}"] = share * spread
    table = assess_cases.rows_in(tmp_path / "report" / "predictions.csv")
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"input": inputs.numpy()})
    from_file = by_columns(dict(zip((each.name for each in session.get_outputs()), outputs, strict=True)), task)
    with served(tmp_path / "network.onnx") as address:
        status, answered = answer(address, json.dumps({"inputs": inputs.tolist()}))
    assert status == 200
    for columns in (from_file, by_columns(answered, task)):
        assert_equal(columns, rows, units)
        assert_equal(columns, table, units)
    flags = np.array([row["flag"] == "1" for row in rows])
    assert 0 < flags.sum() < len(flags)
