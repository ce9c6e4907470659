"""The SQLite file behind the results: opening, checking and writing it, and what to say when that fails."""

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchbayes.errors import BatchbayesError
from batchbayes.reproduce.results.rows import Finished, Run, config_differences, to_json

FORMAT, VERSION = "batchbayes results", 1
LEAST_BYTES = 512
"""Of a page of SQLite."""
PATIENCE_SECONDS = 30.0
"""How long to wait for another process that is writing."""
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE units (
  name TEXT PRIMARY KEY, experiment TEXT NOT NULL, config TEXT NOT NULL, config_hash TEXT NOT NULL,
  arguments TEXT NOT NULL, seed INTEGER, result TEXT NOT NULL, warnings TEXT NOT NULL, seconds REAL NOT NULL,
  batchbayes TEXT NOT NULL, torch TEXT NOT NULL, numpy TEXT NOT NULL, python TEXT NOT NULL, cores INTEGER NOT NULL,
  finished TEXT NOT NULL
) STRICT;
CREATE TABLE claims (name TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL) STRICT;
"""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Without the module's own transactions, which begin late and then fail when another process has written."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=PATIENCE_SECONDS, isolation_level=None)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def prepare(connection: sqlite3.Connection, path: Path, run: Run) -> None:
    """Make the tables where there are none; otherwise the file must be of this run."""
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    with transaction(connection):
        if not _is_new(connection):
            require_same(connection, path, run)
            return
        for statement in SCHEMA.strip().split(";\n"):
            connection.execute(statement)
        meta = {
            "format": FORMAT,
            "experiment": run.experiment,
            "preset": run.preset,
            "datasets": to_json(run.datasets),
            "config": run.config,
        }
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite does not wait by itself when two processes do this at once."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def require_size(path: Path) -> None:
    """Nothing at all, or enough for a database: SQLite would take a file of a few bytes for an empty one.

    The file is not opened for this: closing it would drop the locks that SQLite holds in this process.
    """
    if path.is_dir():
        raise BatchbayesError(
            expected=f"a file of results at {path}",
            got="a folder of that name",
            fix="choose another --out, or move the folder away; it is left as it was",
        )
    if 0 < path.stat().st_size < LEAST_BYTES:
        raise sqlite3.DatabaseError("file is not a database")


def _is_new(connection: sqlite3.Connection) -> bool:
    """Whether nothing was ever written: a run that was killed at once may leave such a file."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def run_of(connection: sqlite3.Connection, path: Path) -> Run:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    meta = dict(connection.execute("SELECT key, value FROM meta")) if "meta" in tables else {}
    if meta.get("format") != FORMAT:
        raise BatchbayesError(
            expected="a file of results of batchbayes",
            got=f"{path}, a database of something else, or of a run that was killed before it began",
            fix="choose another folder",
        )
    if version != VERSION:
        raise BatchbayesError(
            expected=f"a file of results of format version {VERSION}",
            got=f"{path} of version {version}",
            fix="choose another --out, or use the batchbayes that wrote it; it is left as it was",
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)
    missing = [key for key in ("experiment", "preset", "datasets", "config") if not isinstance(meta.get(key), str)]
    if missing:
        raise damaged(path, f"no {' and no '.join(missing)} of the run")
    datasets, config = (parsed(path, meta[key], f"{key} of the run") for key in ("datasets", "config"))
    if not isinstance(config, dict):
        raise damaged(path, "config of the run: no fields")
    if datasets is not None and not _are_texts(datasets):
        raise damaged(path, "datasets of the run: no names")
    return Run(meta["experiment"], meta["preset"], None if datasets is None else tuple(datasets), meta["config"])


def rows_of(connection: sqlite3.Connection, path: Path) -> dict[str, Finished]:
    """All finished units, by name; what is not as it was written is refused, with the name of the unit."""
    fields = ("name", "arguments", "result", "warnings", "seconds", "cores", "finished")
    packages = ("batchbayes", "torch", "numpy", "python")
    found = {}
    for row in connection.execute(f"SELECT {', '.join(fields + packages)} FROM units ORDER BY rowid"):
        cells = dict(zip(fields + packages, row, strict=True))
        name, place = row[0], f"of the unit {row[0]!r}"
        for field, cell in cells.items():
            if not isinstance(cell, int | float if field in ("seconds", "cores") else str):
                raise damaged(path, f"{field} {place}")
        parsed(path, cells["result"], f"result {place}")
        warnings = parsed(path, cells["warnings"], f"warnings {place}")
        if not _are_texts(warnings):
            raise damaged(path, f"warnings {place}: no texts")
        versions = {package: cells.pop(package) for package in packages}
        found[name] = Finished(**cells | {"warnings": tuple(warnings), "versions": versions})
    return found


def parsed(path: Path, text: str, what: str) -> Any:
    """JSON from the file."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"{what}: {error}") from error


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def require_same(connection: sqlite3.Connection, path: Path, run: Run) -> None:
    if _is_new(connection):
        return
    found = run_of(connection, path)
    differences = [
        f"{what} {ours} instead of {theirs}"
        for what, theirs, ours in (
            ("experiment", run.experiment, found.experiment),
            ("preset", run.preset, found.preset),
            *config_differences(run.config, found.config),
        )
        if ours != theirs
    ]
    if differences:
        raise BatchbayesError(
            expected=f"results of {run.experiment}, preset {run.preset}, or none",
            got=f"{path} with {'; '.join(differences)}",
            fix="choose another --out, or run it as it was begun; it is left as it was",
        )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the disk, in words that say what to do. Rows that are finished stay."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise damaged(path, str(error)) from error
    except sqlite3.Error as error:
        raise _explanation(path, getattr(error, "sqlite_errorcode", None), str(error)) from error
    except OSError as error:
        raise _explanation(path, 0, os.strerror(error.errno or 0)) from error


def _explanation(path: Path, code: int | None, text: str) -> BatchbayesError:
    kind = None if code is None else code & 0xFF
    if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return BatchbayesError(
            expected=f"room and a working disk for {path}",
            got=text,
            fix="make room, then run the same command again: what is finished is kept",
        )
    if kind == sqlite3.SQLITE_BUSY:
        return BatchbayesError(
            expected=f"a turn to write to {path}",
            got=f"another process that kept it for {PATIENCE_SECONDS:.0f} s",
            fix="end that process, then run the same command again",
        )
    if kind in (0, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return BatchbayesError(
            expected=f"a file of results at {path} that can be opened", got=text, fix="check the folder and its rights"
        )
    return damaged(path, text)


def damaged(path: Path, text: str) -> BatchbayesError:
    """An error for a file that is not as it was written."""
    return BatchbayesError(
        expected="a file of results of batchbayes",
        got=f"{path}, which is damaged or something else ({text})",
        fix="choose another --out, or move the file away; it is left as it was",
    )
