"""Hidden states of a policy and of its reference, as one tensor for a model's code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_map, tree_map_only


class BothStates(torch.Tensor):
    """The policy's hidden states outside of blocks, with the reference's behind them.

    A model may change hidden states between its blocks: qwen3_vl adds features of images to those
    of their tokens. Each function of torch that it calls for the policy's is called for the
    reference's, too. What a function takes besides is the same for both. Features of images may
    be such tensors themselves, where their towers have adapters.

    Raises:
        TypeError: by a function that would write both into one plain tensor.
    """

    policy: torch.Tensor
    reference: torch.Tensor

    @classmethod
    def of(cls, policy: torch.Tensor, reference: torch.Tensor) -> "BothStates":
        """Put the reference's states, which have no gradient, behind the policy's."""
        both: BothStates = policy.as_subclass(cls)
        both.policy = policy
        both.reference = reference
        return both

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = (args, dict(kwargs or {}))
        if _writes(func) and args and not isinstance(args[0], cls):
            raise TypeError("features of images are written into states that both have in common")
        args, named = for_policy(arguments)
        result = func(*args, **named)
        # Hooks, shapes and the like are the policy's alone.
        if func is not torch.Tensor.__setitem__ and not tree_any(_is_tensor, result):
            return result
        args, named = for_reference(arguments)
        with torch.no_grad():
            of_reference = func(*args, **named)
        return put_behind(result, of_reference)


def for_policy(values: Any) -> Any:
    """The same values with the policy's part of each `BothStates`."""
    return tree_map_only(BothStates, lambda both: both.policy, values)


def for_reference(values: Any) -> Any:
    """The same values with the reference's part of each `BothStates`."""
    return tree_map_only(BothStates, lambda both: both.reference, values)


def put_behind(of_policy: Any, of_reference: Any) -> Any:
    """The policy's values with the reference's tensors behind theirs, as `BothStates`."""
    return tree_map(_behind, of_policy, of_reference)


def have_both(values: Any) -> bool:
    """Whether a `BothStates` is among the values."""
    return tree_any(lambda value: isinstance(value, BothStates), values)


_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function with several tensors changes the first of them."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _behind(of_policy: Any, of_reference: Any) -> Any:
    return BothStates.of(of_policy, of_reference) if _is_tensor(of_policy) else of_policy
