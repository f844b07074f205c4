"""Computes a model's predictions with one decoder block in memory at a time, for rows that are all at hand."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.models import canonical_name, find_blocks

ReadParameter = Callable[[str], torch.Tensor]


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    read: ReadParameter,
    rows: Sequence[torch.Tensor],
    device: torch.device,
    done: Callable[[], object],
) -> Iterator[torch.Tensor]:
    """The logits of each row, float32 [T, vocabulary].

    First the whole model runs with blocks that only note their arguments. Then each block is loaded and runs on all
    rows. At last the model runs again, from what the last block returned.

    Args:
        model: on the meta device; its parameters come and go.
        read: name of a parameter -> its value, on the CPU.
        rows: token ids, int64 [T].
        done: called when a block is done.
    """
    blocks = list(find_blocks(model))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside = {id(module) for block in blocks for module in block.modules()}
    ends = {id(embeddings), id(head)}
    rest = [module for module in model.modules() if id(module) not in inside | ends]
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}

    def load(modules: Sequence[nn.Module]) -> None:
        _load(modules, names, read, device)

    model.eval()
    load(rest)
    load([embeddings])
    hidden, arguments = [], []
    with _instead(head, lambda states: states[..., :1]):
        for row in rows:
            states, calls = _run_noting(model, blocks, row[None].to(device))
            hidden.append(states)
            arguments.append(calls)
    _free(embeddings, names)
    for number, block in enumerate(blocks):
        load(list(block.modules()))
        for index, calls in enumerate(arguments):
            args, kwargs = calls[number]
            hidden[index] = _first(block(hidden[index], *args, **kwargs))
            calls[number] = ((), {})
        _free(block, names)
        done()
    load([head])
    for row, states in zip(rows, hidden, strict=True):
        with _returning(blocks, states), _returning([embeddings], states):
            yield model(input_ids=row[None].to(device), use_cache=False).logits[0].float()
    for module in (head, *rest):
        _free(module, names, recurse=False)


def _load(modules: Sequence[nn.Module], names: dict[int, str], read: ReadParameter, device: torch.device) -> None:
    """Fill the modules' own parameters, and move their buffers, which hold their values already."""
    for module in modules:
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = names[id(parameter)]
            value = nn.Parameter(read(name).to(device, parameter.dtype), requires_grad=False)
            names[id(value)] = name
            setattr(module, key, value)
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)


def _free(module: nn.Module, names: dict[int, str], *, recurse: bool = True) -> None:
    for part in module.modules() if recurse else [module]:
        for key, parameter in list(part.named_parameters(recurse=False)):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            names[id(empty)] = names[id(parameter)]
            setattr(part, key, empty)


def _run_noting(
    model: PreTrainedModel, blocks: Sequence[nn.Module], ids: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The states that enter the first block, and each block's other arguments."""
    states: list[torch.Tensor] = []
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        states.append(hidden)
        calls.append((args, kwargs))
        return hidden

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_instead(block, note))
        model(input_ids=ids, use_cache=False)
    return states[0], calls


@contextlib.contextmanager
def _returning(blocks: Sequence[nn.Module], states: torch.Tensor) -> Iterator[None]:
    """Let every one of these modules return these states."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_instead(block, lambda *args, **kwargs: states))
        yield


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else. Its other attributes, which the model's loop reads, stay."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _first(output: Any) -> torch.Tensor:
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result
