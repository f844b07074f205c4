import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function of a module in a process where numpy computes Triton's kernels on the CPU.

    Triton asks for it once, when it is imported.
    """
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
        yield lambda function, *args: pool.submit(function, *args).result()
