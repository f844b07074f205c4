"""8-bit linear layers with bitsandbytes' kernels: LLM.int8 (Dettmers et al. 2022).

Code q, from -127 to 127, of a row with scale s represents the weight q * s / 127.
"""

import functools
import logging
from typing import Any, NamedTuple

import bitsandbytes
import bitsandbytes.functional as bnb
import torch

from fsdp_qlora.model.quantizers.base import Matrix, QuantizedWeight
from fsdp_qlora.model.quantizers.stored import row_bytes
from fsdp_qlora.utils.safetensors_files import TensorForm

log = logging.getLogger("fsdp_qlora")

_MAX_ELEMENTS = 2**31 - 1  # bitsandbytes' kernels index a matrix with int32


class Int8Tensors(NamedTuple):
    """A matrix's codes and the largest magnitudes of its rows."""

    weight: torch.Tensor
    row_scale: torch.Tensor


class Int8Weight(QuantizedWeight):
    """A matrix [out, in] as 8-bit integers with one scale per row.

    Activations are rounded to 8 bits too.

    Parameters (frozen):
        weight: int8 [out, in] viewed as the compute dtype; rows are padded to whole elements of it.
        row_scale: float32 [out, 1], the largest magnitude of each row (bitsandbytes' SCB).
    Args:
        int8_threshold: activations of at least this magnitude are multiplied in the compute dtype;
            0 means none.
    """

    statistics = ("row_scale",)
    # Activations are rounded to 8 bits, so a product differs from one with the decoded weight.
    is_exact = False
    decoding_bytes = 3.0  # of three passes only the backward decodes, 7; the others read the codes

    def __init__(
        self, shape: tuple[int, ...], *, int8_threshold: float, compute_dtype: torch.dtype
    ) -> None:
        out_features, in_features = shape
        super().__init__(shape, compute_dtype=compute_dtype, row_weights=in_features)
        if in_features % 4:
            _warn_of_slow_products(in_features)
        self.threshold = int8_threshold
        # for the number of columns with outliers (`nonzero` in `_multiply`)
        self.waits_for_device = int8_threshold > 0
        self.weight = self._storage(out_features, in_features)
        self.row_scale = self._storage(out_features, 4, torch.float32)

    @property
    def kernel_bytes(self) -> float:
        # of bitsandbytes' own
        return self.decoding_bytes

    def decode_tensors(
        self, part: Matrix, dtype: torch.dtype, tensors: Int8Tensors
    ) -> torch.Tensor:
        codes, row_scale = _codes_and_scale(part, tensors)
        # In this order as bitsandbytes does for the gradient, for the same bits.
        return codes.to(dtype).mul_(row_scale.unsqueeze(1).mul(1.0 / 127.0))

    def multiply(
        self, part: Matrix, x: torch.Tensor, bias: torch.Tensor | None, tensors: Int8Tensors
    ) -> torch.Tensor:
        """Compute x W^T + b with each token's values rounded to 8 bits.

        Values above the threshold are not rounded.

        bitsandbytes keeps the precision of a whole column if one token of the batch is above the
        threshold in it, so a token's result depends on the other tokens. Here each token gets the
        result of a batch that has only this token.
        """
        return _multiply(x, bias, *_codes_and_scale(part, tensors), self.threshold)

    def tensors(self) -> Int8Tensors:
        return Int8Tensors(self.weight, self.row_scale)

    def quantize(self, values: torch.Tensor) -> Int8Tensors:
        rows = values.reshape(-1, self.row_weights)
        # A rank has none if there are fewer rows than ranks.
        if not len(rows):
            no_codes = rows.new_empty(0, dtype=torch.int8)
            return Int8Tensors(no_codes, rows.new_empty(0, dtype=torch.float32))
        # bitsandbytes rounds every dtype to fp16 first.
        codes, row_scale, _ = bnb.int8_vectorwise_quant(rows.half())
        return Int8Tensors(self._filled_up(codes), row_scale)

    def stored_forms(self) -> dict[str, TensorForm]:
        weight_shape = (self.shape[0], row_bytes(self.weight))
        return {
            "": TensorForm(torch.int8, weight_shape),
            ".row_scale": TensorForm(torch.float32, (self.shape[0],)),
        }

    def code_settings(self) -> dict[str, Any]:
        return {"bitsandbytes": bitsandbytes.__version__}  # the threshold concerns activations only


@functools.cache
def _warn_of_slow_products(in_features: int) -> None:
    log.warning(
        "int8 layers with %d inputs, not a multiple of 4, are multiplied in fp32 on a GPU.",
        in_features,
    )


def _codes_and_scale(part: Matrix, tensors: Int8Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """View the stored tensors as codes, int8 [out, in], and scales, float32 [out]."""
    # Without the padding of rows; contiguous() copies nothing if there is none.
    codes = tensors.weight.view(torch.int8)[:, : part.shape[1]].contiguous()
    return codes, tensors.row_scale.view(torch.float32).view(-1)


def _multiply(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    threshold: float,
    max_elements: int = _MAX_ELEMENTS,
) -> torch.Tensor:
    """Multiply x [.., in] by int8 codes [out, in] with row_scale [out].

    See `Int8Weight.multiply`. max_elements: the largest number of elements of a kernel's output.
    """
    # bitsandbytes' kernels ignore strides.
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    max_tokens = max_elements // max(codes.shape)
    if len(tokens) > max_tokens:
        parts = [
            _multiply(part, bias, codes, row_scale, threshold) for part in tokens.split(max_tokens)
        ]
        return torch.cat(parts).view(*x.shape[:-1], -1)
    rounded = tokens.half()
    outliers = None
    if threshold:
        # Zeros, so that outliers do not raise the scale of their token's other values.
        outliers = rounded.abs() >= threshold
        rounded = rounded.masked_fill(outliers, 0.0)
    x_codes, x_scale, _ = bnb.int8_vectorwise_quant(rounded)
    # The GPU kernel writes fp16 for every dtype. Tokens scaled to at most 1 stay in its range. The
    # factor is a power of two, the scale without its mantissa, so that it changes only exponents.
    # 2**-24 is fp16's smallest positive number; a token of zeros has scale 0.
    x_scale = x_scale.clamp(min=2**-24)
    power = 2 * (x_scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    y = torch.ops.bitsandbytes.int8_scaled_mm(
        x_codes, codes, x_scale / power, row_scale, dtype=tokens.dtype
    )
    # A float32 factor: it may be 65,536, which is beyond fp16.
    y.mul_(power.unsqueeze(1))
    if bias is not None:
        y.add_(bias)
    if outliers is not None:
        # Only the inputs in which some token has an outlier are decoded and multiplied.
        columns = outliers.any(dim=0).nonzero().view(-1)
        chosen_codes = codes[:, columns].contiguous()
        weight = bnb.int8_vectorwise_dequant(chosen_codes, row_scale).to(y.dtype)
        del chosen_codes
        y.addmm_(tokens.masked_fill(~outliers, 0.0)[:, columns], weight.T)
    return y.view(*x.shape[:-1], -1)
