"""Requests to the ranks' store that end, where torch's own wait for as long as their host does not answer."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

_SLICE_SECONDS = 0.5
_Request = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class BoundedStore:
    """A store for one thread at a time. torch has no time limit for a host that is stopped, or whose machine is gone.

    Args:
        store: used by a thread of this object alone.
        seconds: for an answer, in slices: while this process or machine stands still none goes by.
    Raises:
        TimeoutError: by each request from the first one that is not answered in time.
        Exception: raised by the store.
    """

    def __init__(self, store: dist.Store, *, seconds: float) -> None:
        self._store, self._slices = store, max(1, round(seconds / _SLICE_SECONDS))
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._is_stuck = False
        threading.Thread(target=self._work, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._ask(self._store.get, key)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(self._store.check, list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._ask(self._store.compare_set, key, expected, desired)
        return value

    def close(self) -> None:
        """End the thread. The object answers no more."""
        self._is_stuck = True
        self._requests.put(None)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_stuck:
            raise TimeoutError("the store has not answered")
        answer: Future[Any] = Future()
        self._requests.put((function, arguments, answer))
        for _ in range(self._slices):
            if wait([answer], _SLICE_SECONDS).done:
                return answer.result()
        self._is_stuck = True
        raise TimeoutError("the store has not answered")

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            function, arguments, answer = request
            try:
                answer.set_result(function(*arguments))
            except Exception as error:
                answer.set_exception(error)
