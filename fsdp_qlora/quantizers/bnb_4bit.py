"""NF4 and FP4 weights in bitsandbytes' packing: linear layers and experts.

Shapes: a linear's weight is [out, in], experts' are [experts, out, in] or, transposed, [experts, in, out]; a block
is `blocksize` consecutive weights of the row-major flattened weight.

In files they have the format in which bitsandbytes and transformers save 4-bit weights. For a weight
X [out, in], n = out * in, in blocks of 64 (m of them):
    X: the codes, two per byte, (n + 1) / 2 bytes under any dtype (bnb_4bit_quant_storage).
    X.absmax: [m], uint8 with double quantization, else float32.
    X.nested_absmax: with double quantization, float32 [(m + 255) / 256].
    X.quant_map, X.nested_quant_map: the values that the codes stand for, float32 [16] and [256].
    X.quant_state.bitsandbytes__nf4 (or fp4): JSON as bytes, with the shape and the mean of absmax.
These are the bytes of Bnb4bitWeight's parameters, so a rank's part of a file is its shard.

bitsandbytes quantizes linear layers only. A 3-D parameter of experts is stored in the same way under its own name
(X = model.layers.0.mlp.experts.gate_up_proj). Only this package reads that: in cache entries, and in models saved by
the quantize command, which have EXPERTS_KEY in their quantization_config.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import bitsandbytes
import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from fsdp_qlora.errors import UserError
from fsdp_qlora.quantizers.base import (
    MatrixFormat,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedWeight,
    StoredParameter,
    write_bytes,
    write_rows,
)
from fsdp_qlora.ranks.distributed import gather_rows, shard_rank, shard_size
from fsdp_qlora.storage.safetensors_files import TensorForm

# Suffixes that bitsandbytes appends to the name of a 4-bit weight: its parts, and the state that marks it as 4-bit.
PACKED_SUFFIXES = ("", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
PACKED_STATE = ".quant_state.bitsandbytes__"
EXPERTS_KEY = "fsdp_qlora_experts"
_STATE_BYTES = 256  # enough for the JSON of any shape, so a file can be laid out before the mean is known
NESTED_BLOCKSIZE = 256  # absmax values that share one nested absmax: double quantization (Dettmers et al. 2023)
_BLOCKSIZE = 64  # weights that share one absmax: QLoRA (Dettmers et al. 2023), bitsandbytes' default
_PIECE = 2**17  # weights quantized at a time on a CPU, a multiple of both block sizes
# Tokens up to which bitsandbytes may fuse decoding and product. For more its operator decodes the matrix as we do, and
# takes the host some microseconds longer.
_FUSED_TOKENS = 1536
_GPU_PIECE = 2**30  # weights quantized or decoded at a time on a GPU: bitsandbytes' kernels count in int32


@dataclass(frozen=True, kw_only=True)
class _Bnb4bitFormat(MatrixFormat):
    quant_type: str


class Bnb4bitWeight(QuantizedWeight):
    """NF4 or FP4 weights in bitsandbytes' packing.

    Parameters (frozen; quant_storage is the compute dtype):
        weight: two codes per byte, [blocks, blocksize / 2 bytes] viewed as quant_storage. Rows are blocks, so that a
            shard is made of whole blocks and can be quantized by itself.
        absmax: largest magnitude of each block; with double_quant one byte each viewed as quant_storage, else
            float32 [blocks, 1].
        nested_absmax: with double_quant, float32 [blocks / 256, 1], one for each 256 absmax.
    Buffer:
        absmax_offset: with double_quant, float32 scalar, the mean of absmax; `offset` is its value.
    """

    format: _Bnb4bitFormat
    selects_rows = True
    absmax_offset: torch.Tensor
    offset = 0.0

    def __init__(
        self, shape: tuple[int, ...], *, quant_type: str, double_quant: bool, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.compute_dtype, self.double_quant = compute_dtype, double_quant
        self.format = _Bnb4bitFormat(self.shape, quant_type=quant_type)
        self.num_blocks = -(-math.prod(shape) // _BLOCKSIZE)
        self.row_weights = _BLOCKSIZE
        self.weight = self._storage(self.num_blocks, _BLOCKSIZE // 2)
        if double_quant:
            self.absmax = self._storage(-(-self.num_blocks // compute_dtype.itemsize), compute_dtype.itemsize)
            self.nested_absmax = self._storage(-(-self.num_blocks // NESTED_BLOCKSIZE), 4, torch.float32)
            self.statistics = ("absmax", "nested_absmax")
            self.register_buffer("absmax_offset", torch.zeros((), device="cpu"), persistent=False)
        else:
            self.absmax = self._storage(self.num_blocks, 4, torch.float32)
            self.statistics = ("absmax",)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*super().tensors(), *((self.absmax_offset,) if self.double_quant else ()))

    @staticmethod
    def decode_tensors(fmt: _Bnb4bitFormat, dtype: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
        return _dequantize(fmt, dtype, *tensors)

    # The stored matrix is W, or W^T where the format is transposed: the two products are then swapped.

    @classmethod
    def multiply(
        cls, fmt: _Bnb4bitFormat, x: torch.Tensor, bias: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        if not fmt.transposed:
            return _times_transposed(x, fmt, tensors, bias)
        y = x @ _dequantize(fmt, x.dtype, *tensors)
        return y if bias is None else y + bias

    @classmethod
    def multiply_grad(cls, fmt: _Bnb4bitFormat, grad_y: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        if fmt.transposed:
            return _times_transposed(grad_y, fmt, tensors)
        return grad_y @ _dequantize(fmt, grad_y.dtype, *tensors)

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        return quantize_blocks(values, self.format.quant_type)[0]

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        # Zeros change no block's largest magnitude. Rows are blocks for the reason given in `_dequantize`.
        blocks = F.pad(weight.flatten(), (0, -weight.numel() % _BLOCKSIZE)).view(-1, _BLOCKSIZE)
        codes, state = bnb.quantize_4bit(
            blocks,
            blocksize=_BLOCKSIZE,
            compress_statistics=self.double_quant,
            quant_type=self.format.quant_type,
        )
        state.dtype = self.compute_dtype
        return bnb.dequantize_4bit(codes, state).flatten()[: weight.numel()].view(weight.shape)

    @torch.no_grad()
    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        rank, size = shard_rank(mesh), shard_size(mesh)
        codes, absmax = quantize_blocks(values, self.format.quant_type)
        write_bytes(self.weight, codes)
        if not self.double_quant:
            write_bytes(self.absmax, absmax)
            return
        # The second quantization has a mean over the whole tensor. Every rank gets the absmax of all blocks
        # (1/32 of the bf16 bytes) and repeats bitsandbytes' own computation, so it is exact on any split.
        absmax = gather_rows(absmax, self.num_blocks, mesh)
        absmax_8bit, nested_absmax = self.quantize_absmax(absmax)
        write_rows(self.absmax, absmax_8bit, rank, size)
        write_rows(self.nested_absmax, nested_absmax, rank, size)

    def quantize_absmax(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize all blocks' float32 absmax to uint8 codes and nested absmax, and store the offset."""
        offset = absmax.mean()
        absmax_8bit, state = bnb.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCKSIZE)
        self._set_offset(offset.item())
        return absmax_8bit, state.absmax

    def _set_offset(self, offset: float) -> None:
        self.offset = offset
        self.absmax_offset.fill_(offset)

    # Stored in bitsandbytes' own format.

    def stored_parameters(self) -> dict[str, StoredParameter]:
        stored = {"": StoredParameter("weight", TensorForm(torch.uint8, (-(-math.prod(self.shape) // 2), 1)))}
        if not self.double_quant:
            return stored | {".absmax": StoredParameter("absmax", TensorForm(torch.float32, (self.num_blocks,)))}
        nested = -(-self.num_blocks // NESTED_BLOCKSIZE)
        return stored | {
            ".absmax": StoredParameter("absmax", TensorForm(torch.uint8, (self.num_blocks,))),
            ".nested_absmax": StoredParameter("nested_absmax", TensorForm(torch.float32, (nested,))),
        }

    def stored_whole(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        quant_type = self.format.quant_type
        offset = self.offset if self.double_quant else None
        state = write_state(self.shape, quant_type, _BLOCKSIZE, offset, dtype)
        return value_tables(quant_type, double_quant=self.double_quant) | {f"{PACKED_STATE}{quant_type}": state}

    def load_whole(self, suffix: str, content: torch.Tensor, name: str) -> None:
        quant_type, double_quant = self.format.quant_type, self.double_quant
        if not suffix.startswith(PACKED_STATE):
            check_table(value_tables(quant_type, double_quant=double_quant)[suffix], content, name)
            return
        offset = read_state(content, name, self.shape, quant_type, _BLOCKSIZE, double_quant=double_quant)
        if double_quant:
            self._set_offset(offset)

    def code_settings(self) -> dict[str, Any]:
        return {
            "quant_type": self.format.quant_type,
            "blocksize": _BLOCKSIZE,
            "double_quant": self.double_quant,
            "bitsandbytes": bitsandbytes.__version__,
        }

    def describe_code(self) -> str:
        return f"{self.format.quant_type}{', double quantization' * self.double_quant}"


class Bnb4bitLinear(QuantizedLinear, Bnb4bitWeight):
    """A linear layer with its weight in bitsandbytes' 4-bit packing."""


class Bnb4bitExperts(QuantizedExperts, Bnb4bitWeight):
    """The experts of a layer in bitsandbytes' 4-bit packing."""


def quantize_blocks(values: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize whole blocks (the last may be short): codes, two per byte, and float32 absmax of each block.

    Works in pieces: bitsandbytes' CPU kernel needs temporary memory of many times its input, and its GPU kernel
    counts in 32 bits, which is too few for a rank's part of the largest models' experts.
    """
    if not values.numel():  # fewer blocks than ranks
        return values.new_empty(0, dtype=torch.uint8), values.new_empty(0, dtype=torch.float32)
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(piece, _BLOCKSIZE, quant_type, torch.uint8)
        for piece in values.flatten().split(_PIECE if values.device.type == "cpu" else _GPU_PIECE)
    ]
    return torch.cat([codes.view(-1) for codes, _ in pieces]), torch.cat([absmax for _, absmax in pieces])


def elements(tensor: torch.Tensor, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """Elements [first, first + count) of a tensor's bytes as `dtype`."""
    # Of a linear layer these are all, and the host does this for every product: views take it a microsecond each.
    found = tensor if tensor.dtype == dtype else tensor.view(dtype)
    if found.dim() > 1:
        found = found.view(-1)
    return found if found.shape[0] == count else found[first : first + count]


def _kernel_operands(
    fmt: _Bnb4bitFormat, weight: torch.Tensor, absmax: torch.Tensor, *nested: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Storage tensors -> arguments of bitsandbytes' kernels for the matrix of `fmt`.

    Args:
        weight, absmax, nested: the parameters of Bnb4bitWeight, and absmax_offset; nested if double_quant.
    Returns:
        codes of whole blocks, uint8 [blocks * 32, 1]; scales; and the arguments of gemm_4bit for double quantization.
        Where there are none, the scales are absmax itself, float32 [blocks], else the nested absmax.
    """
    num_weights = math.prod(fmt.shape)
    first_block, num_blocks = fmt.first // _BLOCKSIZE, -(-num_weights // _BLOCKSIZE)
    codes = elements(weight, torch.uint8, fmt.first // 2, num_blocks * _BLOCKSIZE // 2)
    if not nested:
        return codes, elements(absmax, torch.float32, first_block, num_blocks), {}
    nested_absmax, offset = nested
    # A matrix starts at a block of weights, but its absmax may start inside a block of 256 absmax shared with the
    # previous expert. So both start at the beginning of that block here.
    skipped = first_block % NESTED_BLOCKSIZE
    first_nested, num_nested = first_block // NESTED_BLOCKSIZE, -(-(skipped + num_blocks) // NESTED_BLOCKSIZE)
    scales = elements(nested_absmax, torch.float32, first_nested, num_nested)
    double = {
        "absmax_8bit": elements(absmax, torch.uint8, first_block - skipped, skipped + num_blocks),
        "absmax_code": nested_code(weight.device),
        "absmax_offset": offset,
    }
    if not skipped:
        return codes, scales, double
    # The kernels do not support such an offset: decode the absmax here and drop the previous expert's.
    return codes, decode_absmax(double["absmax_8bit"], scales, offset)[skipped:], {}


def _dequantize(fmt: _Bnb4bitFormat, dtype: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
    """Decode storage tensors to the matrix (or whole weight) of `fmt` in `dtype`, with bitsandbytes' kernels."""
    codes, absmax, double = _kernel_operands(fmt, *tensors)
    if double:
        absmax = decode_absmax(double["absmax_8bit"], absmax, double["absmax_offset"])
    decode = functools.partial(_decode_blocks, quant_type=fmt.quant_type, dtype=dtype)
    num_weights = math.prod(fmt.shape)
    if fmt.shape[-1] % _BLOCKSIZE == 0 and num_weights <= _GPU_PIECE:
        return decode(codes, absmax, fmt.shape)
    # One block per row: bitsandbytes 0.50's CPU kernel scales wrongly if a row ends in half a block (32 weights).
    pieces = zip(codes.split(_GPU_PIECE // 2), absmax.split(_GPU_PIECE // _BLOCKSIZE), strict=True)
    decoded = [decode(part, scales, (scales.numel(), _BLOCKSIZE)) for part, scales in pieces]
    whole = decoded[0] if len(decoded) == 1 else torch.cat(decoded)
    return whole.view(-1)[:num_weights].view(fmt.shape)


def _decode_blocks(
    codes: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, ...], *, quant_type: str, dtype: torch.dtype
) -> torch.Tensor:
    decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, absmax, _BLOCKSIZE, quant_type, shape, dtype
    )
    return decoded


def _times_transposed(
    x: torch.Tensor, fmt: _Bnb4bitFormat, tensors: tuple[torch.Tensor, ...], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x M^T + b for the stored matrix M of `fmt`, fused with its decoding where bitsandbytes supports it."""
    if x.shape[0] > _FUSED_TOKENS or (x.device.type == "cpu" and fmt.shape[-1] % _BLOCKSIZE):  # see _dequantize
        return F.linear(x, _dequantize(fmt, x.dtype, *tensors), bias)
    codes, absmax, double = _kernel_operands(fmt, *tensors)
    if fmt.shape[-1] % _BLOCKSIZE:
        codes = codes[: -(-math.prod(fmt.shape) // 2)]
    y: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x, codes, fmt.shape, absmax, _BLOCKSIZE, fmt.quant_type, bias=bias, **double
    )
    return y


def decode_absmax(codes: torch.Tensor, nested_absmax: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Undo the second quantization (Dettmers et al. 2023): one float32 per block of weights."""
    decoded: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes, nested_absmax, nested_code(codes.device), NESTED_BLOCKSIZE, torch.float32
    )
    return decoded.add_(offset)


@functools.cache
def nested_code(device: torch.device) -> torch.Tensor:
    """The 256 float32 values of bitsandbytes' dynamic 8-bit map, which encode the nested absmax."""
    return bnb.create_dynamic_map().to(device)


# --- the format in files ---


class Bnb4bitSettings(NamedTuple):
    """The quantization_config of a model in 4 bits.

    skipped: modules that were not quantized. has_experts: the expert parameters are in 4 bits too.
    """

    quant_type: str
    double_quant: bool
    skipped: list[str] | None
    has_experts: bool = False

    def is_quantized(self, path: str) -> bool:
        """Whether transformers quantizes the linear layer at `path` of a decoder block."""
        return bool(should_convert_module(path, self.skipped))

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """One line: the model's settings are used, and the options that they override."""
        asked = {"quant_type": quant_type, "double_quant": double_quant}
        ignored = [f"--{name} {str(asked[name]).lower()}" for name in asked if asked[name] != getattr(self, name)]
        return (
            f"The model is quantized already ({self.quant_type}, {'' if self.double_quant else 'no '}double "
            "quantization): its own 4-bit weights are used as they are"
            + (f", and {' and '.join(ignored)} has no effect." if ignored else ".")
        )


def take_settings(config: PretrainedConfig, name: str) -> Bnb4bitSettings | None:
    """Remove the quantization from a model's configuration and return it; None where there is none.

    Raises:
        UserError: the model is quantized in another way than 4-bit bitsandbytes.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    # The model is built with plain layers, which ours then replace.
    del config.quantization_config
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise UserError(
            f"model_name {name} is quantized as {_format_name(settings)}, which is not supported. Give the model "
            "with 16- or 32-bit weights (train_type qlora quantizes it while loading), or a 4-bit bitsandbytes one."
        )
    return Bnb4bitSettings(
        quant_type=settings.get("bnb_4bit_quant_type", "fp4"),
        double_quant=bool(settings.get("bnb_4bit_use_double_quant", False)),
        skipped=settings.get("llm_int8_skip_modules"),
        has_experts=bool(settings.get(EXPERTS_KEY, False)),
    )


def _format_name(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit", settings.get("_load_in_8bit")):
        return "8-bit bitsandbytes"
    method = str(settings.get("quant_method", "an unnamed format"))
    return {"fp8": "FP8", "fbgemm_fp8": "FP8 (fbgemm)"}.get(method, method.upper() if len(method) < 6 else method)


def value_tables(quant_type: str, *, double_quant: bool) -> dict[str, torch.Tensor]:
    """Suffix of the weight's name -> float32 values of its codes, and of the codes of absmax."""
    tables = {".quant_map": bnb.get_4bit_type(quant_type, device="cpu")}
    return tables | ({".nested_quant_map": bnb.create_dynamic_map()} if double_quant else {})


def write_state(
    shape: tuple[int, ...], quant_type: str, blocksize: int, offset: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """The JSON that describes a quantized weight, as uint8, padded to a fixed size.

    Args:
        offset: the mean of absmax; None without double quantization.
        dtype: of the weight before quantization.
    """
    state: dict[str, Any] = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32", "nested_offset": offset}
    return torch.frombuffer(bytearray(json.dumps(state).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def read_state(
    content: torch.Tensor, name: str, shape: tuple[int, ...], quant_type: str, blocksize: int, *, double_quant: bool
) -> float:
    """Check a stored weight's state; returns the mean of its absmax, 0 without double quantization.

    Raises:
        UserError: its quantization or its shape is not the expected one.
    """
    offset = 0.0
    try:
        state = json.loads(bytes(content.tolist()))
        found = {key: state[key] for key in ("quant_type", "blocksize", "shape")}
        if double_quant:
            found["nested_blocksize"] = state["nested_blocksize"]
            offset = float(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name} does not describe a 4-bit weight ({error!r}). Download the model again.") from error
    expected = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCKSIZE,
    }
    if wrong := [f"{key} {value}, not {expected[key]}" for key, value in found.items() if value != expected[key]]:
        raise UserError(
            f"{name} describes a 4-bit weight that cannot be used here: {'; '.join(wrong)}. Give the model with "
            "16- or 32-bit weights."
        )
    return offset


def check_table(expected: torch.Tensor, content: torch.Tensor, name: str) -> None:
    """Refuse a table of values that is not bitsandbytes' own (to the last bit of float32)."""
    found = content.view(torch.float32)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=1e-7):
        raise UserError(f"{name} is not bitsandbytes' table of 4-bit values. Download the model again.")
