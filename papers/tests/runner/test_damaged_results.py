"""Damaged results files are refused. The message names the unit, and the file is not changed."""

import json
import math
import sqlite3
import time
from pathlib import Path

import pytest
from batchbayes_papers.mcbn import uci as mcbn_uci
from batchbayes_papers.mcbn.tables import has_test, summary, values_of
from batchbayes_papers.runner.leases import this_process
from batchbayes_papers.runner.records import RunSettings, UnitOutcome, to_json
from batchbayes_papers.runner.store import ResultStore

from batchbayes import BatchbayesError, cli

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert reproduce(folder) == 0
    return folder


def reproduce(out: Path) -> int:
    arguments = ["reproduce", "own.tiny", "--preset", "smoke", "--out", str(out), "--workers", "1", "--quiet"]
    return cli.main(arguments)


def change(out: Path, statement: str, *values: object) -> bytes:
    connection = sqlite3.connect(out / "results.sqlite")
    with connection:
        connection.execute(statement, values)
    connection.close()
    return (out / "results.sqlite").read_bytes()


DAMAGES = {
    "a key is missing": ("DELETE FROM meta WHERE key = 'preset'", "the run has no preset"),
    "two keys are missing": (
        "DELETE FROM meta WHERE key LIKE '%e%' AND key <> 'format'",
        "the run has no experiment and no preset",
    ),
    "config": ("UPDATE meta SET value = '{' WHERE key = 'config'", "config of the run: Expecting"),
    "config of another shape": (
        "UPDATE meta SET value = '[1]' WHERE key = 'config'",
        "config of the run: not a set of fields",
    ),
    "datasets": ("UPDATE meta SET value = '[\"first' WHERE key = 'datasets'", "datasets of the run: Unterminated"),
    "datasets of another shape": (
        "UPDATE meta SET value = '[1]' WHERE key = 'datasets'",
        "datasets of the run: not a list",
    ),
    "result": ("UPDATE units SET result = '[0.' WHERE name = 'first, sum'", "result of the unit 'first, sum': Exp"),
    "empty result": (
        "UPDATE units SET result = '{}' WHERE name = 'second, sum'",
        "the result of the unit 'second, sum', wh",
    ),
    "warnings": ("UPDATE units SET warnings = '' WHERE name = 'first, sum'", "warnings of the unit 'first, sum': Exp"),
    "other warnings": (
        "UPDATE units SET warnings = '[[]]' WHERE name = 'first, sum'",
        "'first, sum': not a list of texts",
    ),
    "bytes": ("UPDATE units SET result = CAST(x'5BFF5D' AS TEXT) WHERE name = 'first, sum'", "damaged or something"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_message_names_the_damage(damage: str, out: Path, capsys: Printed) -> None:
    statement, answer = DAMAGES[damage]
    before = change(out, statement)
    assert cli.main(["table", "own.tiny", str(out)]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert "damaged or something else" in error
    assert (out / "results.sqlite").read_bytes() == before
    assert reproduce(out) == 2
    assert "damaged or something else" in capsys.readouterr().err


@pytest.mark.parametrize("owner", ["", "{", "{}", "[1]", json.dumps({"host": "a", "pid": 2**40, "started": None})])
def test_a_claim_without_a_process_is_refused(owner: str, tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    with ResultStore(path, RunSettings("tiny", "smoke", None, "{}")) as store:
        change(tmp_path, "INSERT INTO claims VALUES ('a', ?, ?)", owner, time.time() + 50)
        with pytest.raises(BatchbayesError, match=r"damaged or something else .claim on the unit 'a'"):
            store.claim(["a", "b"], 1)
        assert store.finished() == {}
    assert this_process().to_text() not in path.read_text(errors="replace")


def test_a_damaged_result_that_another_unit_needs_is_refused(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "results.sqlite", RunSettings("tiny", "smoke", None, "{}")) as store:
        versions = dict.fromkeys(("batchbayes", "torch", "numpy", "python"), "1")
        store.finish("a", {}, UnitOutcome("{'", (), 0.1, versions, 1))
        with pytest.raises(BatchbayesError, match="result of the unit 'a'"):
            store.result("a")


def test_a_bug_in_the_tables_is_not_reported_as_damage(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from own import tiny

    monkeypatch.setattr(tiny, "tables", lambda config, results: [][0])
    with pytest.raises(IndexError):
        cli.main(["table", "own.tiny", str(out)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_tables_accept_infinite_and_nan_scores(value: float) -> None:
    config = mcbn_uci.PRESETS["quick"]
    metrics = ("rmse", "crps", "pll", "crps_norm", "pll_norm")
    runs = [dict.fromkeys(metrics, number) for number in (1.0, value, -value)]
    methods = ("MCBN", "MCBN, tuned by CRPS", "MCBN, tuned by PLL", "ensemble")
    results = {"boston, split 1, BN, test": json.loads(to_json({"runs": dict.fromkeys(methods, runs)}))}
    tables = mcbn_uci.tables(config, results)
    (row,) = [row for row in tables[3].rows if row[:2] == ("boston", "MCBN")]
    assert row[7] is None  # no p-value
    assert not has_test([1.0, value])
    assert summary(values_of({"a": {"m": runs}}, "a", "m", "pll"))[2] == 3
