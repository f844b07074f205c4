"""A file of prompts in the cache, which is written while they come and read without being loaded.

It is a safetensors file. Texts are appended first, and everything else is known at the end, when
the header in front of them is filled in: it has a fixed size.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np

from fsdp_qlora.data.batches.report import DataReport, report_as_json, report_of_json
from fsdp_qlora.data.batches.row_images import (
    NO_IMAGES,
    RowImages,
    images_of_rows,
    join_images,
)
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.prompt_texts import decode, encode
from fsdp_qlora.data.prompts import Beside, Prompt, Prompts
from fsdp_qlora.utils.verified_files import Arrays, Metadata, read_verified

_HEADER_BYTES = 1024  # with its size in front
# Texts are filled up to a multiple of it, so that the arrays behind them are aligned.
_ALIGNED = 8
# The arrays in their order in the file, with the names of their types.
_TYPES = {
    "texts": (np.uint8, "U8"),
    "text_offsets": (np.int64, "I64"),
    "id_offsets": (np.int64, "I64"),
    "row_numbers": (np.int64, "I64"),
    # Flat arrays of `RowImages`, which a file of text alone has not.
    "image_sizes": (np.int64, "I64"),
    "images": (np.uint8, "U8"),
    "ids": (np.int32, "I32"),
    "report": (np.uint8, "U8"),
}
_OF_IMAGES = ("image_sizes", "images")


class PromptFile:
    """Writes prompts to a file.

    Texts are appended at once. Tokens stay in memory until the end, four bytes for each.

    Args:
        path: of the file, which is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(b" " * _HEADER_BYTES)
        self._hash = _new_hash()
        self._num_text_bytes = 0
        self._text_lengths: list[np.ndarray] = []
        self._id_lengths: list[np.ndarray] = []
        self._row_numbers: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._images: list[RowImages] = []

    def __enter__(self) -> "PromptFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Append prompts.

        Raises:
            NotEncodable: a value of them cannot be kept.
            OSError: the file cannot be written.
        """
        texts = [encode(Beside.of(prompt)) for prompt in prompts]
        self._append(b"".join(texts))
        self._num_text_bytes += sum(map(len, texts))
        ids = [np.array(prompt.ids, np.int32) for prompt in prompts]
        self._text_lengths.append(_lengths(texts))
        self._id_lengths.append(_lengths(ids))
        self._row_numbers.append(np.array([prompt.row_number for prompt in prompts], np.int64))
        self._ids.append(np.concatenate([np.zeros(0, np.int32), *ids]))
        self._images.append(images_of_rows([prompt.images for prompt in prompts]))

    def finish(self, report: DataReport) -> None:
        """Write what is left, and the header. Raises OSError."""
        fill = -self._num_text_bytes % _ALIGNED
        self._append(b" " * fill)
        of_report = report_as_json(report).encode()
        pieces = {
            "text_offsets": [_offsets(self._text_lengths)],
            "id_offsets": [_offsets(self._id_lengths)],
            "row_numbers": self._row_numbers,
        }
        images = join_images([NO_IMAGES, *self._images], [0, *map(len, self._row_numbers)])
        if len(images):
            pieces |= {"image_sizes": [images.sizes.ravel()], "images": [images.names.ravel()]}
        pieces |= {"ids": self._ids, "report": [np.frombuffer(of_report, np.uint8)]}
        for arrays in pieces.values():
            for array in arrays:
                self._append(array.data)
        sizes = {name: sum(map(len, arrays)) for name, arrays in pieces.items()}
        sizes["texts"] = self._num_text_bytes + fill
        self._file.seek(0)
        self._file.write(_header(sizes, self._hash.hexdigest()))

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)


def _new_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


def _lengths(items: Iterable[bytes | np.ndarray]) -> np.ndarray:
    return np.array([len(item) for item in items], np.int64)


def _offsets(lengths: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))


def _header(sizes: Mapping[str, int], digest: str) -> bytes:
    """The header of the file. sizes: values of each array."""
    header: dict[str, object] = {"__metadata__": {"digest": digest}}
    begin = 0
    for name, (dtype, type_name) in _TYPES.items():
        if name not in sizes:
            continue
        end = begin + sizes[name] * np.dtype(dtype).itemsize
        header[name] = {"dtype": type_name, "shape": [sizes[name]], "data_offsets": [begin, end]}
        begin = end
    num_bytes = _HEADER_BYTES - 8
    text = json.dumps(header).encode().ljust(num_bytes)
    assert len(text) == num_bytes
    return num_bytes.to_bytes(8, "little") + text


class _Texts:
    """Contents, columns and the rest of prompts, as texts in mapped memory.

    Args:
        texts: UTF-8, uint8 [bytes].
        offsets: the bounds of each text, int64 [prompts + 1].
    """

    def __init__(self, texts: np.ndarray, offsets: np.ndarray) -> None:
        self._texts = texts
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int, /) -> Beside:
        return decode(self._texts[self._offsets[row] : self._offsets[row + 1]].tobytes())


class KeptPrompts:
    """The content of a file of prompts."""

    def __init__(self, arrays: Arrays, metadata: Metadata) -> None:
        names = [name for name in _TYPES if name in arrays or name not in _OF_IMAGES]
        self._arrays = {name: arrays[name] for name in names}
        self.report = report_of_json(arrays["report"].tobytes())

    @cached_property
    def digest(self) -> str:
        total = _new_hash()
        for array in self._arrays.values():
            total.update(array.data)
        return total.hexdigest()

    @property
    def _images(self) -> RowImages:
        if "images" not in self._arrays:
            return NO_IMAGES
        names = self._arrays["images"].reshape(-1, NO_IMAGES.names.shape[1])
        return RowImages(names, self._arrays["image_sizes"].reshape(-1, 2))

    @property
    def prompts(self) -> Prompts:
        """The prompts, in mapped memory."""
        arrays = self._arrays
        ids = arrays["ids"]
        rows = TokenizedRows(
            ids,
            np.zeros(len(ids), np.bool_),
            arrays["id_offsets"],
            arrays["row_numbers"],
            images=self._images,
        )
        return Prompts.whole(rows, _Texts(arrays["texts"], arrays["text_offsets"]), self.digest)


def read_prompts(path: Path) -> KeptPrompts | None:
    """Map the prompts of a file, read-only.

    Returns None if there is no file, and raises Damaged as `read_verified` does.
    """
    return read_verified(path, KeptPrompts)
