"""The decoder of a model, found by structure: its blocks, the parts that text does not pass, its
tables of tokens.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from fsdp_qlora.utils.errors import UserError

# A batch's tokens, which are not positions, all different, and in every vocabulary.
TOKENS = torch.tensor([[7, 3, 5, 1], [6, 2, 4, 0]])


def _decoder(model: nn.Module) -> nn.Module:
    """The part through which all text passes. A module that transformers has not built is its own
    decoder.
    """
    return model.get_decoder() if isinstance(model, PreTrainedModel) else model


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks: the module list with as many modules as the text model has layers.

    A decoder may hold encoders of images and sound with as many: its own list lies closest to it.
    Without such a list, or among several, it is the one with the most parameters. Lists within a
    list are parts of its modules.
    """
    named = _decoder(model).named_modules()
    nested = [
        (path, module)
        for path, module in named
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    outer = tuple(f"{path}." for path, _ in nested)
    lists = [(path, module) for path, module in nested if not path.startswith(outer)]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of decoder blocks, so it cannot be sharded by "
            "block."
        )
    text = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    count = getattr(text, "num_hidden_layers", 0)

    def rank(named: tuple[str, nn.ModuleList]) -> tuple[bool, int, int]:
        path, blocks = named
        has_count = len(blocks) == count
        return (
            has_count,
            -path.count(".") * has_count,
            sum(parameter.numel() for parameter in blocks.parameters()),
        )

    return max(lists, key=rank)[1]


def find_towers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Path -> part of the model through which text does not pass, such as vision towers and
    projectors.
    """
    decoder = _decoder(model)
    towers = _inner_towers(model, decoder)
    to_decoder = next(path for path, module in model.named_modules() if module is decoder).split(
        "."
    )
    for depth, inner in enumerate(filter(None, to_decoder)):
        parent = ".".join(to_decoder[:depth])
        for name, child in model.get_submodule(parent).named_children():
            if (
                name != inner
                and child is not model.get_output_embeddings()
                and any(True for _ in child.parameters())
            ):
                towers[f"{parent}.{name}".lstrip(".")] = child
    return towers


def _inner_towers(model: PreTrainedModel, decoder: nn.Module) -> dict[str, nn.Module]:
    """Path -> part of the decoder that holds a model of its own, such as an encoder with its
    projector (phi4).
    """
    paths = {module: path for path, module in model.named_modules()}
    blocks = find_blocks(model)
    holds_blocks = {
        module for module in model.modules() if any(inner is blocks for inner in module.modules())
    }
    towers: dict[str, nn.Module] = {}
    for module in decoder.modules():
        path = paths[module]
        is_inside = any(path.startswith(f"{tower}.") for tower in towers)
        if isinstance(module, PreTrainedModel) and module not in holds_blocks and not is_inside:
            parent = path.rpartition(".")[0]
            whole = path if model.get_submodule(parent) in holds_blocks else parent
            towers[whole] = model.get_submodule(whole)
    return towers


class OnMeta(TorchDispatchMode):
    """Computes on the meta device what has an argument there. What has none, such as positions,
    keeps its values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {tensor.is_meta for tensor in tensors_of((args, kwargs))}
        if places == {True, False}:
            args, kwargs = on_meta((args, kwargs))
        return func(*args, **(kwargs or {}))


def on_meta(values: Any) -> Any:
    """The same values with their tensors on the meta device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or result. Ten times as fast as torch's pytree, for
    10^5 small calls.
    """
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of([*values.values()])


class _Reached(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def looked_up(model: PreTrainedModel, tables: Iterable[nn.Module]) -> dict[nn.Module, list[Any]]:
    """Table -> what the model looks up in it for a batch of TOKENS before its blocks. Its code runs
    on the meta device.

    Ids that the model has moved to its weights' device have lost their values.
    """
    asked: dict[nn.Module, list[Any]] = {}

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        asked.setdefault(table, []).append(args[0])

    def end(*_: Any) -> None:
        raise _Reached

    handles = [table.register_forward_pre_hook(note) for table in tables]
    handles.append(find_blocks(model)[0].register_forward_pre_hook(end))
    try:
        # A model's own code may fail in any way on tensors without values.
        with OnMeta(), contextlib.suppress(Exception):
            model.base_model(input_ids=TOKENS, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return asked
