"""Features of images for a reference whose towers have other adapters than the policy's."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_qlora.model.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.sharding.both_states import for_policy, for_reference, have_both, put_behind
from fsdp_qlora.utils.errors import UserError


class ReferenceTowers:
    """Has towers compute images for the policy, and then once more for the reference.

    For the reference they have no adapters, or those that training started from, and no autograd
    graph. Its features are behind the policy's (`BothStates`), and so is all that the model's own
    code makes of them. Towers without adapters compute once, unless features of others go in.

    Args:
        towers: all parts that compute images, whose weights are gathered while a pass runs.
    Attributes:
        have_adapters: whether any of them has one; if not, features are the same for both.
    """

    def __init__(self, towers: Iterable[nn.Module]) -> None:
        self._adapted = {tower: adapted_layers(tower) for tower in towers}
        self.have_adapters = any(self._adapted.values())
        # The reference's arguments of a tower that is at work for the policy.
        self._arguments: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def attach(self) -> list[RemovableHandle]:
        """Compute for both until the handles are removed."""
        self._arguments = {}
        handles = []
        for tower in self._adapted if self.have_adapters else ():
            # Around FSDP2's hooks, whose own function for gradients takes plain tensors.
            handles.append(
                tower.register_forward_pre_hook(self._part, prepend=True, with_kwargs=True)
            )
            handles.append(tower.register_forward_hook(self._follow, with_kwargs=True))
        return handles

    def _part(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._adapted[tower] and not have_both((args, kwargs)):
            return None
        self._arguments[tower] = for_reference((args, kwargs))
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = for_policy((args, kwargs))
        return arguments

    def _follow(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        if tower not in self._arguments:
            return output
        args, named = self._arguments.pop(tower)
        # Without those that another hook has left out.
        named = {name: named[name] for name in kwargs}
        # Not the tower's __call__, whose hooks have run for this pass already.
        with torch.no_grad(), as_at_start(self._adapted[tower]):
            of_reference = tower.forward(*args, **named)
        both = put_behind(output, of_reference)
        if not have_both(both):
            name = type(tower).__name__.removeprefix("FSDP")
            raise UserError(
                f"{name} returns images' features as a {type(output).__name__}, in which those of "
                "a reference cannot follow the policy's. Compute the reference before training: "
                "--precompute_reference true."
            )
        return both
