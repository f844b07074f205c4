"""Trials of the kernels that round quantized weights with an update, on random codes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.kernels.nf4 import BLOCKSIZE, NESTED_BLOCKSIZE
from fsdp_qlora.model.kernels.trial import Trial
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitTensors, Bnb4bitWeight, NestedAbsmax
from fsdp_qlora.model.quantizers.e2m1 import E2m1Tensors, E2m1Weight, Mxfp4Weight, Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import Fp8Tensors, Fp8Weight
from fsdp_qlora.model.quantizers.rounded_weight import WAYS, RoundedWeight, Update
from fsdp_qlora.run.decoding_trials import Sample, WeightForm, fp8_codes

# A small matrix: its rows and columns do not fill the kernels' programs.
_FEW = (37, 320)
_RANK = 16


class _Stored(NamedTuple):
    """A weight without memory of its own, and its tensors."""

    layer: RoundedWeight
    tensors: Any


def rounding_trials(
    forms: Sequence[WeightForm], shape: tuple[int, int], device: torch.device
) -> list[Callable[[], Trial]]:
    """A few weights, and a matrix of about this shape, in each form that is rounded again."""
    rows, columns = shape
    # Whole blocks of every format.
    large = (rows, max(1, columns // BLOCKSIZE) * BLOCKSIZE)
    return [
        partial(_trial, form, Sample(size, torch.float32, device))
        for form in forms
        if form.is_rounded
        for size in (_FEW, large)
    ]


def _trial(form: WeightForm, sample: Sample) -> Trial:
    layer, tensors = _STORED[form.kernel](*form.settings, sample)
    rows, columns = sample.shape

    def compute(way: Callable[..., list[Any]], *factors: torch.Tensor) -> list[torch.Tensor]:
        lora_A, lora_B = factors
        parts = way(layer, layer.whole, Update(lora_A, lora_B, 2.0), tensors)
        return flat(layer.join_parts(parts, tensors))

    # Numbers of few bits, whose sums are exact in any order.
    lora_A = (sample.codes(_RANK, columns).float() - 127.5) / 2**7
    lora_B = (sample.codes(rows, _RANK).float() - 127.5) / 2**12
    return Trial.of(WAYS, compute, lora_A, lora_B)


def flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a weight, and of tuples among them, in one list."""
    found = []
    for each in tensors:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif each is not None:
            found += flat(each)
    return found


def _bnb(quant_type: str, double_quant: bool, sample: Sample) -> _Stored:
    layer = Bnb4bitWeight(
        sample.shape,
        quant_type=quant_type,
        double_quant=double_quant,
        compute_dtype=torch.bfloat16,
    )
    num_blocks = layer.num_blocks
    codes = sample.codes(num_blocks * BLOCKSIZE // 2)
    if not double_quant:
        return _Stored(layer, Bnb4bitTensors(codes, sample.scales(num_blocks)))
    nested = NestedAbsmax(
        sample.scales(-(-num_blocks // NESTED_BLOCKSIZE)),
        torch.full((), 0.05, device=sample.device),
    )
    # Rows of two bytes hold them, the last with one of no block.
    absmax = sample.codes(num_blocks + num_blocks % 2)
    return _Stored(layer, Bnb4bitTensors(codes, absmax, nested))


def _e2m1(group_size: int, num_global: int, multiplies: bool, sample: Sample) -> _Stored:
    layer: E2m1Weight
    global_scale = None
    middle = 127
    if num_global:
        layer = Nvfp4Weight(sample.shape, compute_dtype=torch.bfloat16, multiplies=multiplies)
        global_scale = torch.full((1,), 1.3, device=sample.device)
        middle = 56
    else:
        layer = Mxfp4Weight(sample.shape, compute_dtype=torch.bfloat16)
    # Around 1, or below it: some groups need larger ones.
    num_groups = sample.groups(group_size)
    scales = sample.codes(num_groups, span=range(middle - 12, middle + 4))
    return _Stored(
        layer,
        E2m1Tensors(sample.codes(num_groups, group_size // 2), scales, global_scale),
    )


def _fp8(height: int, width: int, code_dtype: str, sample: Sample) -> _Stored:
    rows, columns = sample.shape
    options: dict[str, Any] = {"block": (height or rows, width or columns)}
    if not height and not width:
        options = {"num_parts": 1}
    layer = Fp8Weight(
        sample.shape,
        compute_dtype=torch.bfloat16,
        code_dtype=getattr(torch, code_dtype),
        **options,
    )
    scale = sample.scales(*layer.scale_shape)
    return _Stored(layer, Fp8Tensors(fp8_codes(sample), scale))


_STORED: dict[str, Callable[..., _Stored]] = {"bnb": _bnb, "e2m1": _e2m1, "fp8": _fp8}
