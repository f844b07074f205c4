"""Calls that must not hold up training."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call `function` in a daemon thread and wait for its result at most `seconds`.

    Raises:
        TimeoutError: it is still running; its result is lost.
        Exception: raised by `function`.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # a SystemExit too: wandb.teardown raises one
            result.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    thread = threading.Thread(target=call, name="bounded-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()
