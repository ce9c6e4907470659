"""The results of a run in an SQLite file: one row for each finished unit, and the claims on units in work.

A process claims a unit before it works on it, and writes the result in one transaction. So a run may be killed at any
moment, and several processes may share one file. All of them must run on one machine: they share the memory of SQLite's
write-ahead log.
"""

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from batchbayes import BatchbayesError
from batchbayes_papers.runner import database, leases
from batchbayes_papers.runner.database import connect, damaged_file, explained_errors, transaction
from batchbayes_papers.runner.records import FinishedUnit, RunSettings, UnitOutcome, to_json


class ResultStore:
    """An open results file. Use it in a `with` block, which also extends the leases of its claims."""

    def __init__(self, path: Path, settings: RunSettings) -> None:
        self.path, self.settings = path, settings
        self._owner = leases.this_process().to_text()
        with explained_errors(path):
            if path.exists():  # check before anything is written, so that a refused file stays unchanged
                database.require_database_size(path)
                with closing(connect(path, "ro")) as connection:
                    database.require_same_run(connection, path, settings)
            self._connection = connect(path, "rwc")
            try:
                database.create_or_check(self._connection, path, settings)
            except BaseException:
                self._connection.close()
                raise
        self._stop = threading.Event()
        self._extender = threading.Thread(target=self._extend_leases, daemon=True)

    def __enter__(self) -> Self:
        self._extender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._extender.join()
        try:
            with self._transaction() as connection:
                connection.execute("DELETE FROM claims WHERE owner = ?", (self._owner,))
            # One plain file can be copied, and can be read in a read-only folder. Other processes may still use it.
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        except (sqlite3.Error, BatchbayesError):
            pass  # a claim that is not deleted ends with its lease
        self._connection.close()

    def finished(self) -> dict[str, FinishedUnit]:
        """Return all finished units by name, also those that other processes finished."""
        with explained_errors(self.path):
            return database.read_units(self._connection, self.path)

    def result(self, name: str) -> Any:
        """Return the result of a finished unit. It comes from the file, so it does not depend on who made it."""
        with explained_errors(self.path):
            (text,) = self._connection.execute("SELECT result FROM units WHERE name = ?", (name,)).fetchone()
        return database.parse_json(self.path, text, f"result of the unit {name!r}")

    def seconds(self) -> dict[str, float]:
        """Return how long each finished unit took."""
        with explained_errors(self.path):
            return dict(self._connection.execute("SELECT name, seconds FROM units"))

    def claim(self, names: Sequence[str], count: int) -> list[str]:
        """Claim the first units, at most `count`, that are not finished and that no other process has claimed."""
        if not names or count < 1:
            return []
        with self._transaction() as connection:
            taken = {name for (name,) in connection.execute("SELECT name FROM units")}
            claims = connection.execute("SELECT name, owner, expires FROM claims WHERE owner != ?", (self._owner,))
            taken |= {name for name, owner, expires in claims if self._claim_holds(name, owner, expires)}
            chosen = [name for name in names if name not in taken][:count]
            expires = time.time() + leases.LEASE_SECONDS
            connection.executemany(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", [(name, self._owner, expires) for name in chosen]
            )
        return chosen

    def _claim_holds(self, name: str, owner: str, expires: float) -> bool:
        try:
            return leases.lease_holds(expires) and not leases.has_ended(leases.ProcessIdentity.from_text(owner))
        except ValueError as error:
            raise damaged_file(self.path, f"claim on the unit {name!r}: {error}") from error

    def finish(self, name: str, arguments: Mapping[str, Any], outcome: UnitOutcome) -> None:
        """Save a result and delete its claim, in one transaction. If the unit has a result already, that one stays."""
        seed = arguments.get("seed", arguments.get("split"))  # the number of a split is its seed
        values = {
            "name": name,
            "experiment": self.settings.experiment,
            "config": self.settings.config,
            "config_hash": hashlib.sha256(self.settings.config.encode()).hexdigest(),
            "arguments": to_json(arguments),
            "seed": seed if isinstance(seed, int) else None,
            "result": outcome.result,
            "warnings": to_json(outcome.warnings),
            "seconds": outcome.seconds,
            **outcome.versions,
            "cores": outcome.cores,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        places = ", ".join(f":{key}" for key in values)
        with self._transaction() as connection:
            connection.execute(f"INSERT OR IGNORE INTO units ({', '.join(values)}) VALUES ({places})", values)
            self._delete_claims(connection, [name])

    def release(self, names: Sequence[str]) -> None:
        """Give up the claims on units that are not finished."""
        with self._transaction() as connection:
            self._delete_claims(connection, names)

    def _delete_claims(self, connection: sqlite3.Connection, names: Sequence[str]) -> None:
        rows = [(name, self._owner) for name in names]
        connection.executemany("DELETE FROM claims WHERE name = ? AND owner = ?", rows)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with explained_errors(self.path), transaction(self._connection) as connection:
            yield connection

    def _extend_leases(self) -> None:
        """Extend the leases of this process until the store is closed."""
        while not self._stop.wait(leases.LEASE_SECONDS / 4):
            try:
                with closing(connect(self.path, "rw")) as connection, transaction(connection):
                    values = time.time() + leases.LEASE_SECONDS, self._owner
                    connection.execute("UPDATE claims SET expires = ? WHERE owner = ?", values)
            except sqlite3.Error:
                continue  # the next write of a result reports what is wrong with the file


def read_results(path: Path) -> tuple[RunSettings, dict[str, FinishedUnit]]:
    """Return the settings and the finished units of a results file, without writing to it."""
    if not path.exists():
        raise BatchbayesError(
            expected="a results file", got=f"nothing at {path}", fix="give the --out folder of a reproduce command"
        )
    with explained_errors(path):
        database.require_database_size(path)
        with closing(connect(path, "ro")) as connection:
            return database.read_settings(connection, path), database.read_units(connection, path)
