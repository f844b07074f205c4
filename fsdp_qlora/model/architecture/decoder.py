"""The decoder of a model, found by structure: blocks, parts without text, tables of tokens."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from fsdp_qlora.utils.errors import UserError

# Tokens of a batch for probes: all different, in every vocabulary, and in no order that positions
# could have.
TOKENS = torch.tensor([[7, 3, 5, 1], [6, 2, 4, 0]])


def _decoder(model: nn.Module) -> nn.Module:
    """The part through which all text passes.

    A module that transformers has not built is its own decoder.
    """
    return model.get_decoder() if isinstance(model, PreTrainedModel) else model


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks: the module list with as many modules as the text model has layers.

    A decoder may hold encoders of images and sound with as many: its own list lies closest to it.
    Without such a list, or among several, it is the one with the most parameters. Lists within a
    list are parts of its modules.
    """
    nested: list[tuple[str, nn.ModuleList]] = []
    for path, module in _decoder(model).named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            nested.append((path, module))
    # Lists inside of another list are parts of its modules, such as a block's experts.
    outer = tuple(f"{path}." for path, _ in nested)
    lists = [(path, blocks) for path, blocks in nested if not path.startswith(outer)]
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
        # Depth counts only among lists with as many modules as the configuration says.
        depth = path.count(".") if has_count else 0
        num_parameters = sum(parameter.numel() for parameter in blocks.parameters())
        return has_count, -depth, num_parameters

    return max(lists, key=rank)[1]


def find_towers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Path -> part of the model that text does not pass, such as vision towers and projectors."""
    decoder = _decoder(model)
    head = model.get_output_embeddings()
    towers = _inner_towers(model, decoder)
    [decoder_path] = [path for path, module in model.named_modules() if module is decoder]
    steps = decoder_path.split(".")
    # Everything beside the way from the model to its decoder, but the head.
    for depth, inner in enumerate(filter(None, steps)):
        parent = ".".join(steps[:depth])
        for name, child in model.get_submodule(parent).named_children():
            has_parameters = any(True for _ in child.parameters())
            if name != inner and child is not head and has_parameters:
                towers[f"{parent}.{name}".lstrip(".")] = child
    return towers


def _inner_towers(model: PreTrainedModel, decoder: nn.Module) -> dict[str, nn.Module]:
    """Path -> part of the decoder with a model of its own: an encoder and its projector (phi4)."""
    paths = {module: path for path, module in model.named_modules()}
    blocks = find_blocks(model)
    # the modules on the way to the blocks, through which text passes
    holds_blocks = {
        module for module in model.modules() if any(inner is blocks for inner in module.modules())
    }
    towers: dict[str, nn.Module] = {}
    for module in decoder.modules():
        path = paths[module]
        is_inside = any(path.startswith(f"{tower}.") for tower in towers)
        if not isinstance(module, PreTrainedModel) or module in holds_blocks or is_inside:
            continue
        # A parent that does not hold the blocks, either, holds the encoder with its projector.
        parent = path.rpartition(".")[0]
        whole = path if model.get_submodule(parent) in holds_blocks else parent
        towers[whole] = model.get_submodule(whole)
    return towers


class OnMeta(TorchDispatchMode):
    """Computes an operator on the meta device if one of its arguments is there.

    Values without such an argument, such as positions, stay real.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {tensor.is_meta for tensor in tensors_of((args, kwargs))}
        # torch refuses an operator with tensors of both devices.
        if places == {True, False}:
            args, kwargs = on_meta((args, kwargs))
        return func(*args, **(kwargs or {}))


def on_meta(values: Any) -> Any:
    """The same values with their tensors on the meta device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operator's arguments or result."""
    # Ten times as fast as torch's pytree, which counts in 10^5 small calls.
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of([*values.values()])


def kind_of(block: nn.Module) -> Any:
    """A key for blocks that compute the same: parameters and their modules' plain settings."""
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
    # Without what differs from block to block and does not change what is computed.
    settings = [
        (name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | str | None)
        and name not in ("layer_idx", "layer_index", "seed", "training")
    ]
    return type(block), parameters, tuple(settings)


class _Reached(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def looked_up(model: PreTrainedModel, tables: Iterable[nn.Module]) -> dict[nn.Module, list[Any]]:
    """Table -> the ids that the model looks up in it for a batch of TOKENS, before its blocks.

    Its code runs on the meta device. Ids that the model has moved to its weights' device have lost
    their values.
    """
    lookups: dict[nn.Module, list[Any]] = {}

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        lookups.setdefault(table, []).append(args[0])

    def end(*_: Any) -> None:
        raise _Reached

    handles = [table.register_forward_pre_hook(note) for table in tables]
    # The first block ends the pass: all lookups that count are made before it.
    handles.append(find_blocks(model)[0].register_forward_pre_hook(end))
    try:
        # A model's own code may fail in any way on tensors without values.
        with OnMeta(), contextlib.suppress(Exception):
            model.base_model(input_ids=TOKENS, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return lookups


@contextlib.contextmanager
def buffers_as_before(model: nn.Module) -> Iterator[None]:
    """Undo what the model's code does to modules with buffers, such as rope's tables."""
    modules = [module for module in model.modules() if module._buffers]
    before = [vars(module) | {"_buffers": module._buffers.copy()} for module in modules]
    try:
        yield
    finally:
        for module, state in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(state)
