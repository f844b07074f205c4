"""The results of requests, and failures that cannot be written while the disk is full."""

import sqlite3
import threading
from collections.abc import Callable

from fsdp_qlora.service.reasons import error_body
from fsdp_qlora.service.records import FAILED, WAITING, Records


class Results:
    """The results that clients may see: those that are written.

    Attributes:
        on_done: is told each request that has a result.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.on_done: Callable[[str], object] = lambda name: None
        self._unwritten: dict[str, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> tuple[str, bytes] | None:
        """State and result of a request; None if it is unknown."""
        return (WAITING, b"") if name in self._unwritten else self.records.result(name)

    def fail(self, name: str, reason: str) -> None:
        """Record that a request fails."""
        answer = error_body(reason)
        try:
            self.records.finish([(name, FAILED, answer)])
        except sqlite3.Error:
            # The disk is full: `write_failures` tries again, and until then it is not shown.
            with self._lock:
                self._unwritten[name] = (FAILED, answer)

    def write_failures(self) -> bool:
        """Write results for which the disk had no room; returns whether all are written."""
        with self._lock:
            unwritten = dict(self._unwritten)
        if not unwritten:
            return True
        try:
            self.records.finish([(name, *result) for name, result in unwritten.items()])
        except sqlite3.Error:
            return False
        with self._lock:
            for name in unwritten:
                del self._unwritten[name]
        for name in unwritten:
            self.on_done(name)
        return True
