"""Takes part in the collectives of a step after an error on this rank, for the ranks that wait there.

All ranks issue the same collectives in a step. One that has failed can issue the rest of them with other passes, over
few tokens, from the step's beginning on: those that it has issued already are left out.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Issued:
    """The collectives that this rank issues from here on, as the process groups of a sharded model count them."""

    def __init__(self, model: nn.Module) -> None:
        sharded = next(parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
        self._groups = sharded.device_mesh.get_all_groups()
        self._before = self._numbers()

    def _numbers(self) -> dict[str, int]:
        groups: list[Any] = self._groups
        return {group.group_name: group._get_sequence_number_for_group() for group in groups}

    def left_out(self) -> "LeftOut":
        """In this context the rank issues what comes after them."""
        return LeftOut({name: number - self._before[name] for name, number in self._numbers().items()})


class LeftOut(TorchDispatchMode):
    """In this context the first collectives of process groups are not issued, and give zeros.

    Args:
        numbers: of collectives to leave out, by the names of groups.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self._left = {**numbers}
        self._eager = contextlib.ExitStack()

    def __enter__(self) -> "LeftOut":
        # Compiled functions refuse to run in a mode.
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        place = [argument.name for argument in func._schema.arguments].index("process_group")
        name = ProcessGroup.unbox(args[place]).group_name
        if not self._left.get(name):
            return func(*args, **(kwargs or {}))
        self._left[name] -= 1
        # Its outputs come first, and are returned before what waits for them.
        for output in tree_leaves(args[0]):
            output.zero_()
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._eager.close()
        if error[0] is None and any(self._left.values()):
            raise RuntimeError(f"A step over few tokens issues fewer collectives than one over all: {self._left} less.")
