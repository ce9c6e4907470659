"""`batchbayes predict --parts`: data of any size, part by part."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers import assess_cases

from batchbayes import __version__, cli
from batchbayes._common.checks import install_command
from batchbayes.report.read.arrays import open_arrays
from batchbayes.report.read.sources import example_shape, read_examples

ROWS = 200
FEATURES = np.array(["left", "right"])


@pytest.fixture(scope="module")
def assessed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments of `predict` for a network that was assessed."""
    folder = tmp_path_factory.mktemp("assessed")
    arguments = assess_cases.write_case("regression", folder)
    assert cli.main(["assess", *arguments, "--out", str(folder / "report")]) == 0
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    common = ["--model", given["--model"], "--weights", given["--weights"], "--draws", "3", "--threads", "1"]
    common += ["--part-rows", "128"]
    return ["predict", *common, "--posterior", str(folder / "report" / "posterior.safetensors"), "--quiet"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write four files, in the ways in which arrays are stored."""
    folder = tmp_path_factory.mktemp("data")
    x = [assess_cases.wave(ROWS, seed)[0].numpy() for seed in range(3)]
    np.savez(folder / "a.npz", X=x[0], features=FEATURES, ids=np.array([f"id {i}" for i in range(ROWS)]))
    np.savez(
        folder / "b.npz", X=np.asfortranarray(x[1].astype(np.float64))[:, ::-1].T.copy().T, features=FEATURES[::-1]
    )
    np.savez_compressed(folder / "c.npz", X=x[2], features=FEATURES, other=np.zeros(ROWS))
    assess_cases.write_csv(folder / "d.csv", *assess_cases.wave(ROWS, 3))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_parts_say_what_predict_says_of_each_file(assessed: list[str], data: Path, tmp_path: Path) -> None:
    assert cli.main([*assessed, "--input", str(data), "--parts", str(tmp_path / "new" / "parts")]) == 0
    made = sorted((tmp_path / "new" / "parts").glob("part-*.csv"))
    assert len(made) == 8
    for number, path in enumerate(sorted(data.iterdir())):
        whole = tmp_path / f"{path.name}.csv"
        assert cli.main([*assessed, "--input", str(path), "--out", str(whole)]) == 0
        expected = whole.read_text().replace("\nnew,", f"\n{path},").splitlines()
        first, second = (part.read_text().splitlines() for part in made[2 * number : 2 * number + 2])
        assert [*first, *second[1:]] == expected


def test_a_run_that_was_stopped_continues(assessed: list[str], data: Path, tmp_path: Path, capsys) -> None:
    command = [*assessed, "--input", str(data / "a.npz"), str(data / "d.csv"), "--parts", str(tmp_path)]
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path), "parts": 4, "predictions": 400}
    whole = contents(tmp_path)
    for name in ("part-00001.csv", "part-00003.csv"):
        (tmp_path / name).unlink()
    (tmp_path / ".part-00001.csv.0.partial").write_text("half")
    kept = (tmp_path / "part-00000.csv").stat().st_mtime_ns
    assert cli.main(command) == 0
    assert contents(tmp_path) == whole
    assert (tmp_path / "part-00000.csv").stat().st_mtime_ns == kept
    assert cli.main([*command, "--seed", "7"]) == 2
    assert "the same posterior, inputs, draws, seed" in capsys.readouterr().err
    assert contents(tmp_path) == whole


def test_a_cluster_makes_the_same_parts(assessed: list[str], data: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra cluster")
    for name, more in (("near", []), ("far", ["--cluster", "local:1"])):
        assert cli.main([*assessed, "--input", str(data), "--parts", str(tmp_path / name), *more]) == 0
    assert contents(tmp_path / "far") == contents(tmp_path / "near")


def test_parquet_parts_have_the_columns_of_csv_and_the_same_bytes_after_a_stop(
    assessed: list[str], data: Path, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    command, out = [*assessed, "--input", str(data), "--parts"], tmp_path / "parquet"
    assert cli.main([*command, str(out), "--parquet"]) == 0
    assert cli.main([*command, str(tmp_path / "csv")]) == 0
    files, csvs = sorted(out.glob("*.parquet")), sorted((tmp_path / "csv").glob("*.csv"))
    assert [path.stem for path in files] == [path.stem for path in csvs]
    assert len({str(parquet.read_schema(path)) for path in files}) == 1
    assert parquet.read_schema(files[0]).metadata == {
        b"batchbayes": __version__.encode(),
        b"task": b"regression",
        b"draws": b"3",
        b"seed": b"0",
        b"engine": b"sample",
    }
    for path, csv_path in zip(files, csvs, strict=True):
        rows = parquet.read_table(path).to_pylist()
        with csv_path.open(newline="") as file:
            for row, wanted in zip(rows, csv.DictReader(file), strict=True):
                assert {key: "" if row[key] is None else str(row[key]) for key in wanted} == wanted
    # The folder is a data set for programs that read Parquet: all parts, and nothing else.
    assert parquet.read_table(out).num_rows == 4 * ROWS
    whole = contents(out)
    files[1].unlink()
    files[3].unlink()
    assert cli.main([*command, str(out), "--parquet"]) == 0
    assert contents(out) == whole
    if find_spec("distributed"):
        assert cli.main([*command, str(tmp_path / "far"), "--parquet", "--cluster", "local:1"]) == 0
        assert contents(tmp_path / "far") == whole


def test_parquet_without_its_package_is_refused_before_any_work(
    assessed: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("batchbayes._common.checks.find_spec", lambda name: None)
    out = tmp_path / "new"
    assert cli.main([*assessed, "--input", str(data), "--parts", str(out), "--parquet"]) == 2
    assert f"got no pyarrow. Do this: {install_command('parquet')}." in capsys.readouterr().err
    assert not out.exists()


def test_progress_is_lines_where_there_is_no_terminal(assessed: list[str], data: Path, tmp_path: Path, capsys) -> None:
    command = [word for word in assessed if word != "--quiet"] + ["--input", str(data), "--parts", str(tmp_path)]
    assert cli.main(command) == 0
    assert "predicting parts: 0 of 8 done" in capsys.readouterr().err.splitlines()
    (tmp_path / "part-00001.csv").unlink()
    assert cli.main(command) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "7 of 8 parts were made before",
        "predicting parts: 0 of 1 done",
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--input", "a.npz", "d.csv"], "--parts DIR beside several inputs"),
        (["--input", "a.npz", "--cluster", "local:1"], "--parts DIR beside several inputs"),
        (["--input", "a.npz", "--parquet"], "a cluster or --parquet"),
        (["--input", "a.npz", "--parts", "new", "--out", "x.csv"], "--parts alone"),
        (["--input", "helpers.assess_cases:scene_test", "--parts", "new"], "files or folders beside --parts"),
        (["--input", "no.npz", "--parts", "new"], "nothing at no.npz"),
        (["--input", "a.npz", "--parts", "."], "a new folder for the parts"),
        (["--input", "a.npz", "--parts", "a.npz"], "a place to write to"),
    ],
)
def test_bad_options_say_what_to_do(options, told, assessed, data, monkeypatch, capsys) -> None:
    monkeypatch.chdir(data)
    before = contents(data)
    assert cli.main([*assessed, *options]) == 2
    assert told in capsys.readouterr().err
    assert contents(data) == before


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_some_rows_of_an_array_are_read(order, save, tmp_path) -> None:
    values = np.asarray(np.random.default_rng(0).standard_normal((30, 3, 4, 5)), order=order)
    save(tmp_path / "a.npz", X=values, y=np.arange(30), text=np.array("one"))
    with open_arrays(tmp_path / "a.npz") as arrays:
        for rows in (range(0, 30), range(7, 11), range(29, 30), range(4, 4)):
            assert (arrays["X"].read(rows) == values[rows.start : rows.stop]).all()
            assert arrays["y"].read(rows).tolist() == list(rows)
        assert arrays["text"].read(None) == "one"
    assert example_shape(tmp_path / "a.npz") == (30, 3, 4, 5)


@pytest.mark.parametrize("kind", ["parquet", "zarr"])
def test_some_rows_of_other_files_are_read(kind, tmp_path) -> None:
    pytest.importorskip({"parquet": "pyarrow"}.get(kind, kind), reason=f"needs a package for {kind}")
    path, x = tmp_path / f"a.{kind}", np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    if kind == "zarr":
        import zarr

        zarr.save_group(str(path), X=x)
    else:
        from pyarrow import parquet, table

        parquet.write_table(table({"left": x[:, 0], "right": x[:, 1]}), path, row_group_size=7)
    assert example_shape(path) == (50, 2)
    for rows in (None, range(0, 50), range(6, 15), range(49, 50)):
        read = read_examples(path, inputs_only=True, rows=rows)
        wanted = x if rows is None else x[rows.start : rows.stop]
        np.testing.assert_allclose(next(iter(read))[0], wanted, rtol=1e-6)


def test_a_damaged_array_is_refused(assessed: list[str], data: Path, tmp_path: Path, capsys) -> None:
    whole = (data / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:-300])
    assert cli.main([*assessed, "--input", str(tmp_path / "a.npz"), "--parts", str(tmp_path / "new")]) == 2
    assert "arrays of numbers" in capsys.readouterr().err
