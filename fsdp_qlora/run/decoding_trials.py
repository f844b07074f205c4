"""Trials of the kernels that decode quantized weights, on random codes."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_qlora.model.kernels import float_decoding, fp8_decoding, hqq_decoding, nf4
from fsdp_qlora.model.kernels.trial import Trial
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitWeight
from fsdp_qlora.model.quantizers.e2m1 import E2m1Weight, Nvfp4Weight
from fsdp_qlora.model.quantizers.fp8 import Fp8Weight
from fsdp_qlora.model.quantizers.hqq import HqqWeight

# A small matrix: groups that do not fill the kernels' programs.
_FEW = (37, 320)


class WeightForm(NamedTuple):
    """What the decoding of a weight depends on besides its size. It goes to a process as JSON.

    kernel: whose trial it is. settings: arguments of that trial.
    """

    kernel: str
    settings: Sequence[Any]


def weight_forms(modules: Iterable[nn.Module]) -> list[WeightForm]:
    """The forms of the quantized weights among modules, each once, the most frequent first.

    Without those that have no kernel.
    """
    counts: dict[WeightForm, int] = {}
    for module in modules:
        form = _form_of(module)
        if form is not None:
            counts[form] = counts.get(form, 0) + 1
    return sorted(counts, key=lambda form: -counts[form])


def _form_of(module: nn.Module) -> WeightForm | None:
    if isinstance(module, Bnb4bitWeight):
        return WeightForm("bnb", (module.quant_type, module.double_quant))
    if isinstance(module, E2m1Weight):
        number = len(module.global_scale) if isinstance(module, Nvfp4Weight) else 0
        multiplies = isinstance(module, Nvfp4Weight) and module.multiplies
        return WeightForm("e2m1", (module.group_size, min(number, 2), multiplies))
    if isinstance(module, HqqWeight) and hqq_decoding.fits_kernel(module.group_size):
        return WeightForm("hqq", (module.n_bits, module.group_size))
    if isinstance(module, Fp8Weight):
        rows, columns = module.shape[-2:]
        height, width = module.block
        if not fp8_decoding.fits_kernel(width, columns):
            return None
        # 0: all of them, in a matrix of any size
        block = (height if height < rows else 0, width if width < columns else 0)
        return WeightForm("fp8", (*block, str(module.code_dtype).removeprefix("torch.")))
    return None


def decoding_trials(
    forms: Sequence[WeightForm], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Callable[[], Trial]]:
    """A few weights and a matrix of this shape, in each form; the second is the most work."""
    made: list[Callable[[], Trial]] = []
    for form in forms:
        make = partial(_TRIALS[form.kernel], *form.settings)
        made += [partial(make, each, dtype, device) for each in (_FEW, shape)]
    return made


def _bytes(shape: tuple[int, ...], device: torch.device, span: range = range(256)) -> torch.Tensor:
    """Random bytes of a span, the same at each call."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.uint8}
    return torch.randint(span.start, span.stop, shape, **options)


def _scales(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Random float32 factors below 0.03, none of them 0."""
    return (_bytes(shape, device).float() + 1) / 1e4


def _bnb(
    quant_type: str,
    is_nested: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Trial:
    def compute(way: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, absmax, *nested = tensors
        both = nested or (None, None)
        return [way(codes, absmax, *both, quant_type, dtype, 0)]

    num_blocks = max(1, shape[0] * shape[1] // nf4.BLOCKSIZE)
    codes = _bytes((num_blocks * nf4.BLOCKSIZE // 2,), device)
    inputs: tuple[torch.Tensor, ...] = (codes, _scales((num_blocks,), device))
    if is_nested:
        nested = _scales((-(-num_blocks // nf4.NESTED_BLOCKSIZE),), device)
        offset = torch.full((), 0.05, device=device)
        inputs = (codes, _bytes((num_blocks,), device), nested, offset)
    return Trial({name: partial(compute, way) for name, way in nf4.WAYS.items()}, inputs)


def _e2m1(
    group_size: int,
    num_global: int,
    multiplies: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Trial:
    num_groups = max(1, shape[0] * shape[1] // group_size)

    def compute(way: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, scales, *global_scales = tensors
        global_scale = global_scales[0] if global_scales else None
        groups_of_part = -(-num_groups // max(num_global, 1))
        groups = float_decoding.GroupScales(
            scales, global_scale, groups_of_part=groups_of_part, multiplies=multiplies
        )
        return [way(codes, groups, dtype, num_groups)]

    # Around 1 in E4M3 and in E8M0, whose largest codes are no numbers.
    middle = 56 if num_global else 127
    inputs: tuple[torch.Tensor, ...] = (
        _bytes((num_groups, group_size // 2), device),
        _bytes((num_groups,), device, range(middle - 8, middle + 8)),
    )
    if num_global:
        inputs = (*inputs, torch.linspace(1.3, 3.7, num_global, device=device))
    return Trial({name: partial(compute, way) for name, way in float_decoding.WAYS.items()}, inputs)


def _fp8(
    height: int,
    width: int,
    code_dtype: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Trial:
    rows, columns = shape
    block = (height or rows, width or columns)

    def compute(way: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = tensors
        blocks = fp8_decoding.BlockScales(scales, block, rows)
        return [way(codes, blocks, getattr(torch, code_dtype), dtype)]

    # Positive and negative numbers: the largest codes are none.
    codes = _bytes(shape, device, range(240))
    codes[codes > 120] += 8
    inputs = (codes, _scales((-(-rows // block[0]), -(-columns // block[1])), device))
    return Trial({name: partial(compute, way) for name, way in fp8_decoding.WAYS.items()}, inputs)


def _hqq(
    n_bits: int,
    group_size: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Trial:
    num_groups = max(1, shape[0] * shape[1] // group_size)

    def compute(way: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        packed, scale_zero = tensors
        return [way(packed, scale_zero, n_bits, dtype, num_groups)]

    inputs = (
        _bytes((num_groups, group_size * n_bits // 8), device),
        _scales((num_groups, 2), device).half(),
    )
    return Trial({name: partial(compute, way) for name, way in hqq_decoding.WAYS.items()}, inputs)


_TRIALS: dict[str, Callable[..., Trial]] = {
    "bnb": _bnb,
    "e2m1": _e2m1,
    "fp8": _fp8,
    "hqq": _hqq,
}
