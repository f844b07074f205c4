"""Values for programs on the stand-in: each operator on tensors of the device is computed by the
CPU, in place.

    with Values():
        ...                       # this thread, and the passes backward that it starts

The device's memory is address space of this process. The mode lets the device's operator run, so
that dispatch, checks, allocation, streams, waits and copies are real while its kernels do nothing.
Then it calls the same operator on CPU tensors that have the same addresses, and writes the results
into its outputs. `way_of` says which operators are computed otherwise, and process.py computes
whole processes.
"""

from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stand_in.values import attention, graphs, operators
from stand_in.values.memory import tensors_in
from stand_in.values.ways import Way, both, cpu_alone, native, random, uninitialized

Tag = torch.Tag
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
# Kernels in C; operators of other namespaces are functions in Python, for example FSDP2's. Those of
# bitsandbytes call its C library, and the CPU has its own.
IN_C = ("aten", "prims", "bitsandbytes")
NATIVE = (
    "_local_scalar_dense",
    "record_stream",
    "_pin_memory",
    "_unsafe_view",
    "_fused_sdp_choice",
)
EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
SPECIAL: dict[str, Way] = {
    **operators.WAYS,
    **attention.WAYS,
    **dict.fromkeys(NATIVE, native),
    **dict.fromkeys(EMPTY, uninitialized),
    "multinomial": cpu_alone,  # looks for probabilities that are none
    "masked_scatter_backward": cpu_alone,  # counts the entries of its mask
}


class Values(TorchDispatchMode):
    """Computes the operators of a thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        # DTensors and other subclasses come back as the tensors that they consist of.
        if any(
            kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types
        ):
            return NotImplemented
        tensors = [*tensors_in((args, kwargs))]
        device = kwargs.get("device")
        is_ours = any(tensor.is_cuda for tensor in tensors) or (
            device is not None and device.type == "cuda"
        )
        if not is_ours or any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func not in _ways:
            _ways[func] = way_of(func)
        way = _ways[func]
        if way not in AT_ONCE and graphs.is_capturing():
            return graphs.capture(way, func, args, kwargs)
        return way(func, args, kwargs)


_ways: dict[Any, Way] = {}


def way_of(func: Any) -> Way:
    """How an operator is computed."""
    namespace, name = func._schema.name.split("::")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    returns = func._schema.returns
    # Before views: `to`, which in inference mode comes here itself, may return its input or a copy.
    if (
        namespace in IN_C
        and has(func.name(), "CompositeImplicitAutograd")
        and not has(func.name(), "CUDA")
    ):
        return composite
    is_view = returns and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )
    if namespace in COLLECTIVES or is_view or Tag.inplace_view in func.tags:
        return native
    if namespace not in IN_C:
        return in_python
    if (
        namespace == "aten"
        and func._overloadname == "dtype"
        and name in ("mm", "bmm", "addmm", "baddbmm")
    ):
        return operators.with_dtype
    if namespace == "aten" and name in SPECIAL:
        return SPECIAL[name]
    if Tag.dynamic_output_shape in func.tags or Tag.data_dependent_output in func.tags:
        return cpu_alone
    return random if Tag.nondeterministic_seeded in func.tags else both


def composite(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that consists of others, as they come here in inference mode."""
    with Values():
        return func.decompose(*args, **kwargs)


def in_python(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that is a function in Python: that for the device, whose own operators are
    computed.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA")
    key = torch._C.DispatchKey.CUDA if has else torch._C.DispatchKey.CompositeExplicitAutograd
    with Values():
        return func._op_dk(key, *args, **kwargs)


# Ways that compute nothing themselves, in a capture either.
AT_ONCE = (native, uninitialized, composite, in_python)
