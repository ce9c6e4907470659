"""Bad input at the front door: one line that says what to do, exit code 2, and nothing written."""

import errno

import numpy as np
import pytest
import torch
from helpers import assess_cases
from safetensors.torch import save_file
from torch import nn

import batchbayes as bb
from batchbayes import BatchbayesError, cli
from batchbayes.report import assess as run
from batchbayes.report import write as writing
from batchbayes.report.notes import checked_notes, require_outputs


@pytest.fixture
def case(tmp_path):
    """Arguments that work, as a dict."""
    arguments = [word for word in assess_cases.write_case("classification", tmp_path) if word != "--quiet"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True)) | {"--out": str(tmp_path / "out")}


def change(case, **changes):
    options = case | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
    return ["assess", *(word for key, value in options.items() if value is not None for word in _words(key, value))]


def _words(key, value):
    return (key,) if value is True else (key, str(value))


def write(folder, name, x, y):
    np.savez(folder / name, X=np.asarray(x), y=np.asarray(y))
    return folder / name


def nan_rows(folder):
    x, y = assess_cases.blobs(50, 3)
    x[7, 1] = float("nan")
    return write(folder, "nan.npz", x, y)


def bad_weights(folder):
    save_file({"output.weight": torch.zeros(3, 9)}, folder / "other.safetensors")
    return folder / "other.safetensors"


def a_pickle(folder):
    torch.save(assess_cases.classifier(), folder / "weights.pt")
    return folder / "weights.pt"


def table(folder, text):
    (folder / "table.csv").write_text(text)
    return folder / "table.csv"


HELPERS = "helpers.assess_cases"
CASES = {
    "wrong shape": (lambda f: {"test": write(f, "t.npz", np.zeros((9, 5)), np.zeros(9, int))}, "inputs that MLP runs"),
    "labels outside": (
        lambda f: {"test": write(f, "t.npz", np.zeros((90, 2)), np.full(90, 3))},
        "labels from 0 to 2, as the network has 3 outputs; got 3 to 3",
    ),
    "missing file": (lambda f: {"test": f / "nowhere.npz"}, "nothing at"),
    "missing weights": (lambda f: {"weights": f / "nowhere.safetensors"}, "nothing at"),
    "unknown kind of file": (lambda f: {"test": f / "weights.safetensors"}, "a .npz, .zarr, .csv or .parquet file"),
    "a factory that raises": (lambda f: {"model": "helpers.assess_cases:raising"}, "RuntimeError: no such layer"),
    "a factory that exits": (lambda f: {"model": "helpers.assess_cases:exiting"}, "SystemExit: 0"),
    "a long name": (lambda f: {"out": f / ("x" * 250)}, "a place to write to"),
    "a name that no disk takes": (lambda f: {"out": f / ("x" * 300)}, "File name too long"),
    "a mean without a std": (lambda f: {"mean": "0.5"}, "--mean and --std together, or --standardise alone"),
    "a mean for functions": (
        lambda f: {
            "mean": 0, "std": 1, "ood": None, "test": f"{HELPERS}:named_test", "train": f"{HELPERS}:blob_training"
        },
        "a file or a folder beside --mean",
    ),
    "a standardisation of a function": (
        lambda f: {"standardise": True, "train": f"{HELPERS}:blob_training"}, "a training file to learn"
    ),
    "classes in another order": (
        lambda f: {"test": f"{HELPERS}:named_test", "train": f"{HELPERS}:other_names"}, "the class names of training"
    ),
    "a factory that is not there": (lambda f: {"model": "helpers.assess_cases:nobody"}, "a function nobody in helpers"),
    "a module that is not there": (lambda f: {"model": "no_such_module:build"}, "No module named 'no_such_module'"),
    "a file for a module": (lambda f: {"model": "mine.py:build"}, "leave out .py, as in mine:build"),
    "a factory that is no name": (lambda f: {"model": "model.py"}, "pkg.module:function; got 'model.py'"),
    "a factory of something else": (lambda f: {"model": "helpers.assess_cases:not_a_network"}, "got a str"),
    "no batch norm": (
        lambda f: {"model": "helpers.assess_cases:without_batch_norm", "weights": None, "method": "mcbn"},
        "Do this: ",
    ),
    "views of tables": (lambda f: {"views": "crop:4"}, "images (N, C, H, W) for crop"),
    "unknown views": (lambda f: {"views": "rotate"}, "views, one of: crop, flip, shift, jitter"),
    "views without a number": (lambda f: {"views": "jitter"}, "jitter with a number, as in jitter:0.05"),
    "views with a word": (lambda f: {"views": "jitter:much"}, "a number after jitter:"),
    "weights of another network": (lambda f: {"weights": bad_weights(f)}, "output.weight of shape (3, 9)"),
    "pickled weights": (lambda f: {"weights": a_pickle(f)}, "cannot be read without running code in it"),
    "NaN rows": (lambda f: {"test": nan_rows(f)}, "1 row with NaN or infinity"),
    "NaN training rows": (lambda f: {"train": nan_rows(f)}, "1 row with NaN or infinity"),
    "no target column": (
        lambda f: {"train": table(f, "a,b,c\n1,2,3\n"), "target": "height"},
        "a target column 'height' in table.csv; got columns a, b, c",
    ),
    "words in a table": (lambda f: {"test": table(f, "a,b,y\n1,two,3\n"), "target": "y"}, "'two' in line 2"),
    "uneven table": (lambda f: {"test": table(f, "a,b,y\n1,2\n"), "target": "y"}, "line 2 with another number"),
    "no targets": (lambda f: {"test": table(f, "a,b\n1,2\n")}, "name the column by --target"),
    "no batch size": (lambda f: {"batch_size": None}, "--batch-size (batch_size=) beside training data"),
    "batch size above the data": (lambda f: {"batch_size": 999}, "at least 999 training examples"),
    "unknown method": (lambda f: {"method": "magic"}, "a method, one of: mcbn, stochastic-bn"),
    "a method that is not compared": (lambda f: {"method": "deterministic"}, "a method, one of: mcbn, stochastic-bn"),
    "a method in no module": (lambda f: {"method": "no_such_module:wobble"}, "No module named 'no_such_module'"),
    "a method that its module lacks": (lambda f: {"method": "helpers.assess_cases:magic"}, "got 'magic'"),
    "too few class names": (lambda f: {"class_names": "a,b"}, "3 class names"),
    "too many class names": (lambda f: {"class_names": "a,b,c,d"}, "3 class names, one for each output; got 4"),
    "a test loader that shuffles": (lambda f: {"test": "helpers.assess_cases:shuffling_test"}, "shuffle=False"),
    "an empty folder": (lambda f: {"test": _empty(f)}, "expected images in"),
    "an object array": (lambda f: {"test": write(f, "o.npz", np.array([{}]), [0])}, "arrays of numbers"),
    "a segmentation of vectors": (lambda f: {"task": "segmentation"}, "expected "),
    "two classes of one name": (lambda f: {"class_names": "a,a,b"}, "a name of its own for each class"),
    "a name that is too long for a file": (lambda f: {"test": "x" * 300}, "File name too long"),
    "weights with such a name": (lambda f: {"weights": "x" * 300}, "File name too long"),
    "maps of a classification": (lambda f: {"maps": f / "maps"}, "a segmentation for --maps; got a classification"),
    "no such device": (lambda f: {"device": "cuda:77"}, "use --device cpu"),
    "no device of this name": (lambda f: {"device": "gpu"}, "as cpu or cuda:0; got gpu: "),
}  # fmt: skip


