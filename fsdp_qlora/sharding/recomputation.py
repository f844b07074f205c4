"""Computes a block again in the backward pass, for the tensors that it did not keep (Chen et al. 2016).

As torch.utils.checkpoint without reentrant autograd does: the second pass ends with the last tensor that is asked for,
and has the first one's random numbers and autocast. That one is for any number of backward passes, and an eighth of the
host's work for a block of qlora; this is for one, and counts the tensors instead of naming them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_qlora.sharding.activation_offload import InputStore


class Recomputation:
    """A forward pass that keeps its inputs alone: run it with `forgetting`.

    Args:
        args: tensors among them may require gradients; kwargs' may not.
        store: where they are kept on the host; None if they stay on the device.
    Raises:
        RuntimeError: in the backward pass, if that is the second one, an input has been changed in place, or the
            block computes other shapes than before.
    """

    def __init__(
        self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], store: InputStore | None
    ) -> None:
        self._block, self._kwargs, self._store = block, kwargs, store
        self._args = [_Input.of(arg, store) if isinstance(arg, torch.Tensor) else arg for arg in args]
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
        self._state = _State.now(device)
        self._shapes: list[torch.Size] = []
        self._found: list[torch.Tensor | None] | None = None

    def forgetting(self) -> saved_tensors_hooks:
        """While this context lasts nothing is kept for the backward pass."""
        return saved_tensors_hooks(self._forget, self._recall)

    def _forget(self, tensor: torch.Tensor) -> int:
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def _recall(self, index: int) -> torch.Tensor:
        if self._found is None:
            self._found = []
            self._compute(self._found)
        tensor, self._found[index] = self._found[index], None
        if tensor is None:
            raise RuntimeError("A recomputed block can run backward once.")
        return tensor

    def _compute(self, found: list[torch.Tensor | None]) -> None:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape != self._shapes[len(found)]:
                raise RuntimeError(f"A block computed a tensor of shape {[*tensor.shape]} again, and "
                                   f"{[*self._shapes[len(found)]]} before.")  # fmt: skip
            tensor = tensor.detach()  # kept with its graph, an operator's output would keep that operator, and itself
            found.append(tensor)
            if len(found) == len(self._shapes):
                raise _Enough
            return tensor

        args = [arg.back(self._store) if isinstance(arg, _Input) else arg for arg in self._args]
        self._args = []  # the inputs' memory goes with the pass
        hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
        with contextlib.suppress(_Enough), self._state.restored(), torch.enable_grad(), hooks:
            self._block(*args, **self._kwargs)
        if len(found) < len(self._shapes):
            raise RuntimeError(f"A block computed {len(found)} tensors again, and {len(self._shapes)} before.")


class _Enough(Exception):
    """Nothing more is needed."""


class _Input(NamedTuple):
    """A tensor among a block's arguments. version: counts changes in place."""

    kept: Any
    requires_grad: bool
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor, store: InputStore | None) -> "_Input":
        if store is None:
            return cls(tensor.detach(), tensor.requires_grad, tensor._version)
        return cls(store.keep(tensor.detach()), tensor.requires_grad, None)

    def back(self, store: InputStore | None) -> torch.Tensor:
        tensor: torch.Tensor = self.kept if store is None else store.give_back(self.kept)
        if self.version not in (None, tensor._version):
            raise RuntimeError("An input of a recomputed block has been changed in place.")
        return tensor.requires_grad_(self.requires_grad)


class _State(NamedTuple):
    """What a block's results depend on besides its arguments: generators, and autocast if it is on."""

    device: torch.device
    on_cpu: torch.Tensor
    on_gpu: torch.Tensor | None
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device) -> "_State":
        kind = device.type
        on_gpu = torch.cuda.get_rng_state(device) if kind == "cuda" else None
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(device, torch.get_rng_state(), on_gpu, dtype)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        before = _State.now(self.device)
        self._set_generators()
        try:
            if self.autocast:
                with torch.autocast(self.device.type, dtype=self.autocast):
                    yield
            else:
                yield
        finally:
            before._set_generators()

    def _set_generators(self) -> None:
        torch.set_rng_state(self.on_cpu)
        if self.on_gpu is not None:
            torch.cuda.set_rng_state(self.on_gpu, self.device)
