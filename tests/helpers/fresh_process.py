"""A function's result from a process of its own: what other tests left in this one (threads,
garbage) has no part.
"""

import faulthandler
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Raises BrokenProcessPool if the process crashes, behind its traceback on stderr.

    Args:
        function: of a module. args: can be pickled, as the result can.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=faulthandler.enable) as pool:
        return pool.submit(function, *args).result()
