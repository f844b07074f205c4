"""Keeps tensors for the backward pass of a function that comes after them."""

from typing import Any

import torch


class Kept:
    """Tensors (or None) that a function needs in its backward pass, saved before it runs.

    Activation checkpointing computes a block again until it has every tensor that the block saves,
    and tensors that a function saves itself are recorded when that function is done. So a block's
    last product would be computed again in vain.

    They are packed by the hooks for saved tensors that are in use now, as autograd would do, but
    without a node of its graph: a block keeps tensors at each of its products.
    """

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        # None without hooks.
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = hooks or (None, None)
        self._unpack: Any = unpack
        self._versions = [None if each is None else each._version for each in tensors]
        self._packed: list[Any] | None = [*tensors]
        if pack is None:
            return
        with torch.no_grad():
            self._packed = [None if each is None else pack(each.detach()) for each in tensors]

    def take(self) -> tuple[Any, ...]:
        """The tensors, in a backward pass, once: their memory is then the caller's to free.

        Raises:
            RuntimeError: one of them has been changed in place.
        """
        packed = self._packed
        unpack = self._unpack
        # A node of the graph may have this object until all of the backward pass is done: neither
        # the tensors nor what the hook refers to may live as long.
        self._packed = None
        self._unpack = None
        assert packed is not None
        if unpack is not None:
            # Under activation checkpointing this starts the block's recomputation.
            return tuple(None if each is None else unpack(each) for each in packed)
        if [None if each is None else each._version for each in packed] != self._versions:
            raise RuntimeError("a tensor that the backward pass needs was changed in place")
        return tuple(packed)
