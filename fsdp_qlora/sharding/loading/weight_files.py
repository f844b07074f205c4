"""The safetensors files of a model folder: the place of each tensor, and reading any part of it.

Parts are read into buffers and not through a memory map: mapped pages count towards the process's
memory.
"""

import bisect
import itertools
import json
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fsdp_qlora.model.formats.bitsandbytes import packed_tensors
from fsdp_qlora.model.formats.find_weights import decode_weights, keep_weights
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.stored_tensors import DecodedTensor, StoredTensor
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, read_named
from fsdp_qlora.utils.hub import conversion_advice
from fsdp_qlora.utils.safetensors_files import DTYPES, INDEX, TensorForm, bytes_of, weight_files
from fsdp_qlora.utils.text import printable, shown
from fsdp_qlora.utils.verified_files import ChunkChecksums, Damaged

_DOWNLOAD_AGAIN = (
    "Download it again; a git clone without git-lfs holds only pointers to the weights."
)
BUFFER = "FSDP_QLORA_LOADING_BUFFER_MIB"  # host memory for weights that are read and not yet stored
_SMALL_BYTES = 2**16  # smaller buffers come from malloc: a mapping costs a call of the system
_LONGEST_NAME = 1000  # characters; longer ones are no model's and would fill a screen
_READERS = 4  # threads; a single one cannot saturate a network disk


class TensorSlice(NamedTuple):
    """Elements [start, stop) of the row-major flattened tensor `name`."""

    name: str
    start: int
    stop: int


class _Joined(NamedTuple):
    """A concatenation of tensors or of elements of them. ends: of each part, in elements."""

    parts: list[TensorSlice]
    ends: list[int]
    dtype: torch.dtype
    shape: torch.Size


class _Borrowed(NamedTuple):
    """A tensor of other files."""

    files: "WeightFiles"
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.files.dtype(self.name)

    @property
    def shape(self) -> torch.Size:
        return self.files.shape(self.name)


