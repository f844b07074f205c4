"""Integers keep their values where a model's code computes on the meta device.

Models read the sizes of images from them, such as which patches are padding.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_qlora.model.architecture.decoder import tensors_of

_ATEN = torch.ops.aten
_INDEXED = (
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
)


class KnownIntegers(TorchDispatchMode):
    """Leaves integers and booleans on the CPU where code moves them to the meta device, or makes
    them there.

    Operators that take them beside tensors on the meta device are left to other modes. Masks by
    which such a tensor is indexed become places: only their values tell how many there are.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.masked_select.default:
            func = _ATEN.index.Tensor
            args = (args[0], [args[1]])
        if func in _INDEXED:
            args = (args[0], [*_places(args[1])], *args[2:])
        result = func(*args, **kwargs)
        if _is_integers(result) and result.is_meta and _is_known(func, args):
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        return result


def _is_integers(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and not result.dtype.is_floating_point


def _is_known(func: Any, args: Sequence[Any]) -> bool:
    """Whether a result on the meta device does not depend on values that are lost there."""
    name = func._schema.name.removeprefix("aten::")
    makes_new = name.endswith("_like") or name.startswith("new_")
    return makes_new or not any(tensor.is_meta for tensor in tensors_of(args))


def _places(indices: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yield an index of integers for each dim."""
    for index in indices:
        if index is None or index.is_meta or index.dtype != torch.bool:
            yield index
        else:
            yield from index.nonzero().unbind(1)
