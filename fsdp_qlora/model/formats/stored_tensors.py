"""Tensors in files, those of a quantized weight, and tensors that are decoded from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp_qlora.utils.errors import UserError

# The last sentence of an error about a format that is not read.
ADVICE = "Give the model with 16- or 32-bit weights."
# A tensor of one of these types is a weight or a statistic, not codes.
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# E8M0 holds powers of two only: it is a type of scales, never of weights.
FLOAT_TYPES = (*WEIGHT_TYPES, torch.float8_e8m0fnu)
_PIECE = 2**20  # elements decoded at a time: decoding needs several times their memory

# (name, start, stop) -> elements [start, stop) of a row-major flattened tensor in the files, not
# decoded.
ReadStored = Callable[[str, int, int], torch.Tensor]
Encoded = Iterator[tuple[str, int, torch.Tensor]]  # (tensor in the files, first element, values)


class StoredTensor(NamedTuple):
    """A tensor in a file. start: the offset of its bytes."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int

    def in_bytes(self) -> "StoredTensor":
        """The tensor as its bytes, uint8 [.., bytes of the last dim]."""
        *rows, columns = self.shape or (1,)
        return self._replace(
            dtype=torch.uint8, shape=torch.Size([*rows, columns * self.dtype.itemsize])
        )


class Part(NamedTuple):
    """One of the tensors that a quantized weight consists of."""

    source: str
    """The tensor's name in the files."""
    tensor: StoredTensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight's tensors in the files."""

    name: str
    """The weight's name in the model."""
    codes: Part
    scale: Part
    global_scale: Part | None = None
    """NVFP4's scale beyond those of groups."""
    zero_point: Part | None = None
    """For integers."""
    group_index: Part | None = None
    """For integers: the group of each column."""

    @property
    def folder(self) -> Path:
        return self.codes.tensor.file.parent


class DecodedTensor:
    """A tensor that is decoded from tensors in the files, several units at a time.

    Units are elements, rows or experts. parts: names of the tensors in the files. unit: number of
    elements that can only be decoded together.
    """

    def __init__(
        self, parts: list[str], shape: torch.Size, dtype: torch.dtype, *, unit: int
    ) -> None:
        self.parts = parts
        self.shape = shape
        self.dtype = dtype
        self.unit = unit

    def read_flat(self, read: ReadStored, start: int, stop: int) -> torch.Tensor:
        """Decode elements [start, stop) of the row-major flattened tensor."""
        decoded = torch.empty(stop - start, dtype=self.dtype)
        last_unit = -(-stop // self.unit)
        step = max(1, _PIECE // self.unit)
        for begin in range(start // self.unit, last_unit, step):
            end = min(begin + step, last_unit)
            # A rank's rows need not begin or end with a unit: what it decodes beyond them is cut.
            offset = begin * self.unit
            first = max(start, offset)
            last = min(stop, end * self.unit)
            values = self.decode_units(read, begin, end).reshape(-1)
            decoded[first - start : last - start] = values[first - offset : last - offset]
        return decoded

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        """Decode units [begin, end)."""
        raise NotImplementedError

    def encode(self, read: ReadStored, start: int, values: torch.Tensor) -> Encoded:
        """Round flat values of whole units, from element `start` on, to the format of the files.

        Scales of the whole tensor stay as they are, and clip larger values. Raises UserError if the
        format has no rounding here.
        """
        raise UserError(f"{self.parts[0]} is in a format that weights cannot be rounded to here.")


class Float32Tensor(DecodedTensor):
    """A tensor of other floats as float32, or as the bytes of that."""

    def __init__(self, part: Part, *, in_bytes: bool = False) -> None:
        rounded = part.tensor._replace(dtype=torch.float32)
        rounded = rounded.in_bytes() if in_bytes else rounded
        # One number: an element, or its four bytes.
        unit = torch.float32.itemsize // rounded.dtype.itemsize
        super().__init__([part.source], rounded.shape, rounded.dtype, unit=unit)

    def decode_units(self, read: ReadStored, begin: int, end: int) -> torch.Tensor:
        return read(self.parts[0], begin, end).float().view(self.dtype)


def wrong_type(part: Part, types: Sequence[torch.dtype]) -> str:
    """Say what is wrong with the type of a tensor; empty if nothing is."""
    if part.dtype in types:
        return ""
    return (
        f"{part.source} is {str(part.dtype)[6:]} and must be "
        f"{' or '.join(str(dtype)[6:] for dtype in types)}"
    )
