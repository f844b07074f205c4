"""Context parallelism: ranks that share the tokens of a micro-batch, and what they exchange.

Each rank has a contiguous part of the tokens, and in attention all tokens of a part of the heads
(Ulysses, Jacobs et al. 2023). In layers with a state a rank goes on from that of the rank before
it. Shapes: N ranks, T tokens of all of them; H heads of queries, G of keys and values, whose size
is D.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import timeout_of_world


class ContextGroup:
    """The ranks that share each micro-batch, of which this is number `rank`; alone by default.

    group: None for tensors on the meta device, whose shapes alone change.
    """

    def __init__(
        self, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        self.size = size
        self.rank = rank
        self.group = group
        self._sent: deque[dist.Work] = deque()  # they keep what is sent alive

    def own(self, length: int, rank: int | None = None) -> slice:
        """The part of this rank, or of another of the group, among so many tokens or heads."""
        count = length // self.size
        first = count * (self.rank if rank is None else rank)
        return slice(first, first + count)

    def to_heads(self, *projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries [1, H, T / N, D], keys and values [1, G, T / N, D] of a rank's tokens become
        those of its heads.

        H is a multiple of N: model/row_sharing.py has refused other sizes.

        Returns:
            [1, H / N, T, D], and of keys and values [1, G' / N, T, D]: fewer heads than ranks are
            repeated to G'.
        """
        query, *others = projected
        repeats = self.size // math.gcd(self.size, others[0].shape[1])
        if repeats > 1:
            others = [heads.repeat_interleave(repeats, dim=1) for heads in others]
        parts = (
            heads[0].unflatten(0, (self.size, -1)).transpose(1, 2) for heads in (query, *others)
        )
        return tuple(self._exchanged(part).flatten(0, 1).transpose(0, 1)[None] for part in parts)

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """The outputs of attention for a rank's heads, [T, H / N, D], become those of its tokens,
        [T / N, H, D].
        """
        return self._exchanged(attended.unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)

    def pieces(self, lengths: list[int]) -> tuple[list[int], bool, bool]:
        """The tokens of documents in this rank's part of T, whether the first began before, and the
        last goes on.
        """
        own = self.own(sum(lengths))
        ends = [0, *itertools.accumulate(lengths)]
        found = [
            min(end, own.stop) - max(start, own.start) for start, end in itertools.pairwise(ends)
        ]
        return (
            [length for length in found if length > 0],
            own.start not in ends,
            own.stop not in ends,
        )

    def hand_on(self, values: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Send values to the next rank, without a wait; if it trains, it returns the gradient of
        what is returned.
        """
        self._send(values.detach().contiguous(), self.rank + 1)
        if trains:
            values = values if values.requires_grad else values.detach().requires_grad_()
            values.register_hook(
                lambda grad: self._receive(grad.new_empty(grad.shape), self.rank + 1)
            )
        return values

    def take_over(self, values: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Fill a leaf of the graph with what the rank before hands on. Its gradient is sent back
        when it is known.
        """
        self._receive(values.detach(), self.rank - 1)
        if trains:
            values.requires_grad_().register_post_accumulate_grad_hook(self._return_gradient)
        return values

    def _return_gradient(self, values: torch.Tensor) -> None:
        assert values.grad is not None
        self._send(values.grad.contiguous(), self.rank - 1)
        values.grad = None

    def _send(self, values: torch.Tensor, rank: int) -> None:
        self._sent += self._start(dist.isend, values, rank)
        # of a few layers; the other rank may not have asked for the last ones yet
        while len(self._sent) > 8:
            self._sent.popleft().wait()

    def _receive(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        for work in self._start(dist.irecv, values, rank):
            work.wait()
        return values

    def _start(
        self, operation: Callable[..., Any], values: torch.Tensor, rank: int
    ) -> list[dist.Work]:
        if self.group is None:
            return []
        # In a batch, NCCL takes the group's communicator, not one for each pair of ranks.
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, values, group=self.group, group_peer=rank)]
        )

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, differentiable; each rank has a share of what is
        computed of it.
        """
        result: torch.Tensor = _Summed.apply(values, self.group) if self.size > 1 else values
        return result

    def _exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Give part i of [N, ..] to rank i; returns what the ranks give to this one, [N, ..]."""
        result: torch.Tensor = _AllToAll.apply(parts, self.group)
        return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        if not parts.is_meta:
            dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Summed.apply(grads[0], ctx.group), None


class Tied(torch.autograd.Function):
    """Tied.apply(output, values) is the output, whose backward pass also reaches values that were
    handed on.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.zeros = values.new_zeros(()).expand(values.shape)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.zeros


def join_context(ranks: Ranks, size: int) -> ContextGroup:
    """The context group of this rank: `size` neighbours. Called on every rank."""
    if size == 1:
        return ContextGroup()
    # A group of all ranks is there already, and NCCL's buffers for another one are up to 2 GiB.
    group = (
        dist.group.WORLD
        if size == ranks.world_size
        else dist.new_subgroups(size, timeout=timeout_of_world())[0]
    )
    return ContextGroup(size, ranks.rank % size, group)
