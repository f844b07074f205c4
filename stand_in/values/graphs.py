"""Operators that are captured into a CUDA graph: nothing is computed at the capture, and a launch
of the graph computes each of them again, in its order and in the memory it had at the capture.
"""

import ctypes
import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stand_in.values.generators import begin_draws_of_graph
from stand_in.values.memory import fill, on_cpu, poison, tensors_in
from stand_in.values.ways import IS_POISONED, Way, launched, library, replaying

_captured: list[Callable[[], None]] = []  # by the number that the graph knows; kept for good


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured."""
    return torch.cuda.is_current_stream_capturing()


def capture(way: Way, func: Any, args: Any, kwargs: Any) -> Any:
    """Launch an operator into the graph, and compute it by `way` at each launch of the graph."""
    make = getattr(way, "keywords", {}).get("make", launched)
    outputs = make(func, args, kwargs)
    if IS_POISONED:
        _poison_new(func, outputs)
    given = (borrowed(args), borrowed(kwargs), borrowed(outputs))
    at_each_launch(functools.partial(_compute_operator, way, func, *given))
    return outputs


def at_each_launch(compute: Callable[[], None]) -> None:
    """Add what computes values to the graph into which the current stream is captured.

    It may hold no memory of the device: `borrowed` tensors do not.
    """
    _let_graphs_compute()
    stream = torch.cuda.current_stream().cuda_stream
    _captured.append(compute)
    library().phantom_capture(ctypes.c_void_p(stream), len(_captured) - 1)


def borrowed(value: Any) -> Any:
    """The same tensors, whose memory the allocator may give away: a graph only knows addresses.

    A number in a tensor of the CPU is that of now, as a kernel gets it.
    """
    if isinstance(value, torch.Tensor):
        return _borrowed_tensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(borrowed, value))
    if isinstance(value, dict):
        return {name: borrowed(each) for name, each in value.items()}
    return value


def _borrowed_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        is_number = tensor.dim() == 0 and not tensor.is_pinned()
        return tensor.clone() if is_number else tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    found.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = torch._conj(found) if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def _poison_new(func: Any, outputs: Any) -> None:
    """No output has its values before the first launch."""
    returns = func._schema.returns
    values = [outputs] if len(returns) == 1 else outputs or ()
    for kind, output in zip(returns, values, strict=True):
        for tensor in tensors_in(output):
            if kind.alias_info is None and tensor.is_cuda and tensor.numel():
                poison(tensor)


def _compute_operator(way: Way, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    with replaying(outputs):
        found = way(func, args, kwargs)
    if found is not outputs:
        fill(func, outputs, on_cpu(found))


def _compute(number: int) -> int:
    """Called by a launch for each captured operator; 0 where it fails."""
    try:
        begin_draws_of_graph()
        with _disable_current_modes(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            _captured[number]()
    except Exception:
        traceback.print_exc()
        return 0
    return 1


# Kept here: C holds only its address.
_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(_compute)


@functools.cache
def _let_graphs_compute() -> None:
    library().phantom_on_compute(_callback)
