"""Context parallelism: ranks that share the tokens of a micro-batch, and what they exchange.

Each rank has a contiguous part of the tokens, and in attention all tokens of a part of the heads
(Ulysses, Jacobs et al. 2023). In layers with a state a rank continues the one of the rank before
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
        # Sends that may not be done. A work object keeps the memory of what it sends alive.
        self._sent: deque[dist.Work] = deque()

    def own(self, length: int, rank: int | None = None) -> slice:
        """The slice of `length` tokens or heads that this rank, or another of the group, has."""
        count = length // self.size
        first = count * (self.rank if rank is None else rank)
        return slice(first, first + count)

    def to_heads(self, *projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange a rank's tokens of all heads for all tokens of its heads.

        Takes queries [1, H, T / N, D], keys and values [1, G, T / N, D].

        H is a multiple of N: model/row_sharing.py has refused other sizes.

        Returns:
            [1, H / N, T, D], and of keys and values [1, G' / N, T, D]: fewer heads than ranks are
            repeated to G'.
        """
        query, *keys_and_values = projected
        repeats = self.size // math.gcd(self.size, keys_and_values[0].shape[1])
        if repeats > 1:
            # Each head beside its copies: queries of a rank stay with the keys that they had.
            keys_and_values = [heads.repeat_interleave(repeats, dim=1) for heads in keys_and_values]
        of_own_heads = []
        # One exchange each, in the order of the arguments, on every rank of the group.
        for heads in (query, *keys_and_values):
            by_rank = heads[0].unflatten(0, (self.size, -1)).transpose(1, 2)  # [N, T / N, H / N, D]
            received = self._exchanged(by_rank)
            of_own_heads.append(received.flatten(0, 1).transpose(0, 1)[None])  # [1, H / N, T, D]
        return tuple(of_own_heads)

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Exchange outputs of attention for a rank's heads, [T, H / N, D], for [T / N, H, D]."""
        by_rank = attended.unflatten(0, (self.size, -1))  # [N, T / N, H / N, D], by owner of tokens
        received = self._exchanged(by_rank)  # of this rank's tokens, by owner of heads
        return received.transpose(0, 1).flatten(1, 2)

    def pieces(self, lengths: list[int]) -> tuple[list[int], bool, bool]:
        """The documents in this rank's part of T.

        Returns:
            Numbers of their tokens here, whether the first began before, and the last goes on.
        """
        part = self.own(sum(lengths))
        ends = [0, *itertools.accumulate(lengths)]
        here = []
        for start, end in itertools.pairwise(ends):
            length = min(end, part.stop) - max(start, part.start)
            if length > 0:
                here.append(length)
        return here, part.start not in ends, part.stop not in ends

    def hand_on(self, values: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Send values to the next rank, without a wait.

        If it trains, the gradient of what is returned is the one that the next rank sends back.
        """
        self._send(values.detach().contiguous(), self.rank + 1)
        if trains:
            # The hook needs a place in the graph also where nothing before it trains.
            values = values if values.requires_grad else values.detach().requires_grad_()
            # In backward the ranks go in the reverse order. This one waits here for what the next
            # one sends back, which waits for nothing from this rank within the same layer.
            values.register_hook(
                lambda grad: self._receive(grad.new_empty(grad.shape), self.rank + 1)
            )
        return values

    def take_over(self, values: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Fill a leaf of the graph with what the rank before hands on.

        Its gradient is sent back when it is known.
        """
        # In place, so the caller has allocated memory of the right shape: nothing is asked for.
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
        # Those of a few layers may be under way, since the other rank may not have asked for the
        # last ones yet. A wait for each would make ranks work one after another.
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
        """The sum over the ranks, differentiable; each rank computes a share of what follows."""
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
        # all_to_all_single divides the memory, not the tensor.
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        if not parts.is_meta:
            dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Part i came from rank i and its gradient goes back there: the same exchange.
        return _AllToAll.apply(grads[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = values.clone()  # all_reduce works in place, and autograd may have saved the values
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Each rank has the gradient of its share of what follows: the whole one is their sum.
        return _Summed.apply(grads[0], ctx.group), None


class Tied(torch.autograd.Function):
    """Tied.apply(output, values): the output; its backward pass also reaches values handed on.

    Without it autograd would not call their hook, since nothing on this rank depends on them, and
    the next rank's gradient would not be received.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # One element, expanded, in no memory: the hook puts the next rank's gradient in its place.
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
