"""The adapters' shards of a rank as a few long tensors, so that an optimizer runs a few kernels instead of hundreds.

A piece is one tensor of an optimizer: a single shard, or a range of the buffer in which `adapter_arena.py` has laid the
adapters' shards. In that buffer each shard begins at a multiple of ALIGNMENT, and what lies between two shards is zero
and stays zero: every element-wise optimizer moves a zero without a gradient nowhere.

The state of a piece is that of its shards, one after the other, to the last bit: bitsandbytes scales blocks of
ALIGNMENT elements, which so never cross shards, and keeps small shards in 32 bits, which are pieces of their own.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_qlora.distributed import local_part

ALIGNMENT = 256  # elements: a block of bitsandbytes' 8-bit states
MIN_8BIT_SIZE = 4096  # elements: bitsandbytes keeps the states of smaller tensors in 32 bits
_PER_BLOCK = ("absmax1", "absmax2")  # state with one number for each block; all else is per element, or shared
_SHARED = ("qmap1", "qmap2")


def is_second(path: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is one that LoRA+ gives the larger learning rate: B, or a vector."""
    return ".lora_B." in path or parameter.dim() == 1


def is_small(parameter: torch.Tensor) -> bool:
    """Whether bitsandbytes keeps the state of this rank's shard in 32 bits."""
    return local_part(parameter).numel() < MIN_8BIT_SIZE


class Member(NamedTuple):
    """A parameter in a piece. number: its place in the model; local: its shard; start: in the piece, in elements."""

    number: int
    sharded: nn.Parameter
    local: torch.Tensor
    start: int

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This member's elements of a tensor as long as the piece, in the shard's shape."""
        return flat[self.start : self.start + self.local.numel()].view(self.local.shape)


class Piece(NamedTuple):
    """A tensor of the optimizer, and the parameters whose shards it holds."""

    tensor: nn.Parameter
    members: list[Member]

    @property
    def is_flat(self) -> bool:
        return len(self.members) > 1

    # --- gradients ---

    def take_gradients(self) -> list[torch.Tensor]:
        """Give the tensor the gradients of its members, which they lose; returns those in their shapes.

        All members or none must have one.
        """
        gradients = [member.sharded.grad for member in self.members]
        local = [local_part(gradient) for gradient in gradients if gradient is not None]
        if not local:
            self.tensor.grad = None
            return []
        if not self.is_flat:
            self.tensor.grad = local[0]
            return local
        self.tensor.grad = torch.zeros_like(self.tensor)
        parts = [member.part_of(self.tensor.grad) for member in self.members]
        torch._foreach_copy_(parts, local)
        for member in self.members:
            member.sharded.grad = None
        return parts

    @property
    def lacks_some_gradient(self) -> bool:
        """Whether some members have a gradient and some have none, such as those that were not used."""
        return self.is_flat and len({member.sharded.grad is None for member in self.members}) > 1

    # --- state ---

    def state_of(self, member: Member, state: Mapping[str, Any]) -> dict[str, Any]:
        """A member's values of the piece's state: views of it, and copies of what has no elements of its own."""
        if not self.is_flat:
            return dict(state)
        return {key: self._part_of_value(member, key, value) for key, value in state.items()}

    def _part_of_value(self, member: Member, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or key in _SHARED:
            return value
        if value.dim() == 0:
            return value.clone()
        if key in _PER_BLOCK:
            return value[member.start // ALIGNMENT :][: -(-member.local.numel() // ALIGNMENT)]
        part = member.part_of(value)
        if getattr(value, "is_paged", False):  # as bitsandbytes marks it
            part.is_paged, part.page_deviceid = True, value.page_deviceid  # type: ignore[attr-defined]
        return part

    def joined(
        self, states: Sequence[Mapping[str, Any]], new: Callable[[nn.Parameter, str, torch.Tensor], torch.Tensor]
    ) -> dict[str, Any] | None:
        """The state of the piece from its members'; None if they differ where a piece has one value only.

        new: makes zeros as long as the tensor for the elements of a key, of which it gets one member's.
        """
        if not self.is_flat:
            return dict(states[0])
        if any(not _agree(states[0], other) for other in states[1:]):
            return None
        joined: dict[str, Any] = {}
        for key, first in states[0].items():
            if not isinstance(first, torch.Tensor) or key in _SHARED or first.dim() == 0:
                joined[key] = first
                continue
            if key in _PER_BLOCK:
                joined[key] = first.new_zeros(-(-self.tensor.numel() // ALIGNMENT))
            else:
                joined[key] = new(self.tensor, key, first)
            for member, state in zip(self.members, states, strict=True):
                self._part_of_value(member, key, joined[key]).copy_(state[key])
        return joined

    def split(self, state: Mapping[str, Any]) -> Iterator[tuple["Piece", dict[str, Any]]]:
        """A piece and its state for each member."""
        for member in self.members:
            yield Piece(nn.Parameter(member.local), [member._replace(start=0)]), self.state_of(member, state)


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two members' states can be in one tensor: the same keys, types and common values."""

    def agree(key: str) -> bool:
        first, second = one[key], other[key]
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            return type(first) is type(second) and bool(first == second)
        is_common = first.dim() == 0 or key in _SHARED
        return first.dtype == second.dtype and (not is_common or torch.equal(first, second))

    return one.keys() == other.keys() and all(map(agree, one))


def find_pieces(
    trained: Mapping[str, nn.Parameter],
    in_arena: Iterable[nn.Parameter],
    kind: Callable[[str, nn.Parameter], Hashable],
) -> list[Piece]:
    """The pieces of a rank's trained parameters, by path, in the model's order: neighbours of the same kind together.

    in_arena: parameters whose shards share memory with each other alone, if with anything.
    """
    may_join = {id(parameter) for parameter in in_arena}
    pieces: list[Piece] = []
    stored: dict[int, list[tuple[Hashable, Member]]] = {}
    for number, (path, parameter) in enumerate(trained.items()):
        member = Member(number, parameter, local_part(parameter).detach(), 0)
        if id(parameter) in may_join:
            stored.setdefault(member.local.untyped_storage().data_ptr(), []).append((kind(path, parameter), member))
        else:
            pieces.append(Piece(nn.Parameter(member.local), [member]))
    for members in stored.values():
        members.sort(key=lambda entry: _start(entry[1]))
        runs = [[member for _, member in run] for _, run in itertools.groupby(members, key=lambda entry: entry[0])]
        starts = [_start(run[0]) for run in runs]
        for run, start, end in zip(runs, starts, [*starts[1:], None], strict=True):
            pieces.append(_joined_piece(run, start, end))
    return sorted(pieces, key=lambda piece: piece.members[0].number)


def _start(member: Member) -> int:
    return int(member.local.storage_offset())


def _joined_piece(run: list[Member], start: int, end: int | None) -> Piece:
    if len(run) == 1:
        return Piece(nn.Parameter(run[0].local), run)
    first = run[0].local
    end = first.untyped_storage().nbytes() // first.element_size() if end is None else end
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    whole.set_(first.untyped_storage(), start, (end - start,), (1,))
    members = [member._replace(start=_start(member) - start) for member in run]
    return Piece(nn.Parameter(whole), members)
