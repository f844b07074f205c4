"""One record with this library's notes on a module that it did not define.

The record is an attribute that nn.Module does not register: a module or parameter inside it has no
name in a state dict, and FSDP2 does not find it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_ATTRIBUTE = "fsdp_qlora_state"


class SharedRows(Protocol):
    """A frozen matrix whose rows are elsewhere too, or elsewhere alone (sharding/vocabulary.py)."""

    def own_rows(self) -> torch.Tensor:
        """This rank's rows, on the device that stores them."""


@dataclass(frozen=True, kw_only=True)
class ModuleState:
    """The notes on one module. Each is made once, and replaced by a new record, never changed."""

    takes_all_tokens: bool = False
    """On experts: each gets every token in turn, and zeros for those of other experts (llama4)."""
    group_bytes: int | None = None
    """On experts: the size of weights and rows that are decoded and multiplied together."""
    gather_fillers: tuple[nn.Module, ...] = ()
    """On the module with a group's first parameter: what fills the group's gathers."""
    load_weights_to_gpu: Callable[[], None] | None = None
    """On a module whose weights are in host memory, where FSDP2 does not manage them."""
    lookups: tuple[SharedRows, ...] = ()
    """On the whole model: its embeddings of which only the tokens' rows are fetched."""
    shared_head: SharedRows | None = None
    """On the head: how the ranks share its rows."""


_NOTHING = ModuleState()


def state_of(module: nn.Module) -> ModuleState:
    """The notes on a module."""
    state: ModuleState = vars(module).get(_ATTRIBUTE, _NOTHING)
    return state


def set_state(module: nn.Module, state: ModuleState) -> None:
    """Replace the notes on a module."""
    # Past nn.Module's own attributes, which would look for parameters and modules in it.
    vars(module)[_ATTRIBUTE] = state


@contextlib.contextmanager
def whole_weights(module: FSDPModule) -> Iterator[None]:
    """Gather all weights of a sharded module on the device while the block runs. Collective."""
    module.unshard()
    for part in module.modules():  # type: ignore[attr-defined]
        load_weights_to_gpu = state_of(part).load_weights_to_gpu
        if load_weights_to_gpu:
            load_weights_to_gpu()
    yield
    module.reshard()
