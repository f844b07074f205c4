"""Products with a frozen layer's weight W [out, in] in forward and backward passes.

A product is made for one call of a layer, while its weight is gathered. FSDP2 may free the weight
between two uses: it refills the same tensors before the next one.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from fsdp_qlora.model.architecture.precision import autocast_kind


class FrozenProduct(Protocol):
    """Products with a weight W [out, in] for x [N, in] and grad_y [N, out]."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation, and of all arguments."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias b [out] in `dtype`."""

    def multiply(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Each x W^T + b, in new tensors. W is decoded once for all of them."""

    def multiply_grad(self, grad_y: torch.Tensor) -> torch.Tensor:
        """grad_y W, the gradient of x, in a new tensor."""

    def add_product(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add x W^T to y [N, out], without the bias."""

    def add_grad(self, grad_x: torch.Tensor, grad_y: torch.Tensor) -> None:
        """Add grad_y W to grad_x [N, in]."""

    def decode(self) -> torch.Tensor:
        """W in `dtype`, for several products."""


class PlainProduct(NamedTuple):
    """Products with a weight that is not quantized, in any dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    # Cast at each use, since FSDP2 may free the weight's memory between the two passes.
    def decode(self) -> torch.Tensor:
        return self.weight.to(self.dtype)

    def multiply(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [F.linear(x, self.decode(), self.bias) for x in inputs]

    def multiply_grad(self, grad_y: torch.Tensor) -> torch.Tensor:
        return grad_y @ self.decode()

    def add_product(self, y: torch.Tensor, x: torch.Tensor) -> None:
        y.addmm_(x, self.decode().T)

    def add_grad(self, grad_x: torch.Tensor, grad_y: torch.Tensor) -> None:
        grad_x.addmm_(grad_y, self.decode())


class QuantizedProduct(NamedTuple):
    """Products with a matrix of a quantized weight.

    layer: a QuantizedWeight. matrix: the selected `Matrix`. tensors: those of the layer.
    """

    layer: Any
    matrix: Any
    bias: torch.Tensor | None
    tensors: Any

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.layer.compute_dtype
        return dtype

    def decode(self) -> torch.Tensor:
        weight: torch.Tensor = self.layer.upright(self.matrix, self.dtype, self.tensors)
        return weight

    def multiply(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [self.layer.multiply(self.matrix, x, self.bias, self.tensors) for x in inputs]

    def multiply_grad(self, grad_y: torch.Tensor) -> torch.Tensor:
        grad_x: torch.Tensor = self.layer.multiply_grad(self.matrix, grad_y, self.tensors)
        return grad_x

    def add_product(self, y: torch.Tensor, x: torch.Tensor) -> None:
        self.layer.add_product(self.matrix, y, x, self.tensors)

    def add_grad(self, grad_x: torch.Tensor, grad_y: torch.Tensor) -> None:
        self.layer.add_grad(self.matrix, grad_x, grad_y, self.tensors)


class ProductInParts(NamedTuple):
    """Products with a matrix that is decoded in parts of its rows, which stay in a CPU's cache.

    parts: (rows of the matrix, selection of the part).
    """

    layer: Any
    matrix: Any
    bias: torch.Tensor | None
    tensors: Any
    parts: list[tuple[slice, Any]]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.layer.compute_dtype
        return dtype

    def decode(self) -> torch.Tensor:
        return self._decoded(self.matrix)

    def _decoded(self, part: Any) -> torch.Tensor:
        weight: torch.Tensor = self.layer.decode_tensors(part, self.dtype, self.tensors)
        return weight

    def multiply(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        num_rows, _ = self.matrix.shape
        outputs = [x.new_empty(x.shape[0], num_rows) for x in inputs]
        for rows, part in self.parts:
            decoded = self._decoded(part)
            # Each part is decoded once for all inputs.
            for x, y in zip(inputs, outputs, strict=True):
                torch.mm(x, decoded.T, out=y[:, rows])
            # Freed before the next part is decoded.
            del decoded
        if self.bias is None:
            return outputs
        return [y.add_(self.bias) for y in outputs]

    def multiply_grad(self, grad_y: torch.Tensor) -> torch.Tensor:
        _, num_columns = self.matrix.shape
        grad_x = grad_y.new_empty(grad_y.shape[0], num_columns)
        # beta 0 ignores the uninitialized memory.
        self._add_grad(grad_x, grad_y, beta=0)
        return grad_x

    def add_product(self, y: torch.Tensor, x: torch.Tensor) -> None:
        for rows, part in self.parts:
            y[:, rows].addmm_(x, self._decoded(part).T)

    def add_grad(self, grad_x: torch.Tensor, grad_y: torch.Tensor) -> None:
        self._add_grad(grad_x, grad_y, beta=1)

    def _add_grad(self, grad_x: torch.Tensor, grad_y: torch.Tensor, *, beta: int) -> None:
        """beta * grad_x + grad_y W: a sum over parts of W's rows."""
        for index, (rows, part) in enumerate(self.parts):
            decoded = self._decoded(part)
            grad_x.addmm_(grad_y[:, rows], decoded, beta=1 if index else beta)
            del decoded


def plain_product(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> PlainProduct:
    """The products with a weight [out, in] that is not quantized."""
    return PlainProduct(weight, None if bias is None else bias.to(dtype), dtype)


def computing_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a plain layer multiplies x."""
    kind = autocast_kind(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