def _empty(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize("name", CASES)
def test_one_line_with_the_fix(name, case, tmp_path, capsys):
    make, message = CASES[name]
    assert cli.main(change(case, **make(tmp_path))) == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("batchbayes assess: expected ")
    assert message in last
    assert ". Do this: " in last
    assert "Traceback" not in printed.err
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_exists(case, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    assert cli.main(change(case)) == 2
    assert "choose another --out, or pass --overwrite" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert cli.main([*change(case), "--overwrite", "--quiet"]) == 0
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    assert (tmp_path / "out" / "report.html").exists()


def test_debug_shows_where(case):
    with pytest.raises(BatchbayesError, match="no such layer"):
        cli.main([*change(case, model="helpers.assess_cases:raising"), "--debug"])


@pytest.mark.parametrize("stage", ["load_case", "write_files", "build_report"])
def test_an_interrupt_leaves_nothing(stage, case, tmp_path, monkeypatch, capsys):
    from batchbayes.report.page import build

    def interrupt(*_):
        raise KeyboardInterrupt

    place = {"load_case": run, "write_files": writing, "build_report": build}[stage]
    monkeypatch.setattr(place, stage, interrupt)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.main(change(case)) == 130
    assert capsys.readouterr().err.endswith("batchbayes assess: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_predict_refuses_what_it_cannot_use(case, tmp_path, capsys):
    assert cli.main([*change(case), "--quiet", "--recommend", "MCBN"]) == 0
    posterior = tmp_path / "out" / "posterior.safetensors"
    base = ["predict", "--model", case["--model"], "--weights", case["--weights"], "--posterior", str(posterior)]
    for changes, message in (
        (["--input", str(tmp_path / "nowhere.npz")], "nothing at"),
        (["--input", case["--test"], "--out", case["--test"]], "an output file that does not exist yet"),
        (["--input", case["--test"], "--posterior", case["--weights"]], "a posterior written by save()"),
        (["--input", case["--test"], "--model", "helpers.assess_cases:segmenter", "--weights", _segmenter(tmp_path)],
         "the network that the posterior was fitted to"),
    ):  # fmt: skip
        assert cli.main([*base, *changes]) == 2
        assert message in capsys.readouterr().err


def _segmenter(folder):
    save_file(assess_cases.trained("segmentation"), folder / "segmenter.safetensors")
    return str(folder / "segmenter.safetensors")


@pytest.mark.parametrize("option", ["--batch-size", "--draws", "--threads"])
@pytest.mark.parametrize("value", ["-3", "0", "1.5", "1_0", "１", "x", ""])
def test_numbers_that_are_no_counts(option, value, case, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*change(case), f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: must be a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", "1_0"), ("--seed", "1.5"), ("--mean", "1_0"), ("--std", "nan")]
)
def test_numbers_as_python_alone_writes_them(option, value, case, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*change(case), option, value])
    assert ended.value.code == 2
    assert "must be" in capsys.readouterr().err


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_by_assess_and_by_predict(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(writing, "print_rows", full)
    assert cli.main([*change(case), "--quiet"]) == 2
    assert "expected a place to write to; got " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert cli.main([*change(case), "--quiet"]) == 0
    base = ["predict", "--model", case["--model"], "--weights", case["--weights"], "--input", case["--test"]]
    monkeypatch.setattr(writing, "print_rows", full)
    posterior = ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--out", str(tmp_path / "new.csv")]
    assert cli.main([*base, *posterior]) == 2
    assert "(No space left on device). Do this: choose another file or folder (--out)" in capsys.readouterr().err
    assert not (tmp_path / "new.csv").exists()


def test_targets_that_are_all_equal(tmp_path, capsys):
    arguments = assess_cases.write_case("regression", tmp_path)
    inputs, _ = assess_cases.wave(60, 1)
    assess_cases.write_csv(tmp_path / "test.csv", inputs, torch.full((60,), 2.5))
    code = cli.main(["assess", *arguments, "--out", str(tmp_path / "out")])
    assert (code == 0) == (tmp_path / "out" / "report.html").exists()
    assert "Traceback" not in capsys.readouterr().err


NOTES = {"temperature": -1.0, "draws": 0, "seed": "x", "engine": "magic", "threshold": None, "task": "magic",
         "reading": 5, "class_names": ["a"], "class_axis": 2, "novelty_level": "x"}  # fmt: skip


@pytest.mark.parametrize("key", NOTES)
@pytest.mark.parametrize("missing", [True, False])
def test_notes_of_a_posterior_that_cannot_be_right(key, missing):
    names = ["round", "flat", "long"]
    notes = {"task": "classification", "temperature": 1.5, "threshold": 0.7, "seed": 0, "draws": 1, "engine": "sample",
             "reading": {"schema": None, "class_names": names, "preprocessing": None}, "class_names": names,
             "class_axis": 1, "probabilities": None, "novelty_level": 0.01}  # fmt: skip
    require_outputs(checked_notes(notes), torch.zeros(2, 3))
    wrong = {k: v for k, v in notes.items() if k != key} if missing else notes | {key: NOTES[key]}
    with pytest.raises(BatchbayesError, match="Do this: "):
        require_outputs(checked_notes(wrong), torch.zeros(2, 3))


REACH = {"kind": "spread", "ramps": [[1.0, 2.0]], "below": [1.0, 2.0], "above": [1.0, 2.0]}


@pytest.mark.parametrize("change", [{"conformal_width": [-1.0]}, {"conformal_width": [1.0, 2.0]}, {"precision": 0.0},
                                    {"precision": [float("nan")]}, {"outputs": 2},
                                    {"threshold": [0.1, 0.2]}, {"intervals": 3}, {"intervals": [{"kind": "plain"}]},
                                    {"intervals": [REACH | {"kind": "odd"}]}, {"intervals": [REACH | {"above": [1]}]},
                                    {"intervals": [REACH | {"ramps": [[2.0, 1.0]]}]}, {"intervals": [REACH] * 2},
                                    {"intervals": [REACH | {"below": [-9.0, 1.0]}]}])  # fmt: skip
def test_notes_about_values_that_cannot_be_right(change):
    notes = {"task": "regression", "precision": 4.0, "threshold": [float("inf")], "seed": 0, "draws": 1, "outputs": 1,
             "engine": "sample", "reading": {}, "conformal_width": [1.7], "novelty_level": 0.0}  # fmt: skip
    require_outputs(checked_notes(notes), torch.zeros(2, 1))  # as version 0.2.0 wrote them
    require_outputs(checked_notes(notes | {"intervals": [REACH]}), torch.zeros(2, 1))
    with pytest.raises(BatchbayesError, match="the notes of an assessment"):
        require_outputs(checked_notes(notes | change), torch.zeros(2, 1))


def test_a_segmentation_with_classes_last_says_how_and_is_the_same_then():
    """Labels (N, 6, 9) say what the sides of outputs (N, 6, 9, 5) are."""
    network = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), Last()).eval()
    train, data = ((torch.randn(40, 3, 6, 9), torch.randint(0, 5, (40, 6, 9))) for _ in range(2))
    with pytest.raises(BatchbayesError, match=r"classes last.*likelihood=bb\.categorical\(class_axis=-1\)"):
        bb.assess(network, train, data, task="segmentation")
    last = bb.assess(network, train, data, likelihood=bb.categorical(class_axis=-1), batch_size=8)
    first = bb.assess(network[:2], train, data, task="segmentation", batch_size=8)
    assert repr(last) == repr(first)
    for one, other in zip(last.contenders, first.contenders, strict=True):
        assert one.metrics == pytest.approx(other.metrics)


class Last(nn.Module):
    def forward(self, outputs):
        return outputs.movedim(1, -1)
