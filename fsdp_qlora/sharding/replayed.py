"""Work on static tensors that is captured into a CUDA graph, and replayed."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class GraphPool:
    """Memory that graphs share. They are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._first: torch.cuda.CUDAGraph | None = None
        self.handle: Any = None
        """The pool, as captures take it."""
        self.renew()

    def renew(self) -> None:
        """Give later graphs another pool.

        After a capture that failed, torch takes the one before for one that is captured to.
        """
        self._first = None
        self.handle = torch.cuda.graph_pool_handle() if self._is_on_gpu else None

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a graph that has been captured to the pool."""
        # A pool ends with its last graph, after which a capture to it fails.
        self._first = self._first or graph


class Replayed:
    """Work on static tensors: captured on a GPU, else done again at each replay.

    Libraries must be ready: their first calls allocate and choose kernels.

    Args:
        work: gives tensors, or nothing.
        pool: for what the work allocates.
    Raises:
        RuntimeError: the work cannot be captured.
    """

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: GraphPool) -> None:
        self._work: Callable[[], Any] | None = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            self._result = _capture(self._graph, work, device, pool)
            pool.add(self._graph)
            # Whose it is may end with this object, without a cycle.
            self._work = None

    def replay(self) -> Any:
        """Give the result of the work, in the same tensors each time."""
        if self._graph is not None:
            self._graph.replay()
            return self._result
        assert self._work is not None
        result = self._work()
        if self._result is None:
            self._result = result
        for kept, new in zip(tensors_of(self._result), tensors_of(result), strict=True):
            if kept is not new:
                kept.copy_(new)
        return self._result


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures, and of the calls before them.

    Graphs of one pool share memory only if they have one stream. cuBLAS has its workspaces for this
    stream outside of all pools, at the beginning of the stream's memory.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        pass_through(device)
    torch.cuda.current_stream(device).wait_stream(stream)
    return stream


def pass_through(device: torch.device) -> None:
    """Multiply two numbers, forward and backward.

    cuBLAS then has workspaces for the stream and the threads of both passes, which stay. And the
    thread of backward passes has let go of the gradients of the pass before.
    """
    with torch.enable_grad():
        x = torch.ones(1, 1, device=device, requires_grad=True)
        torch.autograd.grad(x @ x, x)


def _capture(
    graph: torch.cuda.CUDAGraph, work: Callable[[], Any], device: torch.device, pool: GraphPool
) -> Any:
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # Not torch.cuda.graph: it empties the allocator's cache each time.
    with torch.cuda.stream(stream), _no_garbage_collected():
        # Other threads, such as NCCL's, may ask for events meanwhile.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            _end(graph, device, pool)
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: GraphPool) -> None:
    """End a capture. Raises RuntimeError if it is invalid."""
    try:
        graph.capture_end()
    except RuntimeError:
        # torch (2.11, 2.13) raises before it ends these. Then the allocator would free no cached
        # memory when memory runs out, and the generator would draw no numbers.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool.handle)
        pool.renew()
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
        raise


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
