"""Finds the linear layers that are given the same tensor, by trying blocks on the meta device."""

import contextlib
import copy
import logging
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.model.adapters.grouped import LinearGroup
from fsdp_qlora.model.adapters.lean import can_be_lean
from fsdp_qlora.model.architecture.attention import attending
from fsdp_qlora.model.architecture.decoder import (
    TOKENS,
    OnMeta,
    buffers_as_before,
    find_blocks,
    kind_of,
)

log = logging.getLogger("fsdp_qlora")


class SharedInput(NamedTuple):
    """A module of a block, by its path there, and the names of the children with one input."""

    module: str
    children: tuple[str, ...]


def group_linears(model: PreTrainedModel) -> None:
    """Give each layer of a model on the meta device the group with which it may be computed.

    Layers that share their input with none are a group of one.
    """
    blocks = find_blocks(model)
    if not any(map(can_be_lean, blocks.modules())):
        return
    found = _try_blocks(model)
    for block in blocks:
        for shared in found.get(kind_of(block), ()):
            module = block.get_submodule(shared.module)
            members: list[Any] = [module.get_submodule(name) for name in shared.children]
            group = LinearGroup(members)
            # Whatever the module does with the layers, or an exception in it: no output outlives
            # its call.
            module.register_forward_hook(group.forget, always_call=True)
            for member in members:
                member.group = group
        layers: list[Any] = [*filter(can_be_lean, block.modules())]
        for layer in layers:
            layer.group = layer.group or LinearGroup([layer])


class _Done(Exception):
    """Ends a forward pass after the last block."""


@torch.no_grad()
def _try_blocks(model: PreTrainedModel) -> dict[Any, list[SharedInput]]:
    """The shared inputs of each kind of block, tried where the model's own code calls the first.

    Only this code knows the arguments of a block, such as masks and rotary embeddings.
    """
    blocks = find_blocks(model)
    last = blocks[-1]
    found: dict[Any, list[SharedInput]] = {}
    outputs: dict[Any, Any] = {}

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(block)
        if kind not in found:
            hidden = args[0] if args else kwargs["hidden_states"]
            tried = _Trial(block)
            # What a model's own code cannot compute without values ends the block here. What was
            # called until then is known.
            outputs[kind] = hidden
            try:
                outputs[kind] = tried.block(*args, **kwargs)
            except Exception as error:
                name = type(block).__name__
                log.debug("Layers of %s are grouped as far as it was tried: %s", name, error)
            found[kind] = tried.shared_inputs()
        if block is last:
            raise _Done
        return outputs[kind]

    # The same for every kernel, and every model has it.
    with buffers_as_before(model), attending(model, "eager"), torch.random.fork_rng(devices=[]):
        try:
            for block in blocks:
                block.forward = partial(forward, block)
            with OnMeta(), contextlib.suppress(Exception):
                # With values of their own: masks may depend on them.
                positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
                model.base_model(input_ids=TOKENS, position_ids=positions, use_cache=False)
        finally:
            for block in blocks:
                vars(block).pop("forward", None)
    return found


class _Trial:
    """A copy of a block that notes what its linear layers are given."""

    def __init__(self, block: nn.Module) -> None:
        self._inputs: dict[str, dict[str, list[torch.Tensor]]] = {}
        self._running: set[str] = set()
        vars(block).pop("forward", None)
        self.block = copy.deepcopy(block)
        for path, module in self.block.named_modules():
            for name, child in module.named_children():
                if can_be_lean(child):
                    child.register_forward_pre_hook(partial(self._note, path, name))
                    self._inputs.setdefault(path, {})[name] = []
            if path in self._inputs:
                module.register_forward_pre_hook(partial(self._begin, path))
                module.register_forward_hook(partial(self._end, path))

    def _begin(self, path: str, *_: Any) -> None:
        self._running.add(path)

    def _end(self, path: str, *_: Any) -> None:
        self._running.discard(path)

    def _note(self, path: str, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        # A list of modules is never called, and could not say when its layers are done.
        if path in self._running and args:
            self._inputs[path][name].append(args[0])

    def shared_inputs(self) -> list[SharedInput]:
        """The layers that were called once, with the very tensor of others of their module."""
        shared: list[SharedInput] = []
        for path, inputs in self._inputs.items():
            by_input: dict[int, list[str]] = {}
            for name, tensors in inputs.items():
                if len(tensors) == 1:
                    by_input.setdefault(id(tensors[0]), []).append(name)
            groups = [names for names in by_input.values() if len(names) > 1]
            shared += [SharedInput(path, tuple(names)) for names in groups]
        return shared
