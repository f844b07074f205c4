"""HQQ weights of 8, 4, 3 or 2 bits: linear layers and experts.

The method is half-quadratic quantization (Badri and Shaji 2023).

A group is `group_size` consecutive weights of the row-major flattened weight (axis 1 of the hqq
library). Code q represents the weight (q - zero) * scale, with the zero and scale of its group.

Bits: a byte has several codes that are far apart in the group, the first of them in its highest
bits. With 4 bits, byte i of a group has element i in its high half and element i + group_size / 2
in its low one. (The hqq library's BitPack does so with rows; here a group has bytes of its own.)
3-bit codes have their lower two bits in one plane of bytes and the third bit in another.
"""

import math
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.kernels.hqq_decoding import PLANES, decode_groups
from fsdp_qlora.model.quantizers.base import Matrix, QuantizedWeight, groups_at_a_time
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

# With few groups a GPU sums each group in another order, so the number of groups is padded to a
# multiple of this.
_FEW_GROUPS = 256
# The hqq library's own solver settings, except for early_stop: see _quantize_groups.
_SOLVER = {
    "lp_norm": 0.7,
    "beta": 10.0,
    "kappa": 1.01,
    "iters": 20,
    "tol": 0.0,
    "early_stop": False,
    "scale_gridsearch": False,
}
# Bits of a code -> bytes that torch's operators read and write to decode one: 11 of these to
# subtract and scale.
_DECODING_BYTES = {8: 11.3, 4: 15.3, 3: 26.8, 2: 16.3}


class HqqTensors(NamedTuple):
    """A weight's codes, a group per row, and the groups' float16 scales and zeros."""

    weight: torch.Tensor
    scale_zero: torch.Tensor


class HqqWeight(QuantizedWeight):
    """Weights as codes of n_bits, with a scale and a zero for each group.

    Parameters (frozen):
        weight: one group of codes per row, [groups, group_size * n_bits / 8 bytes] viewed as the
            compute dtype.
        scale_zero: float16 scale and zero of each group, [groups, 1] viewed as float32 (see
            QuantizedWeight).
    """

    selects_rows = True
    statistics = ("scale_zero",)

    def __init__(
        self, shape: tuple[int, ...], *, n_bits: int, group_size: int, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(shape, compute_dtype=compute_dtype, row_weights=group_size)
        self.n_bits = n_bits
        self.group_size = group_size
        self.decoding_bytes = _DECODING_BYTES[n_bits]
        num_groups = -(-math.prod(shape) // group_size)
        self.weight = self._storage(num_groups, group_size * n_bits // 8)
        self.scale_zero = self._storage(num_groups, 4, torch.float32)

    def decode_tensors(self, part: Matrix, dtype: torch.dtype, tensors: HqqTensors) -> torch.Tensor:
        num_weights = math.prod(part.shape)
        (first, span) = part.spans(self.group_size)
        groups = slice(first, first + span)
        packed = part.choose(tensors.weight.view(torch.uint8)[groups])
        statistics = part.choose(tensors.scale_zero.view(torch.float16)[groups])
        step = groups_at_a_time(packed.device, self.group_size)
        decoded = decode_groups(packed, statistics, self.n_bits, dtype, step)
        return decoded.view(-1)[:num_weights].view(part.shape)

    def tensors(self) -> HqqTensors:
        return HqqTensors(self.weight, self.scale_zero)

    def quantize(self, values: torch.Tensor) -> HqqTensors:
        codes, scale_zero = _quantize_groups(values, self.n_bits, self.group_size)
        return HqqTensors(_pack(codes, self.n_bits), scale_zero)

    def stored_forms(self) -> dict[str, TensorForm]:
        num_groups = self.scale_zero.shape[0]
        num_bytes = self.group_size * self.n_bits // 8
        return {
            "": TensorForm(torch.uint8, (num_groups, num_bytes)),
            ".scale_zero": TensorForm(torch.float16, (num_groups, 2)),
        }

    def code_settings(self) -> dict[str, Any]:
        import hqq

        return {
            "n_bits": self.n_bits,
            "group_size": self.group_size,
            "solver": _SOLVER,
            "hqq": hqq.__version__,
            "torch": torch.__version__,  # the solver uses its operations
        }


def _quantize_groups(
    values: torch.Tensor, n_bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize whole groups (the last may be short).

    Returns uint8 codes [groups, group_size], and float16 scale and zero [groups, 2].

    As HQQLinear with axis=1: the scale is computed from the group's range, the zero by the
    library's proximal solver, in float32. HQQLinear's solver stops when the error of the whole
    tensor no longer decreases, so a shard's result would depend on the split. Here it always runs
    all 20 iterations: a group's result depends only on the group. Scale and zero [groups, 2] are
    float16 (UserError beyond its range); HQQLinear keeps them in its compute dtype.
    """
    from hqq.core.optimize import optimize_weights_proximal_v2

    # A rank has none if there are fewer groups than ranks.
    if not values.numel():
        empty = values.new_empty(0, group_size, dtype=torch.uint8)
        return empty, values.new_empty(0, 2, dtype=torch.float16)
    flat = values.flatten()
    # A short group is padded with its last weight, which does not change the range.
    num_missing = -flat.numel() % group_size
    flat = torch.cat([flat, flat[-1:].expand(num_missing)])
    largest = 2**n_bits - 1
    all_codes = []
    statistics = []
    # The solver has several temporaries of its input's size.
    step = groups_at_a_time(values.device, group_size, on_gpu=2**22)
    for piece in flat.view(-1, group_size).split(step):
        copies = piece[-1:].expand(-len(piece) % _FEW_GROUPS, -1)
        groups = torch.cat([piece, copies]).float()
        low, high = groups.aminmax(dim=1, keepdim=True)
        # as in the library: keeps 1 / scale within float16
        scale = (largest / (high - low)).clamp(max=2e4)
        # A group of nearly equal values, which the library gives the scale 1, too.
        scale = torch.where(high - low <= 1e-4, 1.0, scale)
        zero = -low * scale
        codes, scale, zero = optimize_weights_proximal_v2(
            groups,
            scale,
            zero.round() if n_bits == 4 else zero,  # as in the library
            [0, largest],
            axis=1,
            dtype=torch.float32,
            opt_params=_SOLVER,
        )
        # The solver works with 1 / scale.
        all_codes.append(codes[: len(piece)].to(torch.uint8))
        scale_and_zero = torch.cat([1.0 / scale, zero], dim=1)
        statistics.append(scale_and_zero[: len(piece)].half())
    scale_zero = torch.cat(statistics)
    if not scale_zero.isfinite().all():
        raise UserError(
            f"HQQ cannot quantize this model: {group_size} consecutive weights differ too little "
            "for their magnitude. Use --train_type qlora."
        )
    return torch.cat(all_codes), scale_zero


def _pack(codes: torch.Tensor, n_bits: int) -> torch.Tensor:
    """Pack uint8 codes [groups, group_size] into bytes [groups, group_size * n_bits / 8].

    First codes are in high bits.
    """
    planes = []
    shift = 0
    for bits in PLANES[n_bits]:
        # Codes of different chunks share a byte, so that unpacking concatenates whole chunks.
        mask = 2**bits - 1
        plane, *parts = (codes >> shift & mask).chunk(8 // bits, dim=1)
        for part in parts:
            plane = plane << bits | part
        planes.append(plane)
        shift += bits
    return torch.cat(planes, dim=1)
