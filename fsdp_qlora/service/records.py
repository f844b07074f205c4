"""The memory of a service that outlives its process: one SQLite file in its folder.

Entries are JSON by kind and id: sessions, models, samplers and checkpoints. Pieces are the requests that ranks work on;
each is written before its client hears of it, and its result before it is shown, so that a client which asks again gets
the same answer and no piece counts twice.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.utils.errors import UserError

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (kind TEXT, id TEXT, about TEXT, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS pieces (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, target TEXT, seq INTEGER, kind TEXT, body BLOB, state TEXT, result BLOB,
    tries INTEGER DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_target ON pieces (target, seq);
"""
WAITING, DONE, FAILED = "waiting", "done", "failed"


class Piece(NamedTuple):
    """A request for the ranks.

    target: the model or sampling session that it is for. seq: its place among the target's. kind: the name of its
    endpoint. body: as it was sent.
    """

    id: str
    target: str
    seq: int
    kind: str
    body: bytes


class Records:
    """The file of a service. Its methods may be called in any thread.

    Raises:
        UserError: the folder cannot be written, or another service uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                folder / "service.db", timeout=1, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; {_TABLES}")
        except (OSError, sqlite3.Error) as error:
            why = "another service uses it" if "locked" in str(error) else error
            raise UserError(f"--folder {folder} cannot be used ({why}).") from error

    def put(self, kind: str, name: str, about: dict[str, Any]) -> None:
        self._execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", kind, name, json.dumps(about))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        rows = self._execute("SELECT about FROM entries WHERE kind = ? AND id = ?", kind, name)
        return json.loads(rows[0][0]) if rows else None

    def find(self, kind: str, like: str = "%") -> Iterator[tuple[str, dict[str, Any]]]:
        """(id, content) of the entries of a kind whose id is LIKE this, the oldest first."""
        rows = self._execute("SELECT id, about FROM entries WHERE kind = ? AND id LIKE ? ORDER BY rowid", kind, like)
        return ((name, json.loads(about)) for name, about in rows)

    def delete(self, kind: str, name: str) -> None:
        self._execute("DELETE FROM entries WHERE kind = ? AND id = ?", kind, name)

    def add(self, piece: Piece) -> bool:
        """Add a piece; False if it is there already."""
        return bool(
            self._execute(
                "INSERT OR IGNORE INTO pieces (id, target, seq, kind, body, state) VALUES (?, ?, ?, ?, ?, ?) "
                "RETURNING number",
                *piece,
                WAITING,
            )
        )

    def begin(self, name: str) -> int:
        """Count that a piece is worked on; returns how often it has been."""
        [(tries,)] = self._execute("UPDATE pieces SET tries = tries + 1 WHERE id = ? RETURNING tries", name)
        return int(tries)

    def finish(self, results: Iterable[tuple[str, str, bytes | None]]) -> None:
        """Write (id, state, result) of pieces, all or none."""
        with self._lock, self._file:
            self._file.execute("BEGIN")
            self._file.executemany("UPDATE pieces SET state = ?2, result = ?3 WHERE id = ?1", results)

    def result(self, name: str) -> tuple[str, bytes] | None:
        """(state, result) of a piece; None if it is unknown."""
        return next(iter(self._execute("SELECT state, result FROM pieces WHERE id = ?", name)), None)

    def waiting(self) -> list[Piece]:
        """The pieces without a result, in the order in which they came."""
        query = "SELECT id, target, seq, kind, body FROM pieces WHERE state = 'waiting' ORDER BY number"
        return [Piece(*row) for row in self._execute(query)]

    def done_after(self, target: str, seq: int) -> list[Piece]:
        """The pieces of a target that were done and come after a number, in their order."""
        query = "SELECT id, target, seq, kind, body FROM pieces WHERE target = ? AND seq > ? AND state = 'done'"
        return [Piece(*row) for row in self._execute(f"{query} ORDER BY seq", target, seq)]

    def last_done(self, target: str) -> int:
        """The number of the target's last piece that has a result; -1 without one."""
        query = "SELECT MAX(seq) FROM pieces WHERE target = ? AND state != 'waiting'"
        [(last,)] = self._execute(query, target)
        return -1 if last is None else int(last)

    def forget_bodies(self, target: str, seq: int) -> None:
        """Free what repeating a target's pieces up to a number would need; their results stay."""
        self._execute("UPDATE pieces SET body = x'' WHERE target = ? AND seq <= ? AND state != 'waiting'", target, seq)

    def forget_old(self, kept: int) -> None:
        """Delete all but so many of the newest pieces: samples, and what needs no repeating."""
        old = "state != 'waiting' AND number <= (SELECT MAX(number) FROM pieces) - ?"
        self._execute(f"DELETE FROM pieces WHERE {old} AND (kind = 'asample' OR body = x'')", kept)

    def _execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._file.execute(statement, values).fetchall()
