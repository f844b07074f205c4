"""Copies of adapters' fp32 weights in 16 bits, for a run on one rank.

Where ranks share the weights, FSDP2 makes such copies when it gathers them. On one rank there is
nothing to gather or to reduce, and the hooks of FSDP2's groups would take 13% of the host's time.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_qlora.model.adapters.lora import ExpertsLora, LoraAdapter

# Bytes at a multiple of which torch's allocator for CUDA gives memory.
_ALIGNMENT = 512
# Bytes of gradients in fp32 that are added up at a time. All together would take as much as the
# weights once more.
_SLICE = 64 * 2**20


class WeightCopies:
    """16-bit copies of all A and B of a model. They get the gradients of a backward pass.

    As with FSDP2, one backward pass adds gradients up in 16 bits, and passes are added up in fp32.

    Args:
        adapters: with weights in fp32, which may still be on the meta device.
        dtype: of the copies.
    """

    def __init__(self, adapters: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._adapters = [each for each in adapters if isinstance(each, LoraAdapter | ExpertsLora)]
        self._dtype = dtype
        self._weights: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        # of each weight when it was copied
        self._versions: list[int] = []
        self._will_collect = False

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Copy the weights that have changed since they were copied.

        A hook before the first module with adapters. Changes are seen by the weights' versions:
        whoever writes through `.data` or by a kernel of their own has to call
        `torch.autograd.graph.increment_version`. Weights stay the same parameters from the first
        pass on, and train or do not.
        """
        if not self._copies:
            self._allocate()
        if self._will_collect:
            self._forget_failed_pass()
        versions = [weight._version for weight in self._weights]
        if versions == self._versions:
            return
        changed = [
            index
            for index, (version, before) in enumerate(zip(versions, self._versions, strict=True))
            if version != before
        ]
        torch._foreach_copy_(
            [self._copies[index] for index in changed], [self._weights[index] for index in changed]
        )
        self._versions = versions

    def _allocate(self) -> None:
        # Not before weights have their memory.
        all_A = [adapter.lora_A.weight for adapter in self._adapters]
        all_B = [adapter.lora_B.weight for adapter in self._adapters]
        copies_of_A = self._below_each_other(all_A)
        copies_of_B = [torch.empty_like(weight, dtype=self._dtype) for weight in all_B]
        self._weights = [*all_A, *all_B]
        self._copies = [*copies_of_A, *copies_of_B]
        self._versions = [-1] * len(self._weights)
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.requires_grad_(weight.requires_grad)
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(self._collect_at_end)
        for adapter, *copies in zip(self._adapters, copies_of_A, copies_of_B, strict=True):
            adapter.copies = (copies[0], copies[1])

    def _below_each_other(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for copies of A, in one piece for those that follow each other with one width.

        A function over several layers, such as q, k and v, then reads all A as one matrix.
        """
        copies: list[torch.Tensor] = []
        for _, group in itertools.groupby(weights, self._kind):
            together = [*group]
            rows = [len(weight) for weight in together]
            first = together[0]
            memory = first.new_empty(sum(rows), *first.shape[1:], dtype=self._dtype)
            # Detached: for autograd they are no views of one tensor.
            copies += [part.detach() for part in memory.split(rows)]
        return copies

    def _kind(self, weight: torch.Tensor) -> object:
        """Equal for weights whose copies lie below each other."""
        is_aligned = weight.numel() * self._dtype.itemsize % _ALIGNMENT == 0
        # Behind others a copy would not begin where kernels read fastest.
        return weight.shape[1:], weight.requires_grad, weight.device, is_aligned or id(weight)

    def _forget_failed_pass(self) -> None:
        """Drop what a backward pass has left that ended with an error, such as a lack of memory."""
        self._will_collect = False
        for copy in self._copies:
            copy.grad = None

    def _collect_at_end(self, _: torch.Tensor) -> None:
        """Have the gradients collected at the end of the backward pass that is under way."""
        if not self._will_collect:
            self._will_collect = True
            # Where FSDP2 ends its backward passes, too.
            torch.autograd.Variable._execution_engine.queue_callback(self._collect)

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the copies' gradients to the weights' own, in fp32."""
        self._will_collect = False
        pairs = zip(self._weights, self._copies, strict=True)
        waiting = [(weight, copy) for weight, copy in pairs if copy.grad is not None]
        for some in _in_slices(waiting):
            _move_gradients(some)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _in_slices(pairs: Pairs) -> Iterator[Pairs]:
    """Pairs of weights and copies, with at most some MiB of gradients at a time."""
    piece: Pairs = []
    num_bytes = 0
    for weight, copy in pairs:
        if piece and num_bytes + weight.nbytes > _SLICE:
            yield piece
            piece = []
            num_bytes = 0
        piece.append((weight, copy))
        num_bytes += weight.nbytes
    if piece:
        yield piece


def _move_gradients(pairs: Pairs) -> None:
    """Move gradients from copies to weights, with a few kernels for all of them."""
    in_16_bits = [copy.grad for _, copy in pairs if copy.grad is not None]
    in_32_bits = [torch.empty_like(weight) for weight, _ in pairs]
    torch._foreach_copy_(in_32_bits, in_16_bits)
    totals: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for (weight, copy), gradient in zip(pairs, in_32_bits, strict=True):
        copy.grad = None
        if weight.grad is None:
            weight.grad = gradient
        else:
            totals.append(weight.grad)
            added.append(gradient)
    if added:
        torch._foreach_add_(totals, added)