class WeightFiles:
    """The safetensors files of a model folder, single or indexed.

    Tensors in float64 are rounded to float32 as they are read, since no quantizer supports float64.

    Args:
        stored: the format of tensors that are decoded as they are read, under the model's names and
            shapes.
        packed: the format of tensors that are presented as bytes, under the names that quantized
            layers give them.
        in_bytes: present every tensor as bytes, not only those of packed weights.
        file: use only this file of the folder.
        checksums: of tensors in bytes, which are verified as they are read.
    Attributes:
        files: tensor name -> file that contains it, or its first part.
        bytes_read: number of bytes of tensors that this process has read.
    Raises:
        UserError: there are no safetensors files, one is missing or damaged, or tensors do not fit
            the format `stored`.
    """

    def __init__(
        self,
        folder: Path,
        stored: PublishedFormat | None = None,
        *,
        packed: PublishedFormat | None = None,
        in_bytes: bool = False,
        file: str | None = None,
        checksums: Mapping[str, ChunkChecksums] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self._checksums = checksums
        self.bytes_read = 0
        self._lock = threading.Lock()
        entries = _read_header(folder / file) if file else self._index()
        for name in entries if in_bytes else packed_tensors(entries):
            if name in entries:
                entries[name] = entries[name].in_bytes()
        self._entries = entries
        if packed:
            # Turns entries into bytes in place, and so comes before `_tensors`.
            decoded, unknown = keep_weights(packed, entries)
        else:
            decoded, unknown = decode_weights(stored, entries)
        self._tensors: dict[str, StoredTensor | DecodedTensor | _Joined | _Borrowed] = dict(
            self._entries
        )
        self._tensors |= decoded
        files = {name: entry.file for name, entry in self._entries.items()}
        files |= {name: files[tensor.parts[0]] for name, tensor in decoded.items()}
        self.files = {name: file for name, file in files.items() if name not in unknown}

    def _index(self) -> dict[str, StoredTensor]:
        index = self.folder / INDEX
        if not index.is_file():
            files = weight_files(self.folder)
            if not files:
                raise UserError(f"{self.folder} has no .safetensors file. {self._other_weights()}")
            return _merge_headers(files)
        try:
            weight_map: dict[str, str] = dict(json.loads(read_named(index))["weight_map"])
            names = sorted(set(weight_map.values()))
            # An index is a stranger's file: "../../secret" must not be opened.
            outside = [name for name in names if Path(name).name != name]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{index} is not a safetensors index: {error!r}. {_DOWNLOAD_AGAIN}"
            ) from error
        if outside:
            raise UserError(
                f"{index} names {outside[0]!r}, which is not a file of its folder. "
                f"{_DOWNLOAD_AGAIN}"
            )
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise UserError(f"{index} names missing files: {', '.join(missing)}. Download them.")
        headers = {name: _read_header(self.folder / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in headers[name]:
                raise UserError(f"{self.folder / name} has no tensor {tensor}. {_DOWNLOAD_AGAIN}")
        return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}

    def _other_weights(self) -> str:
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        if not pickled:
            return "Download the model's weights into it."
        return (
            f"It has {', '.join(pickled[:3])}, but pickled weights are not supported: they can run "
            f"code. {conversion_advice(str(self.folder))}"
        )

    def join(self, name: str, parts: Sequence[TensorSlice], shape: torch.Size) -> None:
        """Define `name` as a tensor of this shape: the elements of `parts`, one after another."""
        dtypes = {self.dtype(part.name) for part in parts}
        if len(dtypes) > 1:
            raise UserError(
                f"The parts of {name} in {self.folder} have different types: "
                f"{sorted(map(str, dtypes))}."
            )
        ends = list(itertools.accumulate(part.stop - part.start for part in parts))
        assert ends[-1] == shape.numel(), name
        self._tensors[name] = _Joined(list(parts), ends, self.dtype(parts[0].name), shape)
        self.files[name] = self.files[parts[0].name]

    def grow(self, name: str, shape: torch.Size) -> None:
        """Extend a matrix to the rows of `shape`; the new rows are copies of its first ones."""
        size = self.shape(name).numel()
        if shape[1:] == self.shape(name)[1:] and size < shape.numel():
            parts: list[TensorSlice] = []
            for start in range(0, shape.numel(), size):
                count = min(size, shape.numel() - start)
                parts += self._whole_tensors(name, 0, count)
            self.join(name, parts, shape)

    def define(self, name: str, tensor: DecodedTensor) -> None:
        """Define `name` as a tensor that is computed from tensors in the files."""
        self._tensors[name] = tensor
        self.files[name] = self.files[tensor.parts[0]]

    def borrow(self, other: "WeightFiles") -> None:
        """Present the tensors of other files, too; where both have a name, the own tensor."""
        for name in other.files.keys() - self.files.keys():
            self._tensors[name] = _Borrowed(other, name)
        self.files = other.files | self.files

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def form(self, name: str) -> TensorForm:
        return TensorForm(self.dtype(name), tuple(self.shape(name)))

    def origins(self, name: str) -> dict[str, Path]:
        """The tensors in the files that `name` consists of -> their files."""
        tensor = self._tensors[name]
        if isinstance(tensor, _Joined):
            joined: dict[str, Path] = {}
            for part in tensor.parts:
                joined |= self.origins(part.name)
            return joined
        if isinstance(tensor, _Borrowed):
            return tensor.files.origins(tensor.name)
        origins = [name] if isinstance(tensor, StoredTensor) else tensor.parts
        return {origin: self._entries[origin].file for origin in origins}

    def parts(self, name: str) -> list[TensorSlice]:
        """The decoded tensors in the files, or slices of them, that make up the tensor `name`."""
        return list(self._whole_tensors(name, 0, self.shape(name).numel()))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of dim 0, on the CPU, in the file's dtype."""
        shape = self.shape(name)
        row = math.prod(shape[1:])
        return self.read_flat(name, start * row, stop * row).view(stop - start, *shape[1:])

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of the row-major flattened tensor, in the file's dtype.

        They are on the CPU. Several threads may read at the same time.

        Raises:
            Damaged: a checksum of the tensor differs, or its file cannot be read.
        """
        borrowed = self._tensors[name]
        if isinstance(borrowed, _Borrowed):
            return borrowed.files.read_flat(name, start, stop)
        if name in self._checksums:
            return self._read_verified(name, start, stop)
        part = _buffer(stop - start, self.dtype(name))
        filled = 0
        for source, first, last in self._whole_tensors(name, start, stop):
            piece = part[filled : filled + last - first]
            tensor = self._tensors[source]
            if isinstance(tensor, DecodedTensor):
                piece.copy_(tensor.read_flat(self._read_stored, first, last))
            else:
                self._read_into(source, first, piece)
            filled += last - first
        return part

    def unit(self, name: str) -> int:
        """The number of elements of a tensor that can only be decoded, and encoded, together."""
        tensor = self._tensors.get(name)
        return tensor.unit if isinstance(tensor, DecodedTensor) else 1

    def encode(
        self, name: str, start: int, values: torch.Tensor
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Flat values of whole units as (tensor in the files, first element, values).

        They are rounded to the format of the files if the tensor is decoded as it is read.
        """
        tensor = self._tensors.get(name)
        if isinstance(tensor, DecodedTensor):
            yield from tensor.encode(self._read_stored, start, values)
        else:
            yield name, start, values

    def _read_verified(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes [start, stop) of a tensor that has checksums."""
        # No bytes have no checksum.
        if start == stop:
            return self._read_stored(name, start, stop)
        checksums = self._checksums[name]
        begin, end = checksums.whole_chunks(start, stop, self.shape(name).numel())
        try:
            content = self._read_stored(name, begin, end)
        except UserError as error:
            raise Damaged(str(error)) from error
        checksums.check(content, begin, file=self.files[name], name=name)
        return content[start - begin : stop - begin]

    def _read_stored(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of a tensor in the files without decoding them."""
        part = _buffer(stop - start, self._entries[name].dtype)
        self._read_into(name, start, part)
        return part

    def _whole_tensors(self, name: str, start: int, stop: int) -> Iterator[TensorSlice]:
        """The non-empty slices of tensors in the files that hold elements [start, stop)."""
        tensor = self._tensors[name]
        if not isinstance(tensor, _Joined):
            if start < stop:
                yield TensorSlice(name, start, stop)
            return
        # The first part that ends behind `start`: a bisection, as experts make thousands of parts.
        index = bisect.bisect_right(tensor.ends, start)
        while start < stop:
            begin = tensor.ends[index - 1] if index else 0
            last = min(stop, tensor.ends[index])
            part = tensor.parts[index]
            # From an element of the whole to one of the part's own tensor.
            shift = part.start - begin
            yield TensorSlice(part.name, start + shift, last + shift)
            start = last
            index += 1

    def _read_into(self, name: str, start: int, part: torch.Tensor) -> None:
        entry = self._entries[name]
        buffer = bytes_of(part)
        try:
            # Unbuffered, straight into the tensor's memory. Each read opens the file, so that
            # threads do not share a position.
            with entry.file.open("rb", buffering=0) as file:
                file.seek(entry.start + start * entry.dtype.itemsize)
                # Linux reads at most 2 GiB at a time, and a network disk may give less.
                while buffer:
                    count = file.readinto(buffer)
                    if not count:
                        raise OSError("the file has become shorter")
                    buffer = buffer[count:]
        except OSError as error:
            raise UserError(f"{entry.file} cannot be read ({error}). {_DOWNLOAD_AGAIN}") from error
        with self._lock:
            self.bytes_read += part.nbytes


def _buffer(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor whose memory is returned to the system as soon as it is freed.

    malloc keeps memory that reading threads allocate and another thread frees: 150 MiB and more.
    """
    size = count * dtype.itemsize
    if size < _SMALL_BYTES:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)


def _merge_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """The tensors of files without an index."""
    entries: dict[str, StoredTensor] = {}
    for path in files:
        for name, entry in _read_header(path).items():
            if name in entries:
                raise UserError(
                    f"{path} and {entries[name].file.name} both have tensor {name}, and no index "
                    "says which one to use. Leave only the model's own files in the folder."
                )
            entries[name] = entry
    return entries


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. safetensors itself checks that the file is complete and consistent."""
    try:
        with open_named(path) as file, safe_open(path, framework="pt"):
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable safetensors file ({error}). {_DOWNLOAD_AGAIN}"
        ) from error
    header.pop("__metadata__", None)
    # Names appear in messages and logs, and a terminal would obey control characters in them.
    odd = [
        name
        for name in header
        if printable(name) != name or "\n" in name or len(name) > _LONGEST_NAME
    ]
    if odd:
        raise UserError(
            f"{path} has a tensor named {shown(odd[0])}, which no model has. {_DOWNLOAD_AGAIN}"
        )
    unknown = {tensor["dtype"] for tensor in header.values()} - DTYPES.keys()
    if unknown:
        raise UserError(
            f"{path} has tensors of type {', '.join(unknown)}, which cannot be read here."
        )
    # The format: 8 bytes with the header's size, the header in JSON, and then the tensors' bytes,
    # from which offsets are counted.
    data = 8 + size
    return {
        name: StoredTensor(
            path,
            DTYPES[form["dtype"]],
            torch.Size(form["shape"]),
            data + form["data_offsets"][0],
        )
        for name, form in header.items()
    }


class Weights(NamedTuple):
    """A model's weights in files.

    sources: name of each tensor in the model -> its name in the files. packed: whether the weights
    in the files are quantized already, in the format of the layers. left_out: tensors of the files
    that the model does not have, such as those that predict more tokens. copies: tensor of the
    files that is the same as one of the model's, such as a tied head -> that one.
    """

    files: WeightFiles
    sources: Mapping[str, str]
    packed: bool = False
    left_out: Sequence[str] = ()
    copies: Mapping[str, str] = MappingProxyType({})

    def read_whole(self, name: str) -> torch.Tensor:
        """Read one of the model's tensors, on the CPU, in the file's dtype."""
        source = self.sources[name]
        return self.files.read_rows(source, 0, self.files.shape(source)[0])


def read_ahead(
    weight_files: WeightFiles, parts: Iterable[TensorSlice], *, max_bytes: int
) -> Iterator[torch.Tensor]:
    """Yield the parts in order. Threads read ahead while the caller works on earlier ones.

    At most `max_bytes` are read and not yet yielded, except that a single part may exceed it.
    """
    waiting: list[tuple[int, Future[torch.Tensor]]] = []
    in_flight = 0
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weight_files") as pool:
        # One list in the order of the parts: what comes out is in their order, whichever thread is
        # the first to be done.
        for part in parts:
            count = (part.stop - part.start) * weight_files.dtype(part.name).itemsize
            while waiting and in_flight + count > max_bytes:
                done, future = waiting.pop(0)
                yield future.result()
                in_flight -= done
            waiting.append((count, pool.submit(weight_files.read_flat, *part)))
            in_flight += count
        while waiting:
            yield waiting.pop(0)[1].result()
