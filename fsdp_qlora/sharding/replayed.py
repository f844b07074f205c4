"""Work on static tensors that is captured into a CUDA graph, and replayed."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Replayed:
    """Work on static tensors: captured on a GPU, else done again at each replay.

    Libraries must be ready: their first calls allocate and choose kernels.

    Args:
        work: gives tensors, or nothing.
        pool: from `torch.cuda.graph_pool_handle`.
    Raises:
        RuntimeError: the work cannot be captured.
    """

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            self._result = _capture(self._graph, work, device, pool)

    def replay(self) -> Any:
        """Give the result of the work, in the same tensors each time."""
        if self._graph is not None:
            self._graph.replay()
            return self._result
        result = self._work()
        if self._result is None:
            self._result = result
        for kept, new in zip(tensors_of(self._result), tensors_of(result), strict=True):
            if kept is not new:
                kept.copy_(new)
        return self._result


def _capture(
    graph: torch.cuda.CUDAGraph, work: Callable[[], Any], device: torch.device, pool: Any
) -> Any:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # Not torch.cuda.graph: it empties the allocator's cache each time.
    with torch.cuda.stream(stream), _no_garbage_collected():
        # Other threads, such as NCCL's, may ask for events meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Collect no garbage in this block: the end of another graph would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
