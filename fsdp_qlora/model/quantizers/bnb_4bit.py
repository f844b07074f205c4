"""NF4 and FP4 weights in bitsandbytes' packing: linear layers and experts.

Shapes: a linear's weight is [out, in], experts' are [experts, out, in] or, transposed,
[experts, in, out]; a block is `blocksize` consecutive weights of the row-major flattened weight.

In files they have the format in which bitsandbytes and transformers save 4-bit weights. For a
weight X [out, in] with n = out * in elements in m blocks of 64:
    X: the codes, two per byte, (n + 1) / 2 bytes under any dtype (bnb_4bit_quant_storage).
    X.absmax: [m], uint8 with double quantization, else float32.
    X.nested_absmax: with double quantization, float32 [(m + 255) / 256].
    X.quant_map, X.nested_quant_map: the values that the codes stand for, float32 [16] and [256].
    X.quant_state.bitsandbytes__nf4 (or fp4): JSON as bytes, with the shape and the mean of absmax.
These are the bytes of Bnb4bitWeight's parameters, so a rank's part of a file is its shard.

bitsandbytes quantizes linear layers only. A 3-D parameter of experts is stored in the same way
under its own name (X = model.layers.0.mlp.experts.gate_up_proj), which only this package can read:
in cache entries, and in models saved by the quantize command, which have `settings.EXPERTS_KEY` in
their quantization_config.

Bits: a byte holds the code of an even element in its high four bits and of the odd element after it
in its low four. A code is an index into 16 values from -1 to 1, which the block's absmax scales:
NF4's are quantiles of a normal distribution (Dettmers et al. 2023, appendix E), FP4's a sign and
three bits of exponent and mantissa in bitsandbytes' own order.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import bitsandbytes
import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.distributed.shards import gather_rows, own_rows
from fsdp_qlora.model.kernels import nf4
from fsdp_qlora.model.kernels.nf4 import BLOCKSIZE, GPU_PIECE, NESTED_BLOCKSIZE
from fsdp_qlora.model.kernels.nf4_rounding import round_absmax, round_blocks, round_updated_blocks
from fsdp_qlora.model.quantizers.base import Matrix
from fsdp_qlora.model.quantizers.rounded_weight import RoundedWeight, Update
from fsdp_qlora.model.quantizers.stored import row_bytes, write_bytes
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

BITSANDBYTES = "bnb_4bit"  # its row of QUANTIZERS
# The suffix that bitsandbytes appends to the name of a 4-bit weight for the state that marks it.
PACKED_STATE = ".quant_state.bitsandbytes__"
# enough for the JSON of any shape: a file's layout must not depend on the mean's digits
_STATE_BYTES = 256
_PIECE = 2**17  # weights quantized at a time on a CPU, a multiple of both block sizes
# Up to this number of tokens bitsandbytes may fuse decoding and product. For more its operator
# decodes the matrix as we do, and takes the host some microseconds longer.
_FUSED_TOKENS = 1536
# Up to this number its kernel for few tokens multiplies codes on every GPU. Beyond it, GPUs with
# fast memory decode (bitsandbytes/backends/cuda/ops.py, `_gemm_4bit_use_custom_cuda`).
_FEW_TOKENS = 8


class NestedAbsmax(NamedTuple):
    """From double quantization: each 256 absmax have a nested one, and all have one offset."""

    absmax: torch.Tensor
    offset: torch.Tensor


class Bnb4bitTensors(NamedTuple):
    """A weight's codes, a block per row, and their absmax: one byte each if there are nested."""

    weight: torch.Tensor
    absmax: torch.Tensor
    nested: NestedAbsmax | None = None


