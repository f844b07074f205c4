"""Writes safetensors files tensor by tensor, or part by part.

Dtypes and shapes are known in advance, so the header can be written first.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from fsdp_qlora.utils.files import FileRecord, flush, read_named

# The format's names of dtypes: github.com/huggingface/safetensors, README, "Format".
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
_FILE_BYTES = 4 * 2**30  # hubs and network disks handle files of this size well


class TensorForm(NamedTuple):
    """The dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a model folder without an index."""
    # Others beside it are of other kinds, such as an adapter.
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    return sorted(filter(Path.is_file, folder.glob("*.safetensors")))


def tensor_names(folder: Path) -> set[str] | None:
    """The names of the tensors in a model folder; None if its files cannot be read here."""
    try:
        # The index is here before the weights are downloaded.
        if (folder / INDEX).is_file():
            return set(dict(json.loads(read_named(folder / INDEX))["weight_map"]))
        names = set[str]()
        files = weight_files(folder)
        for file in files:
            with safe_open(file, framework="pt") as content:
                names |= set(content.keys())
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # reading the weights says what is wrong
    return names if files else None


def layout(forms: Mapping[str, TensorForm]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors in order, and each tensor's offset in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for name, form in forms.items():
        starts[name] = end
        end = end + form.num_bytes
        header[name] = {
            "dtype": DTYPE_NAMES[form.dtype],
            "shape": form.shape,
            "data_offsets": [starts[name], end],
        }
    # The format: 8 bytes with the length of the header, the header, and the tensors' bytes. Spaces
    # behind the JSON are allowed; with them the tensors begin at a multiple of 8.
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    offsets = {name: 8 + len(text) + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, offsets


def write_tensors(
    path: Path, forms: Mapping[str, TensorForm], values: Iterable[torch.Tensor]
) -> FileRecord:
    """Write and flush a file, one tensor at a time.

    Args:
        forms: name -> dtype and shape of each tensor, in the order of `values`.
        values: tensors on the CPU.
    Raises:
        OSError: the file could not be written; `values` has been consumed.
    """
    header, _ = layout(forms)
    digest = hashlib.sha256(header)
    values = iter(values)
    try:
        with path.open("wb") as file:
            file.write(header)
            for tensor in values:
                content = bytes_of(tensor.contiguous())
                digest.update(content)
                file.write(content)
        flush(path)
    finally:
        # Also after a full disk: making a value may be a collective, in which other ranks wait.
        for _ in values:
            pass
    num_bytes = len(header) + sum(form.num_bytes for form in forms.values())
    return FileRecord(num_bytes, digest.hexdigest())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, without a copy."""
    # As bytes, since numpy has no bfloat16 and no float8.
    # Any: numpy before 2.5 does not declare a buffer.
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class PackedFiles:
    """A model's safetensors files, written by several processes.

    One process calls `create`; then any process may `write` parts, and calls `sync` after its last
    part.
    """

    def __init__(self, folder: Path, forms: Mapping[str, TensorForm]) -> None:
        self._headers: dict[Path, bytes] = {}
        self._sizes: dict[Path, int] = {}
        # From tensor to its file, and the offset of its bytes.
        self._places: dict[str, tuple[Path, int]] = {}
        self.folder = folder
        self.forms = forms
        self._split = split_state_dict_into_shards_factory(
            dict(forms),
            get_storage_size=lambda form: form.num_bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=_FILE_BYTES,
        )
        for file, names in self._split.filename_to_tensors.items():
            # Wide dtypes first, as in safetensors itself: then every tensor is aligned.
            wide_first = sorted(names, key=lambda name: -forms[name].dtype.itemsize)
            inside = {name: forms[name] for name in wide_first}
            header, starts = layout(inside)
            path = folder / file
            self._headers[path] = header
            self._sizes[path] = len(header) + sum(form.num_bytes for form in inside.values())
            self._places |= {name: (path, start) for name, start in starts.items()}

    @property
    def num_bytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(self._sizes.values())

    def create(self) -> None:
        """Create the files in full size with headers, and an index if there are several."""
        # Full size, so that each process writes its parts at their offsets, in any order.
        for path, header in self._headers.items():
            with path.open("wb") as file:
                file.write(header)
                file.truncate(self._sizes[path])
        if self._split.is_sharded:
            weight_map = dict(sorted(self._split.tensor_to_filename.items()))
            index = {"metadata": self._split.metadata, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write the bytes of `values`, a CPU tensor, at byte `start` of the tensor `name`."""
        buffer = bytes_of(values)
        path, position = self._places[name]
        assert start + len(buffer) <= self.forms[name].num_bytes, name
        with path.open("r+b") as file:
            file.seek(position + start)
            file.write(buffer)

    def sync(self) -> None:
        """Wait until this process's writes are on disk."""
        for path in self._headers:
            flush(path)
