"""Which data sets: by commas, by spaces, again and again, in any order."""

import sqlite3
from pathlib import Path

import pytest

from batchbayes import cli
from batchbayes.reproduce.store import read_results

WAYS = [
    ["--datasets", "third,first"],
    ["--datasets", "first", "third"],
    ["--datasets", "third", "--datasets", "first"],
    ["--datasets", "first,", "third"],
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def reproduce(*options: str) -> int:
    return cli.main(["reproduce", "own.tiny", "--preset", "smoke", "--workers", "1", *options])


def test_all_ways_are_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    for number, way in enumerate(WAYS):
        assert reproduce(*way) == 0
        assert ("8 of 8 units were finished before" in capsys.readouterr().err) == (number > 0)
    assert [folder.name for folder in Path("runs").iterdir()] == ["own.tiny-smoke-first-third"]
    assert read_results(Path("runs/own.tiny-smoke-first-third/results.sqlite"))[0].datasets == ("first", "third")


def test_a_run_that_was_begun_in_another_order_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """As files were written when the order was that of the command."""
    old = Path("runs/own.tiny-smoke-third-first")
    assert reproduce("--datasets", "first,third", "--out", str(old)) == 0
    connection = sqlite3.connect(old / "results.sqlite")
    with connection:
        own, given = '["first", "third"]', '["third", "first"]'
        connection.execute("UPDATE meta SET value = ? WHERE key = 'datasets'", (given,))
        connection.execute("UPDATE meta SET value = replace(value, ?, ?) WHERE key = 'config'", (own, given))
    connection.close()
    assert given in read_results(old / "results.sqlite")[0].config
    capsys.readouterr()
    assert reproduce("--datasets", "third,first") == 0
    assert reproduce("--datasets", "first,third", "--out", str(old)) == 0
    assert capsys.readouterr().err == "8 of 8 units were finished before\n" * 2
    assert cli.main(["table", "own.tiny", str(old)]) == 0
    assert [folder.name for folder in Path("runs").iterdir()] == [old.name]


@pytest.mark.parametrize("number", ["two", "0", "-1", "1.5"])
def test_a_number_of_workers_is_asked_for_in_words(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce(f"--workers={number}")
    assert f"argument --workers: must be a whole number, 1 or more, and not '{number}'" in capsys.readouterr().err