class _Views(NamedTuple):
    """Views of the blocks that a matrix spans.

    codes: uint8 [bytes]. absmax: float32, or uint8 if there are nested ones, from the beginning of
    a nested block. nested_absmax: float32.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None = None


class Bnb4bitWeight(RoundedWeight):
    """NF4 or FP4 weights in bitsandbytes' packing.

    Parameters (frozen; quant_storage is the compute dtype):
        weight: two codes per byte, [blocks, blocksize / 2 bytes] viewed as quant_storage. FSDP2
            splits dim 0, so a row is a whole block: each rank can quantize its shard alone, and no
            absmax belongs to two ranks.
        absmax: largest magnitude of each block; with double_quant one byte each, viewed as
            quant_storage (a float, since FSDP2 of older torch fails on integer parameters:
            pytorch#185239), otherwise float32 [blocks, 1].
        nested_absmax: with double_quant, float32 [blocks / 256, 1], one for each 256 absmax.
    Buffer:
        absmax_offset: with double_quant, float32 scalar, the mean of absmax.
    """

    selects_rows = True
    # bitsandbytes reads and writes 2.5 bytes, but computes as well: LitGPT's table for an A100 (NF4
    # beside none, 7B: 79 ms for two passes) is 7, and kernels of 2025 are 1.4 to 2.1 times as fast
    # there (bitsandbytes#1747).
    decoding_bytes = 4.0
    absmax_offset: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        quant_type: str,
        double_quant: bool,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, compute_dtype=compute_dtype, row_weights=BLOCKSIZE)
        self.quant_type = quant_type
        self.double_quant = double_quant
        # Rounded up: the last block may be short.
        self.num_blocks = -(-math.prod(shape) // BLOCKSIZE)
        self.weight = self._storage(self.num_blocks, BLOCKSIZE // 2)
        if double_quant:
            # A row of one element of the compute dtype holds the codes of two blocks (of four in
            # float32).
            self.absmax = self._storage(
                -(-self.num_blocks // compute_dtype.itemsize), compute_dtype.itemsize
            )
            self.nested_absmax = self._storage(
                -(-self.num_blocks // NESTED_BLOCKSIZE), 4, torch.float32
            )
            self.statistics = ("absmax", "nested_absmax")
            self.register_buffer("absmax_offset", torch.zeros((), device="cpu"), persistent=False)
        else:
            self.absmax = self._storage(self.num_blocks, 4, torch.float32)
            self.statistics = ("absmax",)

    def tensors(self) -> Bnb4bitTensors:
        if not self.double_quant:
            return Bnb4bitTensors(self.weight, self.absmax)
        nested = NestedAbsmax(self.nested_absmax, self.absmax_offset)
        return Bnb4bitTensors(self.weight, self.absmax, nested)

    def decode_tensors(
        self, part: Matrix, dtype: torch.dtype, tensors: Bnb4bitTensors
    ) -> torch.Tensor:
        if part.among is None:
            codes, absmax, nested_absmax = self.views(part, tensors)
            offset = tensors.nested.offset if tensors.nested else None
            skipped = _skipped(part) if tensors.nested else 0
        else:
            # Of matrices with others between them absmax is chosen after it is decoded.
            codes, absmax = self._codes_and_absmax(part, tensors)
            nested_absmax = offset = None
            skipped = 0
        blocks = nf4.decode_blocks(
            codes, absmax, nested_absmax, offset, self.quant_type, dtype, skipped
        )
        num_weights = math.prod(part.shape)
        if blocks.numel() > num_weights:
            blocks = blocks.view(-1)[:num_weights]
        return blocks.view(part.shape)

    def select(self, part: Matrix, tensors: Bnb4bitTensors) -> "_Views":
        weight, absmax, nested = tensors
        first, count = part.spans(BLOCKSIZE)
        # The parameter is viewed as bytes, of two weights each.
        codes = _elements(weight, torch.uint8, part.first // 2, count * BLOCKSIZE // 2)
        if nested is None:
            return _Views(codes, _elements(absmax, torch.float32, first, count))
        # A matrix starts at a block of weights, but its first absmax may be inside a block of 256
        # absmax shared with the previous expert. So absmax is decoded from the beginning of that
        # block.
        skipped = _skipped(part)
        nested_first = first // NESTED_BLOCKSIZE
        nested_count = -(-(skipped + count) // NESTED_BLOCKSIZE)
        scales = _elements(nested.absmax, torch.float32, nested_first, nested_count)
        absmax_8bit = _elements(absmax, torch.uint8, first - skipped, skipped + count)
        return _Views(codes, absmax_8bit, scales)

    def _codes_and_absmax(
        self, part: Matrix, tensors: Bnb4bitTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes (uint8, whole blocks) and the absmax (float32) of a matrix."""
        codes, absmax, nested_absmax = self.views(part, tensors)
        if tensors.nested is not None:
            absmax = nf4.decode_absmax(absmax, nested_absmax, tensors.nested.offset)
            skipped = _skipped(part)
            if skipped:
                absmax = absmax[skipped:]
        return part.choose(codes), part.choose(absmax)

    def decodes(self, num_tokens: int, device: torch.device) -> bool:
        # Rounding takes longer than decoding: it is done once where that can be.
        return self.is_rounded_again or device.type == "cpu" or num_tokens > _FEW_TOKENS

    # bitsandbytes' fused kernel multiplies by the transpose of the stored matrix, which is W, or
    # W^T if transposed.

    def multiply(
        self, part: Matrix, x: torch.Tensor, bias: torch.Tensor | None, tensors: Bnb4bitTensors
    ) -> torch.Tensor:
        if not part.transposed and _can_fuse(part, x):
            return self._times_transposed(part, x, bias, tensors)
        return super().multiply(part, x, bias, tensors)

    def multiply_grad(
        self, part: Matrix, grad_y: torch.Tensor, tensors: Bnb4bitTensors
    ) -> torch.Tensor:
        if part.transposed and _can_fuse(part, grad_y):
            return self._times_transposed(part, grad_y, None, tensors)
        return super().multiply_grad(part, grad_y, tensors)

    def add_product(
        self, part: Matrix, y: torch.Tensor, x: torch.Tensor, tensors: Bnb4bitTensors
    ) -> None:
        if not part.transposed and _can_fuse(part, x):
            y.add_(self._times_transposed(part, x, None, tensors))
            return
        super().add_product(part, y, x, tensors)

    def _times_transposed(
        self, part: Matrix, x: torch.Tensor, bias: torch.Tensor | None, tensors: Bnb4bitTensors
    ) -> torch.Tensor:
        """Compute x M^T + b for the stored matrix M."""
        codes, absmax = self._codes_and_absmax(part, tensors)
        # Only a matrix with whole blocks in its rows is sure to end at a block. The operator gets
        # the bytes of the matrix, without those that fill up its last block.
        if part.shape[-1] % BLOCKSIZE:
            codes = codes[: -(-math.prod(part.shape) // 2)]
        y: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
            x, codes, part.shape, absmax, BLOCKSIZE, self.quant_type, bias=bias
        )
        return y

    def quantize(self, values: torch.Tensor) -> Bnb4bitTensors:
        return Bnb4bitTensors(*quantize_blocks(values, self.quant_type))

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        # Zeros do not change a block's largest magnitude. Rows are blocks for the reason in
        # kernels/nf4.py.
        num_missing = -weight.numel() % BLOCKSIZE
        blocks = F.pad(weight.flatten(), (0, num_missing)).view(-1, BLOCKSIZE)
        options = {"compress_statistics": self.double_quant, "quant_type": self.quant_type}
        codes, state = bnb.quantize_4bit(blocks, blocksize=BLOCKSIZE, **options)
        # The state has the dtype of `weight`, to which bitsandbytes would decode.
        state.dtype = self.compute_dtype
        decoded = bnb.dequantize_4bit(codes, state).flatten()
        return decoded[: weight.numel()].view(weight.shape)

    @torch.no_grad()
    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        if not self.double_quant:
            super().load_shard(values, mesh)
            return
        codes, absmax = quantize_blocks(values, self.quant_type)
        write_bytes(self.weight, codes)
        # Double quantization subtracts the mean over the whole tensor. Every rank gathers the
        # absmax of all blocks (1/32 of the bf16 bytes) and repeats bitsandbytes' own computation,
        # so the result is exact for any split.
        absmax = gather_rows(absmax, self.num_blocks, mesh)
        absmax_8bit, nested_absmax = self.quantize_absmax(absmax)
        # Now every rank has all statistics, and keeps the bytes of its own rows.
        for parameter, whole in ((self.absmax, absmax_8bit), (self.nested_absmax, nested_absmax)):
            first, last = (row * row_bytes(parameter) for row in own_rows(parameter, mesh))
            write_bytes(parameter, whole.view(torch.uint8)[first:last])

    def quantize_absmax(self, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize the float32 absmax of all blocks to uint8 codes and nested absmax.

        Stores their mean.
        """
        offset = absmax.mean()
        absmax_8bit, state = bnb.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCKSIZE)
        self.absmax_offset.copy_(offset)
        return absmax_8bit, state.absmax

    @property
    def rounded_together(self) -> int:
        return BLOCKSIZE

    @property
    def joins_matrices(self) -> bool:
        # A nested absmax may be of blocks of two experts.
        size = math.prod(self.shape[1:])
        return self.double_quant and size % (BLOCKSIZE * NESTED_BLOCKSIZE) != 0

    def round_part(
        self, values: torch.Tensor, part: Matrix, tensors: Bnb4bitTensors
    ) -> Bnb4bitTensors:
        return Bnb4bitTensors(*round_blocks(values, self.quant_type))

    def join_parts(
        self, parts: Sequence[Bnb4bitTensors], tensors: Bnb4bitTensors
    ) -> Bnb4bitTensors:
        codes = torch.cat([part.weight for part in parts])
        absmax = torch.cat([part.absmax for part in parts])
        if tensors.nested is None:
            return Bnb4bitTensors(codes, absmax)
        # The mean stays, so that it does not depend on the order of a sum.
        offset = tensors.nested.offset
        absmax_8bit, nested = round_absmax(absmax, offset)
        return Bnb4bitTensors(codes, absmax_8bit, NestedAbsmax(nested, offset))

    @property
    def fits_kernel(self) -> bool:
        return self.shape[-1] % BLOCKSIZE == 0

    def round_by_kernel(
        self, matrix: Matrix, update: Update, tensors: Bnb4bitTensors
    ) -> Bnb4bitTensors:
        codes, absmax, nested = self.select(matrix, tensors)
        rounded = round_updated_blocks(
            codes,
            absmax,
            nested,
            tensors.nested.offset if tensors.nested else None,
            self.quant_type,
            update.factors(),
            _skipped(matrix) if tensors.nested else 0,
        )
        return Bnb4bitTensors(*rounded)

    def store(self, tensors: Bnb4bitTensors) -> None:
        write_bytes(self.weight, tensors.weight)
        write_bytes(self.absmax, tensors.absmax)
        if tensors.nested is not None:
            write_bytes(self.nested_absmax, tensors.nested.absmax)

    def stored_forms(self) -> dict[str, TensorForm]:
        num_bytes = -(-math.prod(self.shape) // 2)
        stored = {"": TensorForm(torch.uint8, (num_bytes, 1))}
        if not self.double_quant:
            return stored | {".absmax": TensorForm(torch.float32, (self.num_blocks,))}
        nested = -(-self.num_blocks // NESTED_BLOCKSIZE)
        return stored | {
            ".absmax": TensorForm(torch.uint8, (self.num_blocks,)),
            ".nested_absmax": TensorForm(torch.float32, (nested,)),
        }

    def _state(self) -> dict[str, Any]:
        """The state that bitsandbytes' loader reads.

        The weight's original dtype and the mean of absmax are not in it.
        """
        state: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": BLOCKSIZE,
            "shape": list(self.shape),
        }
        if self.double_quant:
            state["nested_blocksize"] = NESTED_BLOCKSIZE
        return state

    def _value_tables(self) -> dict[str, torch.Tensor]:
        """Suffix of the weight's name -> float32 values of the codes.

        The codes are the weight's, and those of absmax with double quantization.
        """
        tables = {".quant_map": bnb.get_4bit_type(self.quant_type, device="cpu")}
        if self.double_quant:
            tables[".nested_quant_map"] = bnb.create_dynamic_map()
        return tables

    def stored_whole(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        state = self._state() | {"dtype": str(dtype).removeprefix("torch.")}
        if self.double_quant:
            state |= {"nested_dtype": "float32", "nested_offset": self.absmax_offset.item()}
        text = bytearray(json.dumps(state).encode().ljust(_STATE_BYTES))
        suffix = f"{PACKED_STATE}{self.quant_type}"
        return self._value_tables() | {suffix: torch.frombuffer(text, dtype=torch.uint8)}

    def load_whole(self, suffix: str, name: str, content: torch.Tensor) -> None:
        if suffix.startswith(PACKED_STATE):
            self._load_state(content, name)
            return
        # The tolerance is a float32's rounding at 1, the largest value of a table.
        table = content.view(torch.float32)
        expected = self._value_tables()[suffix]
        is_equal = table.shape == expected.shape and torch.allclose(
            table, expected, rtol=0, atol=1e-7
        )
        if not is_equal:
            raise UserError(
                f"{name} is not bitsandbytes' table of 4-bit values. Download the model again."
            )

    def _load_state(self, content: torch.Tensor, name: str) -> None:
        """Check a stored weight's state, and load the mean of its absmax."""
        expected = self._state()
        try:
            state = json.loads(bytes(content.tolist()))
            stored = {key: state[key] for key in expected}
            offset = float(state["nested_offset"]) if self.double_quant else 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{name} describes no 4-bit weight ({error!r}). Download the model again."
            ) from error
        wrong = [
            f"{key} {value}, not {expected[key]}"
            for key, value in stored.items()
            if value != expected[key]
        ]
        if wrong:
            raise UserError(
                f"{name} describes a 4-bit weight that cannot be used here: {'; '.join(wrong)}. "
                "Give the model with 16- or 32-bit weights."
            )
        if self.double_quant:
            self.absmax_offset.fill_(offset)

    def code_settings(self) -> dict[str, Any]:
        return {
            "quant_type": self.quant_type,
            "blocksize": BLOCKSIZE,
            "double_quant": self.double_quant,
            "bitsandbytes": bitsandbytes.__version__,
        }


def quantize_blocks(values: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize whole blocks (the last may be short) to codes and float32 absmax of each block.

    A byte has two codes.

    Works in pieces: bitsandbytes' CPU kernel needs temporary memory of many times its input, and
    its GPU kernel counts in int32, which is too small for a rank's part of the largest models'
    experts.
    """
    # A rank has none if there are fewer blocks than ranks.
    if not values.numel():
        no_codes = values.new_empty(0, dtype=torch.uint8)
        return no_codes, values.new_empty(0, dtype=torch.float32)
    piece_size = _PIECE if values.device.type == "cpu" else GPU_PIECE
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(piece, BLOCKSIZE, quant_type, torch.uint8)
        for piece in values.flatten().split(piece_size)
    ]
    codes = torch.cat([codes.view(-1) for codes, _ in pieces])
    return codes, torch.cat([absmax for _, absmax in pieces])


def _elements(tensor: torch.Tensor, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """Elements [first, first + count) of a tensor's bytes as `dtype`."""
    elements = tensor.view(dtype).view(-1)
    return elements if count == elements.numel() else elements[first : first + count]


def _skipped(part: Matrix) -> int:
    """How many absmax of the first nested block are before those of a matrix."""
    return part.first // BLOCKSIZE % NESTED_BLOCKSIZE


def _can_fuse(part: Matrix, x: torch.Tensor) -> bool:
    """Whether bitsandbytes may fuse decoding and product."""
    if x.shape[0] > _FUSED_TOKENS:
        return False
    # The CPU kernel takes a wrong absmax if a row ends inside a block (see kernels/nf4.py).
    return x.device.type != "cpu" or part.shape[-1] % BLOCKSIZE == 0
