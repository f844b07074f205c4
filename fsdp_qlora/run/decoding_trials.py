"""Trials of the kernels that decode quantized weights, on random codes."""

from collections import Counter
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
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight

Decode = Callable[..., torch.Tensor]

# A small matrix: groups that do not fill the kernels' programs.
_FEW = (37, 320)


class WeightForm(NamedTuple):
    """The settings of a weight that its decoding depends on. It goes to a process as JSON.

    kernel: name of the trial. settings: its first arguments. is_rounded: whether a kernel may round
    it with an update before each product.
    """

    kernel: str
    settings: Sequence[Any]
    is_rounded: bool = False


def weight_forms(modules: Iterable[nn.Module]) -> list[WeightForm]:
    """The forms of the quantized weights among modules, each once, frequent ones first.

    Weights that no kernel decodes are left out.
    """
    forms = map(_form_of, modules)
    counts = Counter(form for form in forms if form is not None)
    return [form for form, _ in counts.most_common()]


def _form_of(module: nn.Module) -> WeightForm | None:
    form = _decoded_form(module)
    if form is None or not isinstance(module, RoundedWeight) or not module.is_rounded_again:
        return form
    return form._replace(is_rounded=module.fits_kernel)


def _decoded_form(module: nn.Module) -> WeightForm | None:
    if isinstance(module, Bnb4bitWeight):
        return WeightForm("bnb", (module.quant_type, module.double_quant))
    if isinstance(module, E2m1Weight):
        return WeightForm("e2m1", (module.group_size, *_global_scales(module)))
    if isinstance(module, HqqWeight) and hqq_decoding.fits_kernel(module.group_size):
        return WeightForm("hqq", (module.n_bits, module.group_size))
    if isinstance(module, Fp8Weight):
        return _fp8_form(module)
    return None


def _global_scales(module: E2m1Weight) -> tuple[int, bool]:
    """0, 1, or 2 for several global scales; and whether they are factors."""
    if not isinstance(module, Nvfp4Weight):
        return 0, False
    return min(len(module.global_scale), 2), module.multiplies


def _fp8_form(module: Fp8Weight) -> WeightForm | None:
    rows, columns = module.shape[-2:]
    height, width = module.block
    if not fp8_decoding.fits_kernel(width, columns):
        return None
    # 0: all of them, in a matrix of any size
    if height >= rows:
        height = 0
    if width >= columns:
        width = 0
    name = str(module.code_dtype).removeprefix("torch.")
    return WeightForm("fp8", (height, width, name))


class Sample(NamedTuple):
    """The size of a matrix whose random codes are decoded, and where."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def groups(self, size: int) -> int:
        """The number of whole groups of `size` weights."""
        rows, columns = self.shape
        return max(1, rows * columns // size)

    def codes(self, *shape: int, span: range = range(256)) -> torch.Tensor:
        """Random bytes of a span, the same at each call."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(
            span.start,
            span.stop,
            shape,
            generator=generator,
            device=self.device,
            dtype=torch.uint8,
        )

    def scales(self, *shape: int) -> torch.Tensor:
        """Random float32 factors below 0.03, none of them 0."""
        return (self.codes(*shape).float() + 1) / 1e4


def decoding_trials(
    forms: Sequence[WeightForm], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Callable[[], Trial]]:
    """A few weights, and a matrix of this shape, in each form."""
    made: list[Callable[[], Trial]] = []
    for form in dict.fromkeys(each._replace(is_rounded=False) for each in forms):
        make = partial(_TRIALS[form.kernel], *form.settings)
        for size in (_FEW, shape):
            sample = Sample(size, dtype, device)
            made.append(partial(make, sample))
    return made


def _bnb(quant_type: str, is_nested: bool, sample: Sample) -> Trial:
    num_blocks = sample.groups(nf4.BLOCKSIZE)

    def compute(way: Decode, *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, absmax, *nested = tensors
        both = nested or (None, None)
        weights = way(
            codes,
            absmax,
            *both,
            quant_type,
            sample.dtype,
            0,
        )
        return [weights]

    codes = sample.codes(num_blocks * nf4.BLOCKSIZE // 2)
    if not is_nested:
        return Trial.of(nf4.WAYS, compute, codes, sample.scales(num_blocks))
    num_nested = -(-num_blocks // nf4.NESTED_BLOCKSIZE)
    return Trial.of(
        nf4.WAYS,
        compute,
        codes,
        sample.codes(num_blocks),
        sample.scales(num_nested),
        torch.full((), 0.05, device=sample.device),
    )


def _e2m1(group_size: int, num_global: int, multiplies: bool, sample: Sample) -> Trial:
    num_groups = sample.groups(group_size)
    groups_of_part = -(-num_groups // max(num_global, 1))

    def compute(way: Decode, *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, scales, *global_scales = tensors
        groups = float_decoding.GroupScales(
            scales,
            global_scales[0] if global_scales else None,
            groups_of_part=groups_of_part,
            multiplies=multiplies,
        )
        weights = way(
            codes,
            groups,
            sample.dtype,
            num_groups,
        )
        return [weights]

    # Around 1 in E4M3 and in E8M0, whose largest codes are no numbers.
    middle = 56 if num_global else 127
    inputs = [
        sample.codes(num_groups, group_size // 2),
        sample.codes(num_groups, span=range(middle - 8, middle + 8)),
    ]
    if num_global:
        inputs.append(torch.linspace(1.3, 3.7, num_global, device=sample.device))
    return Trial.of(float_decoding.WAYS, compute, *inputs)


def _fp8(height: int, width: int, code_dtype: str, sample: Sample) -> Trial:
    rows, columns = sample.shape
    height = height or rows
    width = width or columns

    def compute(way: Decode, *tensors: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = tensors
        blocks = fp8_decoding.BlockScales(scales, (height, width), rows)
        weights = way(
            codes,
            blocks,
            getattr(torch, code_dtype),
            sample.dtype,
        )
        return [weights]

    row_blocks = -(-rows // height)
    column_blocks = -(-columns // width)
    return Trial.of(
        fp8_decoding.WAYS, compute, fp8_codes(sample), sample.scales(row_blocks, column_blocks)
    )


def fp8_codes(sample: Sample) -> torch.Tensor:
    """Codes of positive and negative numbers: the largest codes are none."""
    codes = sample.codes(*sample.shape, span=range(240))
    codes[codes > 120] += 8
    return codes


def _hqq(n_bits: int, group_size: int, sample: Sample) -> Trial:
    num_groups = sample.groups(group_size)

    def compute(way: Decode, *tensors: torch.Tensor) -> list[torch.Tensor]:
        packed, scale_zero = tensors
        weights = way(
            packed,
            scale_zero,
            n_bits,
            sample.dtype,
            num_groups,
        )
        return [weights]

    packed = sample.codes(num_groups, group_size * n_bits // 8)
    return Trial.of(hqq_decoding.WAYS, compute, packed, sample.scales(num_groups, 2).half())


_TRIALS: dict[str, Callable[..., Trial]] = {
    "bnb": _bnb,
    "e2m1": _e2m1,
    "fp8": _fp8,
    "hqq": _hqq,
}
