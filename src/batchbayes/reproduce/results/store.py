"""The results of a run, open for claiming units and for finishing them."""

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchbayes.errors import BatchbayesError
from batchbayes.reproduce.results.file import (
    connect,
    damaged,
    explained,
    parsed,
    prepare,
    require_same,
    require_size,
    rows_of,
    run_of,
    transaction,
)
from batchbayes.reproduce.results.leases import LEASE_SECONDS, Owner, is_dead, this_process
from batchbayes.reproduce.results.rows import Finished, Outcome, Run, to_json


class Results:
    """An open file. Use it in a `with` block, which also keeps the claims alive."""

    def __init__(self, path: Path, run: Run, lease_seconds: float = LEASE_SECONDS) -> None:
        self.path, self.run, self._lease_seconds = path, run, lease_seconds
        self._owner = this_process()
        with explained(path):
            if path.exists():  # look before anything is written, so that what is refused stays as it was
                require_size(path)
                with closing(connect(path, "ro")) as connection:
                    require_same(connection, path, run)
            self._connection = connect(path, "rwc")
            try:
                prepare(self._connection, path, run)
            except BaseException:
                self._connection.close()
                raise
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._heart.join()
        try:
            with self._transaction() as connection:
                connection.execute("DELETE FROM claims WHERE owner = ?", (self._owner.text(),))
            # As one plain file it can be copied, and read where nothing may be written. Others may still be using it.
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE")
        except (sqlite3.Error, BatchbayesError):
            pass  # a claim that cannot be given back ends by itself
        self._connection.close()

    def finished(self) -> dict[str, Finished]:
        """All rows, by name of unit; those of other processes too."""
        with explained(self.path):
            return rows_of(self._connection, self.path)

    def result(self, name: str) -> Any:
        """That of one finished unit, read from the file, so that it is the same whoever made it."""
        with explained(self.path):
            (text,) = self._connection.execute("SELECT result FROM units WHERE name = ?", (name,)).fetchone()
        return parsed(self.path, text, f"result of the unit {name!r}")

    def seconds(self) -> dict[str, float]:
        """How long each finished unit took."""
        with explained(self.path):
            return dict(self._connection.execute("SELECT name, seconds FROM units"))

    def claim(self, names: Sequence[str], count: int) -> list[str]:
        """Take up to `count` of the units that nobody has finished or is working on, the first first."""
        if not names or count < 1:
            return []
        with self._transaction() as connection:
            taken = {name for (name,) in connection.execute("SELECT name FROM units")}
            taken |= {
                name
                for name, owner, expires in connection.execute("SELECT name, owner, expires FROM claims")
                if owner != self._owner.text() and expires > time.time() and not is_dead(self._claimant(name, owner))
            }
            chosen = [name for name in names if name not in taken][:count]
            expires = time.time() + self._lease_seconds
            connection.executemany(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?)",
                [(name, self._owner.text(), expires) for name in chosen],
            )
        return chosen

    def _claimant(self, name: str, owner: str) -> Owner:
        try:
            return Owner.of(owner)
        except ValueError as error:
            raise damaged(self.path, f"claim on the unit {name!r}: {error}") from error

    def finish(self, name: str, arguments: Mapping[str, Any], outcome: Outcome) -> None:
        """Keep a result and end its claim, both or neither. Of two results of a unit the first stays."""
        seed = arguments.get("seed", arguments.get("split"))  # a split is named by its seed
        values = {
            "name": name,
            "experiment": self.run.experiment,
            "config": self.run.config,
            "config_hash": hashlib.sha256(self.run.config.encode()).hexdigest(),
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
            self._give_back(connection, [name])

    def release(self, names: Sequence[str]) -> None:
        """Give units back that are not finished."""
        with self._transaction() as connection:
            self._give_back(connection, names)

    def _give_back(self, connection: sqlite3.Connection, names: Sequence[str]) -> None:
        connection.executemany(
            "DELETE FROM claims WHERE name = ? AND owner = ?", [(name, self._owner.text()) for name in names]
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with explained(self.path), transaction(self._connection) as connection:
            yield connection

    def _beat(self) -> None:
        """Extend the leases for as long as the process lives."""
        while not self._stop.wait(self._lease_seconds / 4):
            try:
                with closing(connect(self.path, "rw")) as connection, transaction(connection):
                    connection.execute(
                        "UPDATE claims SET expires = ? WHERE owner = ?",
                        (time.time() + self._lease_seconds, self._owner.text()),
                    )
            except sqlite3.Error:
                continue  # what is wrong with the file is said by whoever writes a result to it


def read_results(path: Path) -> tuple[Run, dict[str, Finished]]:
    """What a file is about and its rows, without writing to it."""
    if not path.exists():
        raise BatchbayesError(
            expected="a file of results", got=f"nothing at {path}", fix="name the --out folder of a reproduce command"
        )
    with explained(path):
        require_size(path)
    with explained(path), closing(connect(path, "ro")) as connection:
        return run_of(connection, path), rows_of(connection, path)
