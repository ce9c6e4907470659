"""The SQLite file behind a result store: open it, check it, read it, and explain what is wrong with it."""

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchbayes import BatchbayesError
from batchbayes_papers.runner.records import FinishedUnit, RunSettings, config_differences, to_json

FORMAT, VERSION = "batchbayes results", 1
SMALLEST_DATABASE_BYTES = 512
"""The smallest page size of SQLite."""
BUSY_SECONDS = 30.0
"""How long to wait while another process writes."""
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
UNIT_FIELDS = ("name", "arguments", "result", "warnings", "seconds", "cores", "finished")
PACKAGES = ("batchbayes", "torch", "numpy", "python")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a file in the SQLite mode "ro", "rw" or "rwc".

    Python's automatic transactions are switched off: they begin late, and then fail if another process has written.
    """
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit all changes of the block, or none of them if it raises an error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def create_or_check(connection: sqlite3.Connection, path: Path, settings: RunSettings) -> None:
    """Create the tables in a new file. Require that any other file belongs to the same run."""
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    with transaction(connection):
        if not _is_new(connection):
            require_same_run(connection, path, settings)
            return
        for statement in SCHEMA.strip().split(";\n"):
            connection.execute(statement)
        meta = {
            "format": FORMAT,
            "experiment": settings.experiment,
            "preset": settings.preset,
            "datasets": to_json(settings.datasets),
            "config": settings.config,
        }
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the log on. SQLite itself does not wait when two processes do this at the same time."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > until:
                raise
            time.sleep(0.05)


def require_database_size(path: Path) -> None:
    """Require an empty file or one as large as a database: SQLite treats a file of a few bytes as an empty one.

    This does not open the file: closing it again would drop the locks that SQLite holds in this process.
    """
    if path.is_dir():
        raise BatchbayesError(
            expected=f"a results file at {path}",
            got="a folder with that name",
            fix="choose another --out, or move the folder away; it was not changed",
        )
    if 0 < path.stat().st_size < SMALLEST_DATABASE_BYTES:
        raise sqlite3.DatabaseError("file is not a database")


def _is_new(connection: sqlite3.Connection) -> bool:
    """Return whether nothing was ever written. A run that was killed at its start may leave such a file."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def read_settings(connection: sqlite3.Connection, path: Path) -> RunSettings:
    """Return the settings of the run that wrote the file. Refuse a file that is damaged or something else."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    meta = dict(connection.execute("SELECT key, value FROM meta")) if "meta" in tables else {}
    if meta.get("format") != FORMAT:
        raise BatchbayesError(
            expected="a results file of batchbayes",
            got=f"{path}, which is another kind of database, or the file of a run that was killed at its start",
            fix="choose another folder",
        )
    if version != VERSION:
        raise BatchbayesError(
            expected=f"a results file with format version {VERSION}",
            got=f"{path} with version {version}",
            fix="choose another --out, or use the batchbayes version that wrote the file; it was not changed",
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)
    missing = [key for key in ("experiment", "preset", "datasets", "config") if not isinstance(meta.get(key), str)]
    if missing:
        raise damaged_file(path, f"the run has no {' and no '.join(missing)}")
    datasets, config = (parse_json(path, meta[key], f"{key} of the run") for key in ("datasets", "config"))
    if not isinstance(config, dict):
        raise damaged_file(path, "config of the run: not a set of fields")
    if datasets is not None and not _are_texts(datasets):
        raise damaged_file(path, "datasets of the run: not a list of names")
    names = None if datasets is None else tuple(datasets)
    return RunSettings(meta["experiment"], meta["preset"], names, meta["config"])


def read_units(connection: sqlite3.Connection, path: Path) -> dict[str, FinishedUnit]:
    """Return all finished units by name. Refuse a damaged row, and give the name of its unit."""
    found = {}
    columns = UNIT_FIELDS + PACKAGES
    for row in connection.execute(f"SELECT {', '.join(columns)} FROM units ORDER BY rowid"):
        cells = dict(zip(columns, row, strict=True))
        name, place = row[0], f"of the unit {row[0]!r}"
        for field, cell in cells.items():
            if not isinstance(cell, int | float if field in ("seconds", "cores") else str):
                raise damaged_file(path, f"{field} {place}")
        parse_json(path, cells["result"], f"result {place}")
        warnings = parse_json(path, cells["warnings"], f"warnings {place}")
        if not _are_texts(warnings):
            raise damaged_file(path, f"warnings {place}: not a list of texts")
        versions = {package: cells.pop(package) for package in PACKAGES}
        found[name] = FinishedUnit(**cells | {"warnings": tuple(warnings), "versions": versions})
    return found


def parse_json(path: Path, text: str, what: str) -> Any:
    """Parse JSON from the file; `what` names the text in the error message."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged_file(path, f"{what}: {error}") from error


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def require_same_run(connection: sqlite3.Connection, path: Path, settings: RunSettings) -> None:
    """Require that a file is new or belongs to a run with the same settings."""
    if _is_new(connection):
        return
    found = read_settings(connection, path)
    pairs = {"experiment": (settings.experiment, found.experiment), "preset": (settings.preset, found.preset)}
    differences = [f"{what} {own} instead of {wanted}" for what, (wanted, own) in pairs.items() if wanted != own]
    differences += config_differences(settings.config, found.config)
    if differences:
        raise BatchbayesError(
            expected=f"no results yet, or results of {settings.experiment} with preset {settings.preset}",
            got=f"{path} with {'; '.join(differences)}",
            fix="choose another --out, or run with the settings of the file; it was not changed",
        )


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the disk into messages that say what to do. Finished rows are kept."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise damaged_file(path, str(error)) from error
    except sqlite3.Error as error:
        raise _explanation(path, getattr(error, "sqlite_errorcode", None), str(error)) from error
    except OSError as error:
        raise _explanation(path, 0, os.strerror(error.errno or 0)) from error


def _explanation(path: Path, code: int | None, text: str) -> BatchbayesError:
    kind = None if code is None else code & 0xFF
    again = "then run the same command again: finished units are kept"
    if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return BatchbayesError(f"free space on a working disk for {path}", text, f"free some space, {again}")
    if kind == sqlite3.SQLITE_BUSY:
        got = f"another process that kept it locked for {BUSY_SECONDS:.0f} s"
        return BatchbayesError(f"that {path} can be written", got, f"end that process, {again}")
    if kind in (0, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        expected = f"a results file at {path} that can be opened"
        return BatchbayesError(expected, text, "check the folder and its permissions")
    return damaged_file(path, text)


def damaged_file(path: Path, text: str) -> BatchbayesError:
    """Return an error for a file that is damaged or not a results file; `text` says what is wrong."""
    return BatchbayesError(
        expected="a results file of batchbayes",
        got=f"{path}, which is damaged or something else ({text})",
        fix="choose another --out, or move the file away; it was not changed",
    )
