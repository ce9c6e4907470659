from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from batchbayes import BatchbayesError, cli, experiments, reproduce
from batchbayes.experiments import Unit
from batchbayes.tables import Table


@dataclass(frozen=True)
class Config:
    factor: int


class Tiny:
    PRESETS = {"smoke": Config(2), "quick": Config(3)}  # noqa: RUF012

    def __init__(self) -> None:
        self.folders: list[object] = []

    def units(self, config: Config) -> list[Unit]:
        return [Unit("sum", {}, needs=("one", "two")), Unit("one", {"value": 1}), Unit("two", {"value": 2})]

    def work(self, config: Config, unit: Unit, needed: Mapping[str, Any], data_folder: object = None) -> float:
        self.folders.append(data_folder)
        return sum(needed.values()) if needed else 0.25 * config.factor * unit.arguments["value"]

    def tables(self, config: Config, results: Mapping[str, Any]) -> list[Table]:
        return [Table("All", ("name", "value"), tuple(results.items()), ("", ".1f"))]

    def figures(self, config: Config, results: Mapping[str, Any]) -> dict[str, Figure]:
        return {"picture": Figure()}

    def notes(self, config: Config) -> list[str]:
        return ["Tiny."]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    experiment = Tiny()
    monkeypatch.setattr(reproduce, "load_experiment", lambda name: experiment)
    return experiment


@pytest.mark.parametrize("name", experiments.ABOUT)
def test_every_experiment_has_the_shape_and_a_smoke_preset(name: str) -> None:
    found = experiments.load_experiment(name)
    assert "smoke" in found.PRESETS
    assert all(callable(part) for part in (found.units, found.work, found.tables, found.figures, found.notes))


def test_results_are_written(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["reproduce", "tiny", "--preset", "smoke", "--out", str(out), "--data-dir", "sets"]) == 0
    assert tiny.folders == [Path("sets")] * 3
    assert "| sum | 1.5 |" in (out / "table.md").read_text()
    assert (out / "figures" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"Tables and figures: {out}\n")


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
        reproduce.reproduce("tiny", "paper", tmp_path)
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(BatchbayesError, match="a folder for the results"):
        reproduce.reproduce("tiny", "smoke", tmp_path / "taken")
    assert tiny.folders == []
