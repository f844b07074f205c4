"""Counts what merge-aware training does to round weights with their updates, for the planned speed.

No card has measured it yet.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from fsdp_qlora.model.adapters.merge_aware import (
    MergeAwareExperts,
    MergeAwareExpertsLora,
    MergeAwareLinear,
)
from fsdp_qlora.model.kernels.in_use import PLAIN, Ways
from fsdp_qlora.model.quantizers.rounded_weight import PLAIN_BYTES, RoundedWeight
from fsdp_qlora.planning.gpus import Gpu

# Bytes of memory that a kernel reads and writes for a weight, at most.
_KERNEL_BYTES = 2.0
# Rate of float64 as a share of 16-bit matrix products', by compute capability; on other cards less.
_FLOAT64_SHARE = {80: 1 / 32, 90: 1 / 29, 100: 1 / 61}
_FLOAT64_ELSEWHERE = 1 / 128


class RoundingWork(NamedTuple):
    """The work of a rank for the weights of a pass."""

    moved: float = 0
    """Bytes read and written."""
    operations: float = 0
    """Floating-point operations in float64."""

    def times(self, passes: float) -> "RoundingWork":
        """The work of some passes."""
        return RoundingWork(passes * self.moved, passes * self.operations)

    def float64_seconds(self, gpu: Gpu) -> float:
        """Time of its operations on a GPU."""
        share = _FLOAT64_SHARE.get(gpu.capability, _FLOAT64_ELSEWHERE)
        return self.operations / (gpu.tflops * 1e12 * share)


class _Rounded(NamedTuple):
    """A matrix with an adapter. experts: the number of such matrices, of which tokens choose."""

    base: nn.Module
    weights: int
    rank: int
    experts: int = 0

    def matrices(self, chosen: float) -> float:
        """The number of matrices that a pass rounds if it chooses some experts."""
        if not self.experts:
            return 1
        rounds_all = isinstance(self.base, RoundedWeight) and self.base.joins_matrices
        return self.experts if rounds_all else min(self.experts, chosen)


def rounding_work(
    blocks: nn.Module, ways: Ways, chosen_experts: float, *, is_decoded: bool = False
) -> RoundingWork:
    """The work of one pass through blocks on the meta device.

    Args:
        chosen_experts: number of experts of a layer that a pass chooses, at most.
        is_decoded: whether quantized linear layers stay decoded from pass to pass.
    """
    moved = 0.0
    operations = 0.0
    for rounded in _all_rounded(blocks):
        if is_decoded and not rounded.experts and isinstance(rounded.base, RoundedWeight):
            continue
        weights = rounded.matrices(chosen_experts) * rounded.weights
        moved += weights * _bytes_of(rounded.base, ways)
        operations += 2 * rounded.rank * weights
    return RoundingWork(moved, operations)


def _all_rounded(blocks: nn.Module) -> Iterator[_Rounded]:
    for module in blocks.modules():
        if isinstance(module, MergeAwareLinear):
            rank, columns = module.lora.lora_A.weight.shape
            rows = len(module.lora.lora_B.weight)
            yield _Rounded(module.base_layer, rows * columns, rank)
        elif isinstance(module, MergeAwareExperts):
            for name, lora in module.lora.items():
                assert isinstance(lora, MergeAwareExpertsLora)
                experts = lora.num_experts
                ranks, columns = lora.lora_A.weight.shape
                rows = len(lora.lora_B.weight)
                base = module.base_layer.get_submodule(name)
                yield _Rounded(base, rows * columns, ranks // experts, experts)


def _bytes_of(base: nn.Module, ways: Ways) -> float:
    if not isinstance(base, RoundedWeight):
        return PLAIN_BYTES
    by_kernel = ways.rounding != PLAIN and base.fits_kernel
    return _KERNEL_BYTES if by_kernel else base.rounding_bytes
