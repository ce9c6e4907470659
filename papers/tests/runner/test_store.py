"""The results file: rows, claims, and files that are something else."""

import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from batchbayes_papers.runner import leases
from batchbayes_papers.runner.leases import ProcessIdentity, this_process
from batchbayes_papers.runner.records import RunSettings, UnitOutcome, to_json
from batchbayes_papers.runner.store import ResultStore, read_results
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbayes import BatchbayesError

RUN = RunSettings("tiny", "smoke", None, to_json({"count": 2, "seeds": [0]}))
VERSIONS = {"batchbayes": "0.1.0", "torch": "2", "numpy": "2", "python": "3"}


def outcome(value: object = 1.0) -> UnitOutcome:
    return UnitOutcome(to_json(value), ("careful",), 0.25, VERSIONS, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def claims(path: Path) -> dict[str, tuple[str, float]]:
    with sqlite3.connect(path) as connection:
        found = {name: (owner, expires) for name, owner, expires in connection.execute("SELECT * FROM claims")}
    connection.close()
    return found


def put_claim(path: Path, name: str, owner: ProcessIdentity, expires: float) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO claims VALUES (?, ?, ?)", (name, owner.to_text(), expires))
    connection.close()


def test_a_finished_unit_is_one_row_with_how_it_was_made(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        assert store.claim(["a", "b"], 1) == ["a"]
        store.finish("a", {"seed": 7, "split": 1}, outcome([0.1, None]))
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    (row,) = map(dict, connection.execute("SELECT * FROM units"))
    connection.close()
    assert (row["experiment"], row["name"], row["seed"], row["seconds"], row["cores"]) == ("tiny", "a", 7, 0.25, 4)
    assert json.loads(row["config"]) == {"count": 2, "seeds": [0]}
    assert len(row["config_hash"]) == 64
    assert json.loads(row["arguments"]) == {"seed": 7, "split": 1}
    assert json.loads(row["result"]) == [0.1, None]
    assert {package: row[package] for package in VERSIONS} == VERSIONS
    assert row["finished"].endswith("+00:00")
    found, finished = read_results(path)
    assert found == RUN
    assert finished["a"].warnings == ("careful",)


def test_a_unit_without_a_seed_has_the_seed_of_its_split(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        store.finish("a", {"split": 3}, outcome())
        store.finish("b", {"split": 3, "seed": 5}, outcome())
        store.finish("c", {}, outcome())
    with sqlite3.connect(path) as connection:
        assert list(connection.execute("SELECT name, seed FROM units")) == [("a", 3), ("b", 5), ("c", None)]
    connection.close()


def test_the_first_result_of_a_unit_stays(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        store.finish("a", {}, outcome(1.0))
        store.finish("a", {}, outcome(2.0))
        assert store.result("a") == 1.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(value=JSON, name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_results_keep_every_bit(value: object, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("results") / "file ?#%.sqlite"
    with ResultStore(path, RUN) as store:
        store.finish(name, {}, outcome(value))
        again = store.result(name)
    assert repr(again) == repr(json.loads(json.dumps(value, sort_keys=True)))  # repr: NaN, and -0.0
    assert repr(json.loads(read_results(path)[1][name].result)) == repr(again)


def test_nan_and_infinity_are_kept(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        store.finish("a", {}, outcome([math.nan, math.inf, -math.inf, 5e-324, 0.1 + 0.2]))
        again = store.result("a")
    assert math.isnan(again[0])
    assert again[1:] == [math.inf, -math.inf, 5e-324, 0.1 + 0.2]


ELSEWHERE = ProcessIdentity("elsewhere", 1, "1")
"""A process of another host, or of another namespace of process numbers: nobody here can see whether it lives."""


def test_claims_hold_while_their_process_lives(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = replace(this_process(), pid=process.pid, started=None)
    later = time.time() + 50
    with ResultStore(path, RUN) as store:
        put_claim(path, "alive", alive, later)
        put_claim(path, "reused process number", replace(this_process(), started="1"), later)
        put_claim(path, "another host", ELSEWHERE, later)
        put_claim(path, "another host, expired", ELSEWHERE, time.time() - 1)
        names = ["alive", "reused process number", "another host", "another host, expired", "free"]
        assert store.claim(names, 9) == ["reused process number", "another host, expired", "free"]
        process.communicate(b"\n")
        assert store.claim(["alive", "another host"], 9) == ["alive"]


def test_a_lease_from_a_wrong_clock_does_not_block_a_unit(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        put_claim(path, "a day ahead", ELSEWHERE, time.time() + 86400)
        put_claim(path, "usual", ELSEWHERE, time.time() + leases.LEASE_SECONDS)
        assert store.claim(["a day ahead", "usual"], 2) == ["a day ahead"]


def test_claims_are_extended_during_the_work_and_deleted_after_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.4)
    with ResultStore(path, RUN) as store:
        store.claim(["a", "b"], 2)
        (first,) = {expires for _, expires in claims(path).values()}
        until = time.monotonic() + 10
        while claims(path)["a"][1] == first and time.monotonic() < until:
            time.sleep(0.05)
        assert claims(path)["a"][1] > first
        store.release(["b"])
        assert list(claims(path)) == ["a"]
    assert claims(path) == {}


def test_a_closed_store_is_a_single_file(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        store.finish("a", {}, outcome())
        assert path.with_name("results.sqlite-wal").exists()
    assert [found.name for found in path.parent.iterdir()] == ["results.sqlite"]
    assert path.read_bytes()[18:20] == b"\x01\x01"  # no write-ahead log: readable where nothing may be written


def refused(path: Path, run: RunSettings = RUN) -> str:
    before = path.read_bytes()
    with pytest.raises(BatchbayesError) as caught:
        ResultStore(path, run)
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    return str(caught.value)


@pytest.fixture
def written(path: Path) -> Path:
    with ResultStore(path, RUN) as store:
        for number in range(80):
            store.finish(f"unit {number}", {}, outcome([float(number)] * 20))
    return path


def test_results_of_another_run_are_refused_and_not_changed(written: Path) -> None:
    assert "experiment tiny instead of huge" in refused(written, replace(RUN, experiment="huge"))
    assert "preset smoke instead of paper" in refused(written, replace(RUN, preset="paper"))
    text = refused(written, replace(RUN, config=to_json({"count": 3, "seeds": [0]})))
    assert "count 2 instead of 3" in text
    assert "seeds" not in text


def test_results_of_another_version_are_refused_and_not_changed(written: Path) -> None:
    with sqlite3.connect(written) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    assert "format version 1; got" in refused(written)
    with pytest.raises(BatchbayesError, match="with version 2"):
        read_results(written)


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()
    assert "another kind of database" in refused(path)


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000, b"x"])
def test_garbage_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "damaged or something else" in refused(path)
    with pytest.raises(BatchbayesError, match="damaged or something else"):
        read_results(path)


def test_a_damaged_file_is_refused(written: Path) -> None:
    content = bytearray(written.read_bytes())
    content[4096 * 3 : 4096 * 6] = os.urandom(4096 * 3)
    written.write_bytes(content)
    assert "damaged or something else" in refused(written)
    with pytest.raises(BatchbayesError, match="damaged or something else"):
        read_results(written)


def test_an_empty_file_is_a_new_store(path: Path) -> None:
    path.touch()
    with ResultStore(path, RUN) as store:
        assert store.finished() == {}


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchbayesError, match="nothing at"):
        read_results(tmp_path / "none.sqlite")
    with pytest.raises(BatchbayesError, match="that can be opened"):
        ResultStore(tmp_path / "no folder" / "results.sqlite", RUN)


def test_a_full_disk_keeps_what_is_finished(path: Path) -> None:
    with ResultStore(path, RUN) as store:
        store.finish("a", {}, outcome())
        store._connection.execute("PRAGMA max_page_count = 12")
        with pytest.raises(BatchbayesError, match=r"free space on a working disk .* free some space"):
            store.finish("b", {}, outcome([0.5] * 20_000))
        assert list(store.finished()) == ["a"]
        store.finish("c", {}, outcome())
    assert list(read_results(path)[1]) == ["a", "c"]
