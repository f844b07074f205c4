"""Base classes of quantized layers: one frozen weight, in parameters that FSDP2 shards."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.distributed.shards import local_part, own_rows
from fsdp_qlora.model.quantizers.products import (
    FrozenProduct,
    ProductInParts,
    QuantizedProduct,
    computing_dtype,
    plain_product,
)
from fsdp_qlora.model.quantizers.stored import row_bytes, write_bytes
from fsdp_qlora.utils.safetensors_files import TensorForm

# What is wrong with stored statistics, as messages say it.
NOT_FINITE = "values that are not finite (NaN or infinity)"
TOO_LARGE = "scales with which weights are not finite"
# Rows of codes after which a group of every quantization statistic begins: a nested absmax of
# bitsandbytes is for 256 blocks, of a row each, which is the most.
_ALIGNED_ROWS = 256
Tensors = Callable[[], Any]  # as `QuantizedWeight.tensors`


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite: floating-point numbers of 16 bits or more."""
    # aminmax() returns NaN if any value is NaN, and unlike isfinite() it allocates nothing.
    return not values.numel() or all(extreme.isfinite() for extreme in values.aminmax())


class Matrix(NamedTuple):
    """Selects a matrix of a stored weight, or several matrices."""

    shape: tuple[int, ...]
    first: int = 0
    """Index of its first element in the stored weight, at the start of a block or group."""
    transposed: bool = False
    """Whether the matrix is stored as [in, out], not [out, in]."""
    among: tuple[torch.Tensor, int] | None = None
    """For several matrices with others between them: their places [matrices], counted from the
    first one on, and the number of matrices up to the last."""

    def spans(self, unit: int) -> tuple[int, int]:
        """The index of its first block or group of `unit` weights, and their number.

        Blocks between its matrices count, too.
        """
        size = math.prod(self.shape)
        if self.among is not None:
            size = math.prod(self.shape[1:]) * self.among[1]
        return self.first // unit, -(-size // unit)

    def choose(self, spanned: torch.Tensor) -> torch.Tensor:
        """Choose the rows of its matrices among the rows of all blocks that it spans.

        Rows are codes or statistics.
        """
        if self.among is None:
            return spanned
        # The places stay on the device: the host knows only how many matrices they span.
        places, count = self.among
        return spanned.unflatten(0, (count, -1))[places].flatten(0, 1)


class Codes(NamedTuple):
    """The tensors of a weight without statistics. Quantizers with some have a tuple like this."""

    weight: torch.Tensor


