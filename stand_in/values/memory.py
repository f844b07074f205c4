"""Memory of the device, which on the stand-in is address space of this process, as tensors of the
CPU.
"""

from collections.abc import Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same bytes, which shares them: no copy, any stride. A CPU tensor is
    returned as it is.
    """
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():  # has no address
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), CPU, storage.nbytes()
    )
    found = torch.empty(0, dtype=tensor.dtype, device=CPU)
    found.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = torch._conj(found) if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def on_cpu(value: Any) -> Any:
    """An operator's arguments as those of the same operator of the CPU."""
    if isinstance(value, torch.Tensor):
        return alias(value)
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {name: on_cpu(each) for name, each in value.items()}
    return value


def on_device(value: Any, device: torch.device) -> Any:
    """New tensors of the device with the values of CPU tensors."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        alias(made).copy_(value)
        return made
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(each, device) for each in value)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of an operator's arguments, also those in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """An operator's arguments by their names, with the defaults of those that are not given."""
    arguments = func._schema.arguments
    named = zip((argument.name for argument in arguments), args, strict=False)
    return {argument.name: argument.default_value for argument in arguments} | dict(named) | kwargs


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes, tensors or lists of them."""
    given = bind(func, args, kwargs)
    arguments = [argument for argument in func._schema.arguments if argument.alias_info is not None]
    return [given[argument.name] for argument in arguments if argument.alias_info.is_write]


def fill(func: Any, outputs: Any, values: Any) -> None:
    """Write values into the outputs that an operator has made; those that are its arguments have
    theirs by now.
    """
    returns = func._schema.returns
    if len(returns) == 1:
        outputs = [outputs]
        values = [values]
    for kind, output, value in zip(returns, outputs or (), values or (), strict=True):
        if kind.alias_info is None:
            _fill(output, value)


def _fill(output: Any, value: Any) -> None:
    if isinstance(output, torch.Tensor) and value is not None:
        # copy_ would broadcast, and hide that the two do not mean the same.
        assert output.numel() == value.numel(), (
            f"{tuple(output.shape)} on the device, {tuple(value.shape)} on the CPU"
        )
        alias(output).copy_(value)
    elif isinstance(output, (list, tuple)):
        for each, its in zip(output, value, strict=True):
            _fill(each, its)


def poison(tensor: torch.Tensor) -> None:
    """Fill new memory with what no program may read: NaN, or integers that are no index of
    anything.
    """
    memory = alias(tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        memory.fill_(float("nan"))
    else:
        memory.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max // 3)
