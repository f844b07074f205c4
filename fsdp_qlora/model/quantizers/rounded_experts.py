"""Quantized weights of experts to which low-rank updates are added, rounded to their format again.

An expert's matrix is rounded as a linear layer's is (rounded_weight.py), in the layout in which its
codes are stored. Only the experts that are asked for are rounded.

Shapes: a weight is stored as [E, rows, columns], of E experts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.quantizers.rounded_weight import Update


class ExpertsUpdate(NamedTuple):
    """s L R for each expert's matrix, as it is stored.

    left: [E, rows, rank]. right: [E, rank, columns]. Both are float32, as adapters are saved.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float

    def transposed(self) -> "ExpertsUpdate":
        """The update of matrices that are stored as the transposes of these."""
        return ExpertsUpdate(self.right.mT, self.left.mT, self.scaling)

    def of(self, expert: int) -> Update:
        """The update of one expert's matrix."""
        # Contiguous, so that a sum has one order wherever the factors are from.
        return Update(self.right[expert].contiguous(), self.left[expert].contiguous(), self.scaling)


@torch.no_grad()
def round_experts(layer: Any, experts: Sequence[int], update: ExpertsUpdate, tensors: Any) -> Any:
    """The tensors of a layer of experts after rounding some of them with their updates.

    Args:
        layer: a `QuantizedExperts` and `RoundedWeight`.
        experts: their numbers, in any order.
        tensors: of the layer. Those that are returned have the same forms, and are uninitialized
            where other experts are.
    """
    result: Any = None
    for run in _runs(layer, experts):
        parts = [
            part
            for expert in run
            for part in layer.rounded_parts(layer.expert(expert), update.of(expert), tensors)
        ]
        joined = layer.join_parts(parts, tensors)
        # Freed before the next expert is rounded.
        del parts
        if result is None:
            result = _with_memory(joined, tensors)
        _write(result, joined, run)
    return result


def experts_to_round(layer: Any, experts: Sequence[int]) -> Sequence[int]:
    """The experts that have to be rounded for these: all of them if some share a statistic."""
    return range(layer.shape[0]) if layer.joins_matrices else experts


def _runs(layer: Any, experts: Sequence[int]) -> Iterator[range]:
    """Ranges of experts that are rounded together."""
    if layer.joins_matrices:
        yield range(layer.shape[0])
        return
    for expert in experts:
        yield range(expert, expert + 1)


def _with_memory(joined: Any, stored: Any) -> Any:
    """The form of `stored`, in which what `joined` shares with it stays, and the rest is new."""
    if joined is stored:
        return stored
    if isinstance(stored, tuple):
        pairs = zip(joined, stored, strict=True)
        return type(stored)(*[_with_memory(*pair) for pair in pairs])
    return torch.empty_like(stored)


def _write(result: Any, joined: Any, run: range) -> None:
    """Write the bytes of a range of experts to their places."""
    if joined is result:
        return
    if isinstance(result, tuple):
        for pair in zip(result, joined, strict=True):
            _write(*pair, run)
        return
    source = joined.reshape(-1).view(torch.uint8)
    # Every expert has the same number of bytes, and a range that begins later has no padding.
    start = run.start * (len(source) // len(run))
    target = result.view(-1).view(torch.uint8)
    target[start : start + len(source)] = source
