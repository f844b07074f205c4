"""Ways to compute an operator. Each is `way(func, args, kwargs)` and returns what the operator
returns.
"""

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stand_in.values.generators import drawing, place_of, without_generator
from stand_in.values.memory import bind, fill, on_cpu, on_device, poison, tensors_in, written

Way = Callable[[Any, Any, Any], Any]
IS_POISONED = os.environ.get("PHANTOM_POISON") == "1"
# Their functions fail on the stand-in, which lacks these libraries. NVRTC compiles some of torch's
# kernels at run time.
LACKING = re.compile(
    r"cu(dnn|solver|fft|sparse|blas)\w* error|calling .cublas|NVRTC",
    re.IGNORECASE,
)
noted: Counter[str] = Counter()  # operators that are computed otherwise than one would think


@functools.cache
def library() -> Any:
    """The runtime of the stand-in. A PyDLL keeps Python's lock: its functions are short, and one
    calls Python.
    """
    return ctypes.PyDLL(None)


@contextlib.contextmanager
def covered() -> Iterator[None]:
    """Kernels that this thread launches meanwhile are computed by the caller:
    they are no strays.
    """
    library().phantom_cover(1)
    try:
        yield
    finally:
        library().phantom_cover(0)


def native(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's form alone: views, collectives. Copies of bytes are real; a kernel would be a
    stray.
    """
    return func(*args, **kwargs)


class _Replay(threading.local):
    """The outputs of the captured operator that this thread computes again, in a tuple."""

    outputs: tuple[Any, ...] = ()


_replay = _Replay()


@contextlib.contextmanager
def replaying(outputs: Any) -> Iterator[None]:
    """Let a way fill the outputs that its operator had when it was captured (graphs.py)."""
    _replay.outputs = (outputs,)
    try:
        yield
    finally:
        _replay.outputs = ()


def launched(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's form, whose checks, allocations, streams and waits are real, and whose outputs
    the caller fills.
    """
    if _replay.outputs:
        return _replay.outputs[0]
    with covered():
        return func(*args, **kwargs)


def uninitialized(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory as it is. With PHANTOM_POISON none of it may be read before it is written."""
    made = func(*args, **kwargs)
    if IS_POISONED and made.is_cuda and made.numel():
        poison(made)
    return made


def both(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's form, and then the CPU's in the same memory."""
    # Where it writes tensors of both, such as the gradients of an offloaded and of a resident
    # parameter, the device's form has really computed those of the CPU, and they would be computed
    # twice.
    on_host = [
        (tensor, tensor.clone())
        for tensor in tensors_in(written(func, args, kwargs))
        if not tensor.is_cuda
    ]
    try:
        outputs = launched(func, args, kwargs)
    except RuntimeError as error:
        if not LACKING.search(str(error)):
            raise
        noted[f"without its library: {func}"] += 1
        return cpu_alone(func, args, kwargs)
    for tensor, before in on_host:
        tensor.copy_(before)
    fill(func, outputs, compute(func, on_cpu(args), on_cpu(kwargs)))
    return outputs


def cpu_alone(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's form alone, where the device's would read on the host what its kernels
    have found.
    """
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    place = place_of(args, kwargs) if is_random else None
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_cuda]
    device = tensors[0].device if tensors else kwargs["device"]
    # `driver` is an algorithm of cuSOLVER.
    own = {name: value for name, value in on_cpu(kwargs).items() if name != "driver"}
    with drawing(place):
        values = compute(func, without_generator(on_cpu(args)), without_generator(own))
    given = written(func, args, kwargs)
    if not given:
        return on_device(values, device)
    return given[0] if len(func._schema.returns) == 1 else tuple(given)


def random(func: Any, args: Any, kwargs: Any) -> Any:
    """As `both`, with the CPU's random numbers for the place of the device's generator
    (generators.py).
    """
    place = place_of(args, kwargs)
    outputs = launched(func, args, kwargs)
    with drawing(place):
        fill(
            func,
            outputs,
            compute(func, without_generator(on_cpu(args)), without_generator(on_cpu(kwargs))),
        )
    return outputs


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's form, or where it has none for these dtypes that for float32."""
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented for" not in str(error) and "expected scalar type" not in str(error):
            raise
    noted[f"in float32: {func}"] += 1
    return compute_widened(func, args, kwargs)


def compute_widened(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's form in float32 for tensors of 16 bits. Those that it writes are rounded at the
    end.
    """
    narrow: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            narrow.append((value, value.float()))
            return narrow[-1][1]
        return type(value)(map(widen, value)) if isinstance(value, (list, tuple)) else value

    given = [id(tensor) for tensor in tensors_in(written(func, args, kwargs))]
    result = func(*widen(args), **{name: widen(value) for name, value in kwargs.items()})
    for tensor, wide in narrow:
        if id(tensor) in given:
            tensor.copy_(wide)
    return result


def by_name(compute_outputs: Callable[[dict[str, Any], Any], None]) -> Way:
    """A way from a function that fills an operator's outputs, given its arguments by name."""

    def way(func: Any, args: Any, kwargs: Any) -> Any:
        outputs = launched(func, args, kwargs)
        compute_outputs(bind(func, args, kwargs), outputs)
        return outputs

    return way
