from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from batchbayes import BatchbayesError, cli, experiments


@dataclass(frozen=True)
class Row:
    name: str
    value: float | None


class Tiny:
    PRESETS = {"smoke": 2, "quick": 3}  # noqa: RUF012

    def __init__(self) -> None:
        self.folders: list[object] = []

    def run(self, config: int, data_folder: object = None) -> list[Row]:
        self.folders.append(data_folder)
        return [Row("one", 0.5 * config), Row("none", None)]

    def table(self, rows: list[Row]) -> str:
        return "\n".join(row.name for row in rows)

    def figure(self, rows: list[Row]) -> Figure:
        return Figure()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    experiment = Tiny()
    monkeypatch.setattr(experiments, "load_experiment", lambda name: experiment)
    return experiment


@pytest.mark.parametrize("name", experiments.ABOUT)
def test_every_experiment_has_the_shape_and_a_smoke_preset(name: str) -> None:
    found = experiments.load_experiment(name)
    assert "smoke" in found.PRESETS
    assert all(callable(part) for part in (found.run, found.table, found.figure))


def test_results_are_written(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["reproduce", "tiny", "--preset", "smoke", "--out", str(out), "--data-dir", "sets"]) == 0
    assert tiny.folders == [Path("sets")]
    assert (out / "table.md").read_text() == "one\nnone\n"
    assert (out / "rows.csv").read_text() == "name,value\none,1.0\nnone,\n"
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(out.iterdir())) == 3
    assert capsys.readouterr().out == f"one\nnone\n\nTable, rows and figure: {out}\n"


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(experiments.ABOUT)


@pytest.mark.parametrize("arguments", [[], ["nonsense", "--out", "never"]])
def test_a_wrong_name_is_answered_with_help(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *arguments]) == 2
    assert capsys.readouterr().err.startswith("batchbayes reproduce: expected the name of an experiment")
    assert not list(tmp_path.iterdir())


def test_bad_presets_and_folders_are_refused_before_any_work(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BatchbayesError, match="one of: smoke, quick; got 'paper'"):
        experiments.reproduce("tiny", "paper", tmp_path)
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(BatchbayesError, match="a folder for the results"):
        experiments.reproduce("tiny", "smoke", tmp_path / "taken")
    assert tiny.folders == []
