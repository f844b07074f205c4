"""The memory of a service that outlives its process: one SQLite file in its folder.

Entries are JSON by kind and id: sessions, models, samplers and checkpoints. The table `pieces` has
the requests that ranks work on; each is written before its client hears of it, and its result
before it is shown. A client that asks again gets the same answer, and no request counts twice.
"""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fsdp_qlora.service.entries import (
    BaseEntry,
    CheckpointEntry,
    ModelEntry,
    SamplerEntry,
    SessionEntry,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.run_files import SERVICE

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (kind TEXT, id TEXT, about TEXT, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS pieces (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, target TEXT, seq INTEGER, kind TEXT, body BLOB,
    state TEXT, result BLOB, tries INTEGER DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_target ON pieces (target, seq);
"""
_COLUMNS = {
    "entries": {"kind", "id", "about"},
    "pieces": {"number", "id", "target", "seq", "kind", "body", "state", "result", "tries"},
}
WAITING = "waiting"
DONE = "done"
FAILED = "failed"


Entry = TypeVar("Entry", bound=Mapping[str, object])
Row = tuple[Any, ...]
"""A row of SQLite; its query says what is in it."""


class QueuedRequest(NamedTuple):
    """A request for the ranks."""

    id: str
    target: str
    """The model or sampler that it is for."""
    seq: int
    """The request's number among those of its target."""
    kind: str
    """The name of its endpoint."""
    size: int = 0
    """Bytes of its body."""


class Entries(Generic[Entry]):
    """The entries of a kind, by their ids."""

    def __init__(self, records: "Records", kind: str) -> None:
        self._records = records
        self.kind = kind

    def put(self, name: str, entry: Entry) -> None:
        self._records.execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", self.kind, name, json.dumps(entry)
        )

    def get(self, name: str) -> Entry | None:
        query = "SELECT about FROM entries WHERE kind = ? AND id = ?"
        rows = self._records.execute(query, self.kind, name)
        if not rows:
            return None
        entry: Entry = json.loads(rows[0][0])
        return entry

    def find(self, like: str = "%") -> Iterator[tuple[str, Entry]]:
        """(id, entry) of the entries whose id is LIKE this, the oldest first."""
        query = "SELECT id, about FROM entries WHERE kind = ? AND id LIKE ? ORDER BY rowid"
        rows = self._records.execute(query, self.kind, like)
        return ((name, json.loads(content)) for name, content in rows)

    def delete(self, name: str) -> None:
        self._records.execute("DELETE FROM entries WHERE kind = ? AND id = ?", self.kind, name)


class Records:
    """The file of a service.

    Its methods may be called in any thread. They raise sqlite3.Error on a full disk.

    The folder is for its owner alone, and so is the file: it has what clients have sent.

    Raises:
        UserError: the folder cannot be written, another service uses it, or its file is damaged or
            missing.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.RLock()
        self.sessions = Entries[SessionEntry](self, "session")
        self.models = Entries[ModelEntry](self, "model")
        self.samplers = Entries[SamplerEntry](self, "sampler")
        self.checkpoints = Entries[CheckpointEntry](self, "checkpoint")
        self.bases = Entries[BaseEntry](self, "service")
        path = folder / SERVICE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            _make_private(path)
            self._file = sqlite3.connect(
                path, timeout=1, isolation_level=None, check_same_thread=False
            )
            # One process at a time, from the first write to the end.
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            # FULL syncs at each commit: what a client has been told survives a power cut.
            self._file.executescript(
                f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; {_TABLES}"
            )
        except (OSError, sqlite3.Error) as error:
            why = "another service uses it" if "locked" in str(error) else error
            raise UserError(f"--folder {folder} cannot be used ({why}).") from error
        self._check(folder)

    def _check(self, folder: Path) -> None:
        """Refuse a damaged file, and one that does not know the models with folders beside it."""
        advice = f"Put back a copy of {SERVICE}, or give another --folder."
        try:
            [(verdict,)] = self.execute("PRAGMA quick_check(1)")
            for table, expected in _COLUMNS.items():
                found = {row[1] for row in self.execute(f"PRAGMA table_info({table})")}
                if not expected <= found:
                    verdict = f"it has other columns in {table}"
            is_new = not self.execute("SELECT 1 FROM entries LIMIT 1")
        except sqlite3.Error as error:
            verdict = str(error)
        if verdict != "ok":
            raise UserError(f"{folder / SERVICE} is damaged: {verdict}. {advice}")
        models = [path.name for path in folder.glob("*_train_*") if path.is_dir()]
        if is_new and models:
            raise UserError(
                f"{folder / SERVICE} is empty, and the folder has weights of {len(models)} models. "
                f"{advice}"
            )

    def add(self, request: QueuedRequest, body: bytes) -> bool:
        """Add a request with its body; False if it is there already."""
        columns = "(id, target, seq, kind, body, state)"
        statement = (
            f"INSERT OR IGNORE INTO pieces {columns} VALUES (?, ?, ?, ?, ?, ?) RETURNING number"
        )
        return bool(self.execute(statement, *request[:4], body, WAITING))

    def body(self, name: str) -> bytes:
        """The body of a request that may have to be done, again or for the first time."""
        [(body,)] = self.execute("SELECT body FROM pieces WHERE id = ?", name)
        return bytes(body or b"")

    def begin(self, name: str) -> int:
        """Count that a request is worked on; returns how often it has been."""
        [(tries,)] = self.execute(
            "UPDATE pieces SET tries = tries + 1 WHERE id = ? RETURNING tries", name
        )
        return int(tries)

    def finish(self, results: Iterable[tuple[str, str, bytes | None]]) -> None:
        """Write (id, state, result) of requests, all or none.

        The bodies of samples and of what has failed are not needed any more. Where one is NULL, the
        request still says which numbers are used.
        """
        body = f"CASE WHEN kind = 'asample' OR ?2 = '{FAILED}' THEN NULL ELSE body END"
        with self.all_or_none():
            self._file.executemany(
                f"UPDATE pieces SET state = ?2, result = ?3, body = {body} WHERE id = ?1", results
            )

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Write everything of the block at its end, or nothing."""
        with self._lock:
            if self._file.in_transaction:
                yield
                return
            with self._file:
                self._file.execute("BEGIN")
                yield

    def result(self, name: str) -> tuple[str, bytes] | None:
        """(state, result) of a request; None if it is unknown."""
        rows = self.execute("SELECT state, result FROM pieces WHERE id = ?", name)
        if not rows:
            return None
        state, result = rows[0]
        return state, result

    def tried_samples(self) -> set[str]:
        """The requests for samples that wait and were worked on when the service ended."""
        query = "SELECT id FROM pieces WHERE state = 'waiting' AND tries > 0 AND kind = 'asample'"
        return {name for (name,) in self.execute(query)}

    def waiting(self) -> list[QueuedRequest]:
        """The requests without a result, in the order in which they came."""
        query = (
            "SELECT id, target, seq, kind, length(body) FROM pieces "
            "WHERE state = 'waiting' ORDER BY number"
        )
        return [QueuedRequest(*row) for row in self.execute(query)]

    def done_after(self, target: str, seq: int) -> list[QueuedRequest]:
        """The requests of a target that were done and come after a number, in their order."""
        query = (
            "SELECT id, target, seq, kind FROM pieces "
            "WHERE target = ? AND seq > ? AND state = 'done' ORDER BY seq"
        )
        return [QueuedRequest(*row) for row in self.execute(query, target, seq)]

    def last_done(self, target: str) -> int:
        """The number of the target's last request that has a result; -1 without one."""
        query = "SELECT MAX(seq) FROM pieces WHERE target = ? AND state != 'waiting'"
        [(last,)] = self.execute(query, target)
        return -1 if last is None else int(last)

    def forget_bodies(self, target: str, seq: int) -> None:
        """Free what repeating a target's requests up to a number would need; their results stay."""
        self.execute(
            "UPDATE pieces SET body = x'' WHERE target = ? AND seq <= ? AND state != 'waiting'",
            target,
            seq,
        )

    def forget_old(self, max_count: int, max_bytes: int) -> None:
        """Delete all results but the newest `max_count` ones, within `max_bytes`.

        Samplers of single requests go with theirs.

        Requests that may have to be repeated stay.
        """
        old = "state != 'waiting' AND (kind = 'asample' OR body = x'')"
        rows = self.execute(
            f"SELECT number, length(result) FROM pieces WHERE {old} ORDER BY number DESC"
        )
        total = 0
        for count, (number, size) in enumerate(rows):
            total += size or 0
            if count >= max_count or (count and total > max_bytes):
                self.execute(f"DELETE FROM pieces WHERE {old} AND number <= ?", number)
                break

    def forget_direct_samplers(self, before: float) -> None:
        """Delete the samplers of single requests that came before a time and are forgotten."""
        is_used = "EXISTS (SELECT 1 FROM pieces WHERE target = entries.id)"
        is_old = "coalesce(json_extract(about, '$.time'), 0) < ?"
        one = "kind = 'sampler' AND id LIKE 'direct:%'"
        self.execute(f"DELETE FROM entries WHERE {one} AND {is_old} AND NOT {is_used}", before)

    def forget_target(self, target: str) -> None:
        """Delete all requests of a model or sampler."""
        self.execute("DELETE FROM pieces WHERE target = ?", target)

    def execute(self, statement: str, *values: object) -> list[Row]:
        """The rows that a statement of SQL gives."""
        with self._lock:
            return self._file.execute(statement, values).fetchall()


def _make_private(path: Path) -> None:
    """Make a file that its owner alone can read; what SQLite puts beside it gets the same mode."""
    # O_NOFOLLOW: a link would give another file this mode. O_NONBLOCK: a pipe must not hang the
    # start.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
    path.chmod(0o600)
