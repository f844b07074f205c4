"""fsdp_qlora's kernels in Triton, which cannot run on the stand-in.

Each becomes one launch, with the outputs that the way in torch gives: their memory is the device's,
and with PHANTOM_VALUES=1 the CPU computes their values.
"""

import ctypes
import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import fsdp_qlora.model.kernels as folder
from fsdp_qlora.model.kernels.in_use import GRAPHS, LEAN, PLAIN, TRITON, Ways
from stand_in.values import graphs
from stand_in.values.memory import alias, on_device
from stand_in.values.ways import covered, library

Function = Callable[..., Any]
HAS_VALUES = os.environ.get("PHANTOM_VALUES") == "1"


# Modules that are not named as the part of a model that they compute.
PARTS = {
    "float_decoding": "decoding",
    "fp8_decoding": "decoding",
    "hqq_decoding": "decoding",
    "nf4": "decoding",
    "token_loss": "loss",
}


def chosen_ways() -> Ways:
    """What a card would choose: every kernel in Triton, linear layers together, and graphs.

    Puts launches into the places of the kernels.
    """
    return Ways(linears=LEAN, answers=GRAPHS, **dict.fromkeys(replace_triton(), TRITON))


def replace_triton() -> list[str]:
    """Put launches into the places of all kernels in Triton; returns their parts, as in `Ways`."""
    found = []
    for each in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{each.name}")
        ways: dict[str, Any] = getattr(module, "WAYS", {})
        if TRITON in ways:
            ways[TRITON] = _launched(ways[PLAIN])
            found.append(PARTS.get(each.name, each.name))
    return found


def _launched(plain: Any) -> Any:
    """The same for a function, or for a NamedTuple of functions."""
    if isinstance(plain, tuple):
        return type(plain)(*map(_launched, plain))
    return with_values(plain) if HAS_VALUES else without_values(plain)


def with_values(plain: Function) -> Function:
    """One launch, and what `plain` computes on the CPU in the same memory."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        own_args, own_kwargs = tree_map_only(torch.Tensor, alias, (args, kwargs))
        device = args[0].device
        if graphs.is_capturing():
            return captured(plain, own_args, own_kwargs, device)
        results = plain(*own_args, **own_kwargs)
        with covered():
            launch()
        return tree_map_only(torch.Tensor, lambda values: on_device(values, device), results)

    return kernel


def captured(plain: Function, args: Any, kwargs: Any, device: torch.device) -> Any:
    """One launch in a graph. Its outputs are made now, and get what `plain` computes from these
    tensors of the CPU whenever the graph is launched.
    """
    copies, named_copies = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    results = plain(*copies, **named_copies)  # of no values yet, but of the right form
    outputs = tree_map_only(torch.Tensor, lambda values: on_device(values, device), results)
    memory = tree_leaves(tree_map_only(torch.Tensor, alias, outputs))

    def compute() -> None:
        for output, values in zip(memory, tree_leaves(plain(*args, **kwargs)), strict=True):
            if isinstance(output, torch.Tensor):
                output.copy_(values)

    with covered():
        launch()
    graphs.at_each_launch(compute)
    return outputs


class _Form(NamedTuple):
    """What is asked of the allocator for an output."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def without_values(plain: Function) -> Function:
    """One launch, and memory for the outputs.

    Their forms are found once for inputs of these forms, so that the host's time is not that of
    `plain`.
    """
    forms: dict[Any, Any] = {}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        key = (*map(_key, args), *map(_key, kwargs.values()))
        if key not in forms:
            forms[key] = _forms(plain, args, kwargs)
        launch()
        device = args[0].device
        made = [torch.empty_strided(*form[:2], dtype=form[2], device=device) for form in forms[key]]
        if not made:
            return None
        return made[0] if len(made) == 1 else tuple(made)

    return kernel


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, tuple) else value


def _forms(plain: Function, args: Any, kwargs: Any) -> list[_Form]:
    """The forms of what `plain` returns: nothing, a tensor or a tuple of tensors."""

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        # Not `to`, which the mode that computes values would see.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    own_args, own_kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    results = plain(*own_args, **own_kwargs)
    outputs = results if isinstance(results, tuple) else (results,)
    return [
        _Form(output.shape, output.stride(), output.dtype)
        for output in outputs
        if output is not None
    ]


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


_ONE = _Dim3(1, 1, 1)
_NO_BYTES = ctypes.c_size_t(0)


def launch() -> None:
    """Launch a kernel of no name on the current stream."""
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    library().cudaLaunchKernel(None, _ONE, _ONE, None, _NO_BYTES, ctypes.c_void_p(stream))