class QuantizedWeight(nn.Module):
    """One frozen weight of any shape, kept quantized. Base of the layers in QUANTIZERS.

    Its parameters are frozen. `weight` holds the codes: packed bytes viewed as the compute dtype.
    Each row codes `row_weights` consecutive weights in whole quantization blocks, so a rank can
    quantize its rows alone. At least one statistic is float32: with two dtypes in a decoder block
    FSDP2 gathers bytes, and not 16-bit floats, whose copy kernel would change codes that look like
    NaN (pytorch#159333, see `sharding.parallelize.check_gathered_as_bytes`).
    """

    shape: tuple[int, ...]
    compute_dtype: torch.dtype
    weight: nn.Parameter
    # the weight's name below the module's in the weight files; "" if the module replaces it
    weight_name: str = ""
    selects_rows = False  # whether a `Matrix` may select rows of a matrix
    statistics: tuple[str, ...] = ()  # names of the parameters that hold quantization statistics
    # of GPU memory that are read and written to decode a weight, for the planned speed
    decoding_bytes = 4.0
    # In float32, a large matrix is decoded and multiplied in parts of this size, which stay in a
    # CPU's cache. In 16 bits, sums over parts would lose precision. A matrix of at most twice the
    # size is faster as a whole, since a product packs its input again for each part.
    part_bytes = 4 * 2**20
    # whether a token's product depends on the other tokens only by the rounding of sums
    is_exact = True
    waits_for_device = False  # whether the host reads a number of a product, which no graph can

    def __init__(
        self, shape: tuple[int, ...], *, compute_dtype: torch.dtype, row_weights: int
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.compute_dtype = compute_dtype
        self.row_weights = row_weights
        # The whole weight as one matrix, also where it is several.
        self.whole = Matrix(self.shape)
        self._views: Any = None

    @property
    def kernel_bytes(self) -> float:
        """Bytes that one kernel moves per weight: the stored ones, and the weight it writes."""
        stored: int = sum(getattr(self, name).nbytes for name in ("weight", *self.statistics))
        return stored / math.prod(self.shape) + self.compute_dtype.itemsize

    def _storage(self, rows: int, row_bytes: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A frozen meta parameter of `rows` times `row_bytes` bytes.

        It is viewed as `dtype` (default: the compute dtype), its rows padded to whole elements.
        """
        dtype = dtype or self.compute_dtype
        # Floating point also for bytes: FSDP2 of older torch fails on integer parameters
        # (pytorch#185239).
        columns = -(-row_bytes // dtype.itemsize)
        memory = torch.empty(rows, columns, dtype=dtype, device="meta")
        return nn.Parameter(memory, requires_grad=False)

    # A class has its own named tuple of tensors, so that the type is Any here: `tensors()` returns
    # the parameters as one, while they are gathered, and `quantize` new values. FSDP2 refills the
    # same parameters before the backward pass.

    def tensors(self) -> Any:
        """The tensors from which the weight is decoded, while they are gathered."""
        return Codes(self.weight)

    def decode_tensors(self, part: Matrix, dtype: torch.dtype, tensors: Any) -> torch.Tensor:
        """Decode a matrix (or the whole weight), in its stored orientation, to `dtype`."""
        raise NotImplementedError

    def select(self, part: Matrix, tensors: Any) -> Any:
        """View what is decoded for a matrix: codes, then each statistic.

        Quantizers with such views have a tuple of them, which `views` keeps.
        """
        raise NotImplementedError

    def views(self, part: Matrix, tensors: Any) -> Any:
        """Give what `select` gives; views of the layer's whole weight are made once.

        FSDP2 frees and refills the memory of its gathered tensors: their views stay valid. When a
        parameter has other memory, new views are made.
        """
        if part is not self.whole or tensors.weight is not self._parameters["weight"]:
            return self.select(part, tensors)
        if self._views is None or not self._views_parameters():
            self._views = self.select(part, tensors)
        return self._views

    def _views_parameters(self) -> bool:
        """Whether the kept views begin where the parameters do."""
        for view, name in zip(self._views, ("weight", *self.statistics), strict=False):
            parameter: Any = self._parameters[name]
            # The memory of a view is not given to another tensor, so that equal addresses say all.
            if view.data_ptr() != parameter.data_ptr():
                return False
        return True

    def forget_views(self) -> None:
        """Free the memory of kept views, for whoever gives the parameters other memory."""
        self._views = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Parameters move, such as to another device.
        self.forget_views()
        return super()._apply(fn, recurse)

    def multiply(
        self, part: Matrix, x: torch.Tensor, bias: torch.Tensor | None, tensors: Any
    ) -> torch.Tensor:
        """Compute x W^T + b for the matrix W [out, in], or an approximation of it.

        W is stored as W^T if transposed.
        """
        return F.linear(x, self.upright(part, x.dtype, tensors), bias)

    def multiply_grad(self, part: Matrix, grad_y: torch.Tensor, tensors: Any) -> torch.Tensor:
        """Compute grad_y W, the gradient of x."""
        return grad_y @ self.upright(part, grad_y.dtype, tensors)

    def add_product(self, part: Matrix, y: torch.Tensor, x: torch.Tensor, tensors: Any) -> None:
        """Add x W^T to y [N, out], in y's memory."""
        y.addmm_(x, self.upright(part, x.dtype, tensors).T)

    def add_grad(
        self, part: Matrix, grad_x: torch.Tensor, grad_y: torch.Tensor, tensors: Any
    ) -> None:
        """Add grad_y W to grad_x [N, in], in grad_x's memory."""
        grad_x.addmm_(grad_y, self.upright(part, grad_y.dtype, tensors))

    def upright(self, part: Matrix, dtype: torch.dtype, tensors: Any) -> torch.Tensor:
        """The decoded matrix [out, in]."""
        stored = self.decode_tensors(part, dtype, tensors)
        return stored.T if part.transposed else stored

    def product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute x W^T + b, differentiable in x [.., in]. x and bias are in the compute dtype."""
        result: torch.Tensor = _DecodedMatmul.apply(x, self.frozen_product(matrix, bias))
        return result

    def frozen_product(
        self, matrix: Matrix, bias: torch.Tensor | None = None, tensors: Tensors | None = None
    ) -> FrozenProduct:
        """The products with a matrix; bias is in the compute dtype. tensors: gives others."""
        gathered = (tensors or self.tensors)()
        parts = self._parts(matrix)
        if len(parts) == 1:
            return QuantizedProduct(self, matrix, bias, gathered)
        return ProductInParts(self, matrix, bias, gathered, parts)

    def decodes(self, num_tokens: int, device: torch.device) -> bool:
        """Whether a product with this number of tokens decodes the weight before it multiplies."""
        return self.is_exact

    def _parts(self, matrix: Matrix) -> list[tuple[slice, Matrix]]:
        """Split a matrix into the parts that are decoded at a time.

        Returns (rows of the matrix, selection of the part).
        """
        num_rows, num_columns = matrix.shape
        whole = [(slice(0, num_rows), matrix)]
        # Of a transposed matrix, rows of the codes are columns of W.
        can_split = (
            self.compute_dtype == torch.float32 and self.selects_rows and not matrix.transposed
        )
        if not can_split or 4 * num_rows * num_columns <= 2 * self.part_bytes:
            return whole
        # Whole rows of the matrix that are whole rows of codes and groups of statistics, too.
        aligned = math.lcm(num_columns, self.row_weights * _ALIGNED_ROWS) // num_columns
        rows = self.part_bytes // (4 * num_columns) // aligned * aligned
        if not 0 < rows < num_rows:
            return whole
        parts = []
        for start in range(0, num_rows, rows):
            stop = min(start + rows, num_rows)
            part = Matrix((stop - start, num_columns), matrix.first + start * num_columns)
            parts.append((slice(start, stop), part))
        return parts

    def dequantize(self, matrix: Matrix | None = None) -> torch.Tensor:
        """Decode the weight (or a matrix of it) to the compute dtype.

        The parameters must be gathered.
        """
        return self.decode_tensors(matrix or self.whole, self.compute_dtype, self.tensors())

    def shard_range(self, mesh: DeviceMesh) -> tuple[int, int]:
        """The elements [start, stop) of the flattened weight that this rank quantizes and keeps."""
        first, last = own_rows(self.weight, mesh)
        # The last row may code fewer weights, and FSDP2 gives ranks rows beyond the end.
        num_weights = math.prod(self.shape)
        return min(first * self.row_weights, num_weights), min(last * self.row_weights, num_weights)

    def quantize(self, values: torch.Tensor) -> Any:
        """Quantize `values`, whole rows of weights or none.

        Returns a named tuple as `tensors()`: rows of `weight`, as bytes, and of each statistic.
        """
        raise NotImplementedError

    @torch.no_grad()
    def load_shard(self, values: torch.Tensor, mesh: DeviceMesh) -> None:
        """Quantize and store `values`, the elements in `shard_range`.

        Collective over the shard group.
        """
        # Here no rank needs another one's values; subclasses with a statistic of the whole weight
        # gather it, in the same order on all ranks.
        quantized = self.quantize(values)
        for name in ("weight", *self.statistics):
            write_bytes(getattr(self, name), getattr(quantized, name))

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize `values`, whole rows of weights, to bytes of `weight`."""
        codes: torch.Tensor = self.quantize(values).weight
        return codes

    def quantize_whole(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize and decode the whole `weight`. `dequantize` must return the same bits."""
        return self.decode_tensors(self.whole, self.compute_dtype, self.quantize(weight))

    def _filled_up(self, codes: torch.Tensor) -> torch.Tensor:
        """The bytes of codes [rows, bytes] with the padding of `weight`."""
        codes = codes.view(torch.uint8)
        num_missing = row_bytes(self.weight) - codes.shape[1]
        return F.pad(codes, (0, num_missing))

    # ---- in files ----

    def stored_forms(self) -> dict[str, TensorForm]:
        """Suffix of the weight's name in a file -> the parameter as a tensor there.

        "" is `weight`, ".scale" is `scale`.

        It has the parameter's bytes row by row, without the padding of the last row.
        """
        raise NotImplementedError

    def unusable(self, suffix: str, values: torch.Tensor) -> str:
        """Say what is wrong with these bytes of a stored tensor, such as a NaN among scales.

        Empty if nothing is.
        """
        dtype = self.stored_forms()[suffix].dtype
        if dtype.is_floating_point and not is_finite(values.view(dtype)):
            return NOT_FINITE
        return ""

    def stored_whole(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Suffix of the weight's name -> a tensor that every rank reads whole, for `load_whole`.

        dtype: dtype of the weight before quantization. Names and sizes do not depend on it.
        """
        return {}

    def load_whole(self, suffix: str, name: str, content: torch.Tensor) -> None:
        """Load or check the bytes of the tensor `name` of `stored_whole`.

        Raises UserError if it differs.
        """
        raise NotImplementedError

    def code_settings(self) -> dict[str, Any]:
        """The settings and library versions that determine the stored bytes.

        Besides them only the weight, its shape and the device do.
        """
        raise NotImplementedError

    def stored_parameter(self, suffix: str) -> nn.Parameter:
        """The parameter that `stored_forms` has under this suffix."""
        parameter: nn.Parameter = getattr(self, suffix.removeprefix(".") or "weight")
        return parameter

    def stored_range(self, suffix: str, mesh: DeviceMesh) -> tuple[int, int]:
        """The bytes [start, stop) of the stored tensor that belong to this rank's shard."""
        parameter = self.stored_parameter(suffix)
        # The file has no padding, so the last rank's part of it is shorter.
        num_bytes = self.stored_forms()[suffix].num_bytes
        first, last = (row * row_bytes(parameter) for row in own_rows(parameter, mesh))
        return min(first, num_bytes), min(last, num_bytes)

    def stored_bytes(self, suffix: str) -> torch.Tensor:
        """The bytes of this rank's shard, uint8.

        At the end of the tensor they may exceed `stored_range`.
        """
        local = local_part(self.stored_parameter(suffix)).detach()
        return local.reshape(-1).view(torch.uint8)


class QuantizedLinear(QuantizedWeight):
    """Computes y = x W^T + b with W [out, in].

    List it before the quantizer's class among the bases.
    """

    weight_name = "weight"
    # whether the weight stays decoded from its next use on (see decoded_once.py)
    keeps_decoded = False
    _decoded: torch.Tensor | None = None

    def __init__(self, linear: nn.Linear, **options: Any) -> None:
        super().__init__((linear.out_features, linear.in_features), **options)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Frozen as the weight is; it stays as it is, since it is small.
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.to(self.compute_dtype), self.whole, self.bias_to_add())

    def frozen_product(
        self, matrix: Matrix, bias: torch.Tensor | None = None, tensors: Tensors | None = None
    ) -> FrozenProduct:
        if not self.keeps_decoded:
            return super().frozen_product(matrix, bias, tensors)
        if self._decoded is None:
            gathered = (tensors or self.tensors)()
            self._decoded = self.upright(self.whole, self.compute_dtype, gathered)
        return plain_product(self._decoded, bias, self.compute_dtype)

    def forget_decoded(self) -> None:
        """Free the decoded weight, and keep none from now on."""
        self.keeps_decoded = False
        self._decoded = None

    def bias_to_add(self) -> torch.Tensor | None:
        """The bias in the compute dtype."""
        return None if self.bias is None else self.bias.to(self.compute_dtype)


class QuantizedExperts(QuantizedWeight):
    """Replaces the 3-D parameter of an experts module.

    List it before the quantizer's class among the bases.

    parameter: [experts, out, in], or [experts, in, out] where `transposed`. is_upright: keep
    [experts, out, in] of the latter too (is_swapped).

    bring: is called with the numbers of the experts whose codes are needed next, where codes can be
    elsewhere.
    """

    bring: Callable[[Sequence[int]], None] | None = None

    def __init__(
        self, parameter: nn.Parameter, *, transposed: bool, is_upright: bool = False, **options: Any
    ) -> None:
        self.parameter_shape = tuple(parameter.shape)
        # gpt_oss's module has [experts, in, out], its files the codes of [experts, out, in].
        self.is_swapped = transposed and is_upright
        shape = parameter.mT.shape if self.is_swapped else parameter.shape
        super().__init__(tuple(shape), **options)
        self.transposed = transposed and not self.is_swapped

    def supports(self) -> bool:
        """Whether no row of codes crosses from one expert to the next."""
        return math.prod(self.shape[1:]) % self.row_weights == 0

    def expert(self, index: int) -> Matrix:
        """The matrix of an expert."""
        matrix_shape = self.shape[1:]
        first = index * math.prod(matrix_shape)
        return Matrix(matrix_shape, first, self.transposed)


class _DecodedMatmul(torch.autograd.Function):
    """Computes x W^T + b for x [.., in] and a quantized W [out, in].

    The backward pass decodes W again.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: FrozenProduct) -> torch.Tensor:
        # FSDP2 refills the same gathered tensors before the backward pass. They are in an attribute
        # and not in save_for_backward, so that activation checkpointing does not recompute the
        # forward pass for them.
        ctx.product = product
        *dims, _ = x.shape
        (y,) = product.multiply(x.flatten(0, -2))
        return y.view(*dims, y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (grad_y,) = grads
        if not ctx.needs_input_grad[0]:
            return None, None
        *dims, _ = grad_y.shape
        grad_x = ctx.product.multiply_grad(grad_y.flatten(0, -2))
        return grad_x.view(*dims, grad_x.shape[-1]), None


def frozen_product(layer: nn.Module, x: torch.Tensor, *, with_bias: bool = True) -> FrozenProduct:
    """The products with a frozen linear layer for its input x."""
    if isinstance(layer, QuantizedLinear):
        return layer.frozen_product(layer.whole, layer.bias_to_add() if with_bias else None)
    assert isinstance(layer, nn.Linear) and not layer.weight.requires_grad
    return plain_product(layer.weight, layer.bias if with_bias else None, computing_dtype(x))


def groups_at_a_time(device: torch.device, group_size: int, *, on_gpu: int = 2**24) -> int:
    """The number of groups to quantize or decode at once, in float32.

    They fit into a CPU's cache, or fill a GPU.

    on_gpu: weights at a time there; with fewer, launches take longer than the work.
    """
    num_weights = 2**18 if device.type == "cpu" else on_gpu
    return max(1, num_weights // group_size)


def packed_forms(weight: str, layer: QuantizedWeight) -> dict[str, TensorForm]:
    """The dtypes and shapes of a quantized weight's tensors in a file."""
    forms = {weight + suffix: form for suffix, form in layer.stored_forms().items()}
    whole = layer.stored_whole()
    return forms | {
        weight + suffix: TensorForm(values.dtype, tuple(values.shape))
        for suffix, values in whole.items()
    }
