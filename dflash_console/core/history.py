"""What this operator evaluated and staged: a SQLite file of the console's own, never needed to do the work.

Loss of the file loses no result: `result.json` on the host is the record. Every failure here is a
HistoryError that callers turn into a warning.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import platformdirs

__all__ = ["EvaluationRow", "History", "HistoryError", "StagingRow", "default_path"]

SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE evaluations (
  evaluation_id TEXT NOT NULL, host TEXT NOT NULL, finished REAL NOT NULL, job TEXT NOT NULL,
  run TEXT NOT NULL, checkpoint TEXT NOT NULL, step INTEGER,
  target TEXT NOT NULL, tau REAL NOT NULL, result TEXT NOT NULL,
  PRIMARY KEY (evaluation_id, host)
);
CREATE TABLE stagings (
  id INTEGER PRIMARY KEY, finished REAL NOT NULL, source TEXT NOT NULL, destination TEXT NOT NULL,
  run TEXT NOT NULL, checkpoint TEXT NOT NULL, fingerprint TEXT NOT NULL,
  bytes_sent INTEGER NOT NULL, bytes_reused INTEGER NOT NULL, seconds REAL NOT NULL
);
CREATE INDEX evaluations_by_time ON evaluations (finished);
CREATE INDEX stagings_by_time ON stagings (finished);
"""


class HistoryError(Exception):
    """The history cannot be read or written; the message is one sentence for a warning."""


class EvaluationRow(msgspec.Struct, frozen=True):
    """One finished evaluation. `finished`: Unix seconds of this machine; `tau`: pooled acceptance length."""

    evaluation_id: str
    host: str
    finished: float
    job: str
    run: str
    checkpoint: str
    step: int | None
    target: str
    tau: float
    result: dict[str, Any]


class StagingRow(msgspec.Struct, frozen=True):
    """One finished staging; `fingerprint` is the model fingerprint of what was staged."""

    finished: float
    source: str
    destination: str
    run: str
    checkpoint: str
    fingerprint: str
    bytes_sent: int
    bytes_reused: int
    seconds: float


def default_path() -> Path:
    """`history.sqlite3` in DFLASH_DATA_DIR, or in the user's data folder for dflash-ops."""
    folder = os.environ.get("DFLASH_DATA_DIR") or platformdirs.user_data_dir("dflash-ops")
    return Path(folder) / "history.sqlite3"


class History:
    """An open history file; several consoles may have it open at once."""

    def __init__(self, path: Path | None = None) -> None:
        """Open, or create with its folder. Raises HistoryError, also for a file of a newer schema."""
        self.path = path or default_path()
        with _as_history_error(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with _as_history_error(self.path):
                self._prepare()
        except HistoryError:
            self._db.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def add_evaluation(self, row: EvaluationRow) -> None:
        """Store a result; the same evaluation on the same host replaces its row. Raises HistoryError."""
        values = msgspec.structs.asdict(row) | {"result": json.dumps(row.result, sort_keys=True)}
        self._insert("INSERT OR REPLACE", "evaluations", values)

    def add_staging(self, row: StagingRow) -> None:
        """Store a staging. Raises HistoryError."""
        self._insert("INSERT", "stagings", msgspec.structs.asdict(row))

    def evaluations(self, limit: int = 100) -> list[EvaluationRow]:
        """The newest evaluations, newest first. Raises HistoryError."""
        return [EvaluationRow(**row) for row in self._newest("evaluations", EvaluationRow, limit)]

    def stagings(self, limit: int = 100) -> list[StagingRow]:
        """The newest stagings, newest first. Raises HistoryError."""
        return [StagingRow(**row) for row in self._newest("stagings", StagingRow, limit)]

    def _prepare(self) -> None:
        version = self._version()
        if version == 0:
            self._db.execute("PRAGMA journal_mode=WAL")
            # Another console may create the tables at this moment: the version is read again under the lock.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if self._version() == 0:
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                self._db.execute("COMMIT")
            except sqlite3.Error:
                self._db.execute("ROLLBACK")
                raise
            version = self._version()
        if version > SCHEMA_VERSION:
            raise HistoryError(
                f"The history {self.path} has schema {version}, this console knows {SCHEMA_VERSION}; "
                "update dflash-ops or move the file away."
            )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _insert(self, verb: str, table: str, values: dict[str, Any]) -> None:
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        with _as_history_error(self.path):
            self._db.execute(f"{verb} INTO {table} ({names}) VALUES ({marks})", list(values.values()))

    def _newest(self, table: str, row: type[msgspec.Struct], limit: int) -> Iterator[dict[str, Any]]:
        names = row.__struct_fields__
        query = f"SELECT {', '.join(names)} FROM {table} ORDER BY finished DESC LIMIT ?"  # noqa: S608 - names are ours
        with _as_history_error(self.path):
            for values in self._db.execute(query, (limit,)).fetchall():
                record = dict(zip(names, values, strict=True))
                if "result" in record:
                    record["result"] = json.loads(record["result"])
                yield record


@contextmanager
def _as_history_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        raise HistoryError(f"The history {path} cannot be used: {error}.") from error
